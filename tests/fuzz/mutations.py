"""Changes of a file's bytes: of bits, of parts, and of numbers and texts where it has some."""

import random
import re

TOKENS = (
    b"9" * 400, b"-1", b"0", b"0.5", b"1e999", b"99999999999999999999", b"9223372036854775808",
    b"nan", b".inf", b"null", b"true", b"[]", b"{}", b'"""', b"[" * 2000, b"&a [*a]", b"*a",
    b"!!python/object:os.system x", b"\r", b"\t", b"\n", b"\0", b"\xff", b"\x1b[2J",
)  # fmt: skip
"""What is put in place of values, or between bytes."""
_VALUE = re.compile(rb'-?\d+(\.\d+)?|"[^"]*"|\btrue\b|\bnull\b')


def mutated(content: bytes, choose: random.Random) -> bytes:
    """The content with one change or a few."""
    data = bytearray(content)
    for _ in range(choose.choice([1, 1, 1, 2, 4])):
        if not data:
            break
        _change(data, choose)
    return bytes(data)


def _change(data: bytearray, choose: random.Random) -> None:
    place = choose.randrange(len(data))
    match choose.choice(["bit", "byte", "cut", "copy", "value", "value", "insert"]):
        case "bit":
            data[place] ^= 1 << choose.randrange(8)
        case "byte":
            data[place] = choose.choice([0, 127, 128, 255])
        case "cut":
            del data[place : place + choose.choice([1, 4, 50, len(data)])]
        case "copy":
            start = choose.randrange(len(data))
            data[place:place] = data[start : start + choose.choice([1, 8, 100])]
        case "value":
            spans = [found.span() for found in _VALUE.finditer(bytes(data))]
            if spans:
                start, stop = choose.choice(spans)
                data[start:stop] = choose.choice(TOKENS)
        case _:
            data[place:place] = choose.choice(TOKENS)
