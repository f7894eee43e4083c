"""Ctrl-C that lets what runs come to an end of its own."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupt:
    """Whether the user asked to stop."""

    def __init__(self) -> None:
        self.requested = False


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Note the first SIGINT or SIGTERM inside the `with` block; a second one acts as usual.

    Python delivers signals to the main thread alone; in others nothing is changed.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        interrupt.requested = True
        restore()

    for number in previous:
        signal.signal(number, note)
    try:
        yield interrupt
    finally:
        restore()
