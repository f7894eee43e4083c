"""Readers of training logs.

`open_log` returns a `Log`: chunks of samples whose ids are rows of tables.
"""

from placer.data.encoded import EncodedLog
from placer.data.encoding import Encoding
from placer.data.log import Bags, Chunk, Log
from placer.data.reader import FORMATS, ID_MAPPINGS, open_log

__all__ = [
    "FORMATS",
    "ID_MAPPINGS",
    "Bags",
    "Chunk",
    "EncodedLog",
    "Encoding",
    "Log",
    "open_log",
]
