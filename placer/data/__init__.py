"""Readers of training logs.

`open_log` returns a `Log`: chunks of samples whose ids are rows of tables.
"""

from typing import TYPE_CHECKING

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from placer.data.encoded import EncodedLog
    from placer.data.encoding import Encoding
    from placer.data.log import Bags, Chunk, Log
    from placer.data.names import FORMATS, ID_MAPPINGS
    from placer.data.reader import open_log
    from placer.data.schema import Schema

__all__ = [
    "FORMATS",
    "ID_MAPPINGS",
    "Bags",
    "Chunk",
    "EncodedLog",
    "Encoding",
    "Log",
    "Schema",
    "open_log",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "placer.data.encoded": "EncodedLog",
        "placer.data.encoding": "Encoding",
        "placer.data.log": "Bags Chunk Log",
        "placer.data.names": "FORMATS ID_MAPPINGS",
        "placer.data.reader": "open_log",
        "placer.data.schema": "Schema",
    },
)
