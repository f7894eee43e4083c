"""The exchange of coming batches' lookups, beside the training of the present one."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from placer.executor.distributed.collectives import Communicator
from placer.executor.distributed.input_exchange import InputExchange
from placer.executor.distributed.sharded_batch import ShardedBatch
from placer.executor.distributed.table_ranks import NumberedBatch
from placer.executor.local.lookahead import on_every_rank
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import keep_until_used
from placer.executor.streams import recorded

SentBatch = Future[tuple[ShardedBatch, torch.cuda.Event | None]]
"""What the ranks ask of each other, or the error that one of them met; and, on a GPU, an event that
says when it is there. Made by `ShardedEmbeddings.send_ahead`, and used up by `prefetch`."""


class InputsAhead:
    """Exchanges inputs in a thread, one batch after the other in the order of asking.

    From the first batch sent ahead on, the exchange has the thread and a process group of its
    own, so that its collectives may come between those of the training in any way: only their
    own order matters, and it is the same on all ranks as long as these ask in the same order.

    Parameters
    ----------
    inputs : InputExchange
        No one else may call it.
    group : callable
        Makes the process group; all ranks call it at the same point of their loop.
    """

    def __init__(self, inputs: InputExchange, group: Callable[[], Communicator]) -> None:
        self._inputs, self.group = inputs, group
        self.comm: Communicator | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._lost: Exception | None = None

    def send(
        self, batch: BagBatch, number: NumberedBatch | None, training: bool = True
    ) -> SentBatch:
        """Begin a batch's exchange; `arrived` waits for it."""
        if self._thread is None:
            self.comm = self.group()
            self._inputs = replace(self._inputs, comm=self.comm)
            # Not a daemon: at exit Python waits for an exchange, at most its timeout.
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="placer exchange")
            if self._inputs.device.type == "cuda":
                self._stream = torch.cuda.Stream(self._inputs.device)  # type: ignore[no-untyped-call]
        made = None
        if self._stream is not None:
            with torch.cuda.device(self._inputs.device):
                made = recorded()
        open_steps = self._inputs.keys.begin_step(training)
        return self._thread.submit(self._exchange, batch, number, training, open_steps, made)

    def arrived(self, sent: SentBatch) -> ShardedBatch:
        """Return what the ranks ask of each other."""
        step, ready = sent.result()
        if ready is not None:
            stream = torch.cuda.current_stream(self._inputs.device)
            stream.wait_event(ready)
            keep_until_used(step, stream)
        return step

    def now(self, batch: BagBatch, number: NumberedBatch | None, training: bool) -> ShardedBatch:
        """Exchange a batch that was not sent ahead, after those that were."""
        if self._thread is None:
            step = self._inputs(batch, training, self._inputs.keys.begin_step(training))
            return replace(step, number=number)
        return self.arrived(self.send(batch, number, training))

    def wait(self) -> None:
        """Wait until all that was sent has come."""
        if self._thread is not None:
            self._thread.submit(int).result()

    def close(self) -> None:
        """Wait for what is on its way, whether anyone still wants it or not."""
        if self._thread is not None and self.comm is not None:
            self._thread.shutdown()
            self.comm.close()

    def _exchange(
        self,
        batch: BagBatch,
        number: NumberedBatch | None,
        training: bool,
        open_steps: int,
        made: "torch.cuda.Event | None",
    ) -> "tuple[ShardedBatch, torch.cuda.Event | None]":
        if self._lost is not None:
            raise self._lost  # Nobody would answer: do not wait for the timeout again.
        try:
            if self._stream is None:
                return replace(self._inputs(batch, training, open_steps), number=number), None
            with torch.cuda.device(self._inputs.device), torch.cuda.stream(self._stream):
                if made is not None:
                    self._stream.wait_event(made)
                step = self._inputs(batch, training, open_steps)
                return replace(step, number=number), recorded()
        except Exception as error:
            if not on_every_rank(error):
                self._lost = error
            raise
