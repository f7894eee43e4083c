"""Let a command finish its current work after Ctrl-C."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupt:
    """Records whether the user asked to stop."""

    def __init__(self) -> None:
        self.requested = False


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Record the first SIGINT, SIGTERM or SIGHUP in the `with` block. A second acts as usual.

    Python delivers signals only to the main thread. In other threads, this does nothing.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it.
        numbers.append(signal.SIGHUP)
    previous = {number: signal.getsignal(number) for number in numbers}

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
