"""What compressed files hold: all of their streams, to the file's last byte.

The readers of Python's library end a file at the first bytes that are no stream of theirs; here,
such bytes are an error that names their place.
"""

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from typing import Any

import pyarrow as pa

_PACKED_BYTES = 1 << 17
_FAILURES = (OSError, EOFError, lzma.LZMAError, zlib.error, pa.ArrowException)


class _Inflate:
    """A stream of gzip's, read as those of `bz2` and `lzma`."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(wbits=31)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._inflate.eof

    @property
    def unused_data(self) -> bytes:
        return self._inflate.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        part = self._inflate.decompress(self._inflate.unconsumed_tail + data, max_length)
        self.needs_input = not self._inflate.unconsumed_tail and len(part) < max_length
        return part


class Unpacked(io.RawIOBase):
    """The content of a compressed file, which may consist of several streams.

    Parameters
    ----------
    packed : binary file
        At its start; it is closed with this one.
    name : str
        Of the compression, for messages.
    make : callable
        Makes a decompressor for the stream that begins at a byte of the file.
    padding : int
        Zeros behind a stream are no content if their number is a multiple of this; 0 if there
        may be none.

    Examples
    --------
    >>> both = bz2.compress(b"1,2\\n") + bz2.compress(b"3,4\\n")
    >>> unpacked(io.BytesIO(both), ".bz2").readall()
    b'1,2\\n3,4\\n'
    >>> unpacked(io.BytesIO(both + b"x"), ".bz2").readall()
    Traceback (most recent call last):
    OSError: from byte 88 on there is no sound bz2 stream (Invalid data stream, by byte 89)
    """

    def __init__(
        self, packed: Any, name: str, make: Callable[[int], Any], padding: int = 0
    ) -> None:
        self._packed, self._name, self._make, self._padding = packed, name, make, padding
        # What was read and not unpacked yet, the byte of the file up to which was read, and the
        # one at which the stream begins that is read now.
        self._data, self._at, self._begin = b"", 0, 0
        self._stream: Any = None

    def readable(self) -> bool:
        """Always true."""
        return True

    def readinto(self, free: Any) -> int:
        """Fill a buffer; how many bytes there were, 0 at the file's end.

        Raises
        ------
        OSError
            If a stream is cut short or damaged, or something else is behind one; the message
            names the byte.
        """
        if not len(free):
            return 0  # A decompressor that may give nothing calls that an error.
        while self._stream is not None or self._begins():
            stream = self._stream
            if stream.needs_input and not self._more():
                raise OSError(
                    f"the file ends at byte {self._at}, within the {self._name} stream that "
                    f"begins at byte {self._begin}"
                )
            try:
                part = stream.decompress(self._data, len(free))
            except _FAILURES as error:
                raise OSError(
                    f"from byte {self._begin} on there is no sound {self._name} stream ({error}, "
                    f"by byte {self._at})"
                ) from error
            self._data = b""
            if stream.eof:
                self._data, self._stream = stream.unused_data, None
            if part:
                free[: len(part)] = part
                return len(part)
        return 0

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if not self.closed:
            self._packed.close()
        super().close()

    def _more(self) -> bool:
        """Make sure that packed bytes are at hand; False at the file's end."""
        if not self._data:
            self._data = self._packed.read(_PACKED_BYTES)
            self._at += len(self._data)
        return bool(self._data)

    def _begins(self) -> bool:
        """Go to the next stream, behind zeros that pad the one before; False at the file's end."""
        end = self._at - len(self._data)
        while end and self._more():
            self._data = self._data.lstrip(b"\0")
            if self._data:
                break
        is_there = self._more()
        self._begin = self._at - len(self._data)
        zeros = self._begin - end
        if zeros and (not self._padding or zeros % self._padding):
            raise OSError(f"{zeros} zero bytes from byte {end} on are no {self._name} stream")
        if is_there:
            self._stream = self._make(self._begin)
        return is_there


class _UnpackedZstd(io.RawIOBase):
    """The content of a file of Zstandard's frames, which Arrow reads to its end."""

    def __init__(self, packed: Any) -> None:
        self._packed, self._stream = packed, pa.CompressedInputStream(packed, "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, free: Any) -> int:
        try:
            return int(self._stream.readinto(free))
        except _FAILURES as error:
            raise OSError(f"{error}, by byte {self._packed.tell()}") from error

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            self._packed.close()
        super().close()


def _xz(begin: int) -> Any:
    # The format before it, which has but one stream a file, has no mark that tells it.
    return lzma.LZMADecompressor(lzma.FORMAT_XZ if begin else lzma.FORMAT_AUTO)


_UNPACKED: dict[str, Callable[[Any], io.RawIOBase]] = {
    ".gz": lambda packed: Unpacked(packed, "gzip", lambda _: _Inflate(), padding=1),
    ".bz2": lambda packed: Unpacked(packed, "bz2", lambda _: bz2.BZ2Decompressor()),
    ".xz": lambda packed: Unpacked(packed, "xz", _xz, padding=4),
    ".zst": _UnpackedZstd,
}
COMPRESSIONS = tuple(_UNPACKED)


def unpacked(packed: Any, suffix: str) -> io.RawIOBase:
    """What a file holds that is compressed as `suffix`, one of `COMPRESSIONS`, says."""
    return _UNPACKED[suffix](packed)
