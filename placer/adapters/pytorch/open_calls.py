"""Which calls of a table that grows still need the rows that they have read."""

from weakref import WeakSet

from placer.adapters.pytorch.calls import Call
from placer.executor import BagBatch, Embeddings


class OpenCalls:
    """The training calls of one table, each a step of its key map.

    A call is open until its rows are updated, or until nobody can ask for their gradient any more:
    so long its rows keep their keys. Those that `collected` holds wait for the update.
    """

    def __init__(self, collected: list[Call]) -> None:
        self._collected = collected
        self._calls: WeakSet[Call] = WeakSet()
        self._steps = 0

    def steps(self) -> int:
        """Return how many of the last steps are open."""
        waiting = self._collected
        first = (call.key_step for call in self._calls if not call.ended or call in waiting)
        return self._steps - min(first, default=self._steps + 1) + 1

    def add(self, call: Call) -> None:
        """Begin a step with a call."""
        self._steps += 1
        call.key_step = self._steps
        self._calls.add(call)

    def find_rows(self, call: Call, embeddings: Embeddings) -> None:
        """Put rows in the place of a call's keys, where no other rank has some of them."""
        keys = embeddings.keys
        if not (keys.maps and call.has_keys and isinstance(call.batch, BagBatch)):
            return
        keys.open_steps = self.steps()
        call.batch = keys.rows_of(call.batch, embeddings.features, call.trains, embeddings.id_order)
        if call.trains:
            self.add(call)
