"""Reads ahead of a loop in a separate thread."""

import threading
from collections.abc import Callable, Generator
from contextlib import closing
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


def in_background(make: Callable[[], Generator[T]], depth: int = 2) -> Generator[T]:
    """Return the items of a generator, made by a thread that is at most `depth` items ahead.

    What the generator raises is raised here, in its place among the items. Leaving the loop, by
    closing or by an exception, ends the thread after the item that it is at. The thread makes the
    generator, and closes it.
    """
    results: SimpleQueue[tuple[T] | BaseException | None] = SimpleQueue()
    free = threading.Semaphore(depth)
    stopped = threading.Event()

    def work() -> None:
        end: BaseException | None = None
        try:
            with closing(make()) as items:
                free.acquire()
                for item in items:
                    results.put((item,))
                    free.acquire()
                    if stopped.is_set():
                        break
        except BaseException as error:
            end = error
        finally:
            results.put(end)

    # A daemon, so that a second Ctrl-C ends the program while a file is being read.
    thread = threading.Thread(target=work, name="placer reader", daemon=True)
    thread.start()
    try:
        while isinstance(result := results.get(), tuple):
            free.release()
            yield result[0]
        if result is not None:
            raise result
    finally:
        stopped.set()
        free.release()
        thread.join()
