"""Name the parts of a step, so that a profiler shows them.

``map`` turns ids into slots, ``sort`` orders the lookups by row, ``stage`` copies cold rows to
HBM, ``write-back`` copies them back, ``forward`` pools rows, ``backward`` collects the gradients
of pooled rows, and ``update`` applies the optimizer.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

Phase = Literal["map", "sort", "stage", "forward", "backward", "update", "write-back"]

PHASE_PREFIX = "placer: "


def phase(name: Phase) -> AbstractContextManager[object]:
    """Return a context that a running `torch.profiler.profile` records under this name.

    Without a profiler the context does nothing, as a record takes longer than a kernel launch.
    """
    if _profiler_enabled():
        return record_function(PHASE_PREFIX + name)
    return nullcontext()
