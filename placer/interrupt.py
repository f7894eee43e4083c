"""End a command after Ctrl-C and other signals, at once or after its current work."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn


def end_by_signals() -> None:
    """End this process as Ctrl-C does at the first SIGTERM or SIGHUP: with a KeyboardInterrupt.

    Without this, the system ends it at once, and temporary files stay. The exception's argument is
    the signal's number. The next such signal ends the process at once. Only commands call this: in
    other programs, signals are theirs.
    """

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP.
            signal.signal(number, end)


def end_interrupted(interrupt: KeyboardInterrupt) -> NoReturn:
    """Say in one line which signal ended this process, and exit with 128 + its number."""
    number = interrupt.args[0] if interrupt.args else signal.SIGINT
    line = "\nAborted!" if number == signal.SIGINT else f"placer: {signal.strsignal(number)}"
    with contextlib.suppress(OSError):  # The terminal may be closed.
        print(line, file=sys.stderr, flush=True)
    sys.exit(128 + number)


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
    with contextlib.ExitStack() as previous:

        def note(number: int, frame: FrameType | None) -> None:
            interrupt.requested = True
            previous.close()

        for number in numbers:
            previous.callback(signal.signal, number, signal.signal(number, note))
        yield interrupt
