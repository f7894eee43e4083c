"""Readers of training logs.

`open_log` returns a `Log`: chunks of samples whose ids are rows of tables.
"""

from typing import TYPE_CHECKING

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from placer.data.encoding import Encoding as Encoding
    from placer.data.layout import FORMATS as FORMATS
    from placer.data.layout import ID_MAPPINGS as ID_MAPPINGS
    from placer.data.log import Bags as Bags
    from placer.data.log import Chunk as Chunk
    from placer.data.log import Log as Log
    from placer.data.reader import EncodedLog as EncodedLog
    from placer.data.reader import open_log as open_log
    from placer.data.schema import Schema as Schema

__getattr__, __all__ = lazy_exports(__name__)
