"""Whether each lookup kind trains like the unplaced model, asked before it is timed."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from _gpu_contenders import EPS, LR, PlacedSteps, on_host
from _gpu_measure import why
from _gpu_model import Model, draw, gradients, make_plan
from torch import Tensor

from placer.executor import PlacedEmbeddings, UnplacedEmbeddings
from placer.plan.fields import Lookup, Pipeline

_STEPS = 4
_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to read rows: a lookup kind of the plan, and whether batches are prepared ahead."""

    lookup: Lookup
    ahead: bool = False

    @property
    def name(self) -> str:
        """As the table shows it."""
        return f"{self.lookup} + look-ahead" if self.ahead else self.lookup

    @property
    def pipeline(self) -> Pipeline:
        """Whether steps overlap, which memory is planned for."""
        return "look-ahead" if self.ahead else "serial"


KINDS: tuple[Kind, ...] = (
    Kind("device"),
    Kind("staged"),
    Kind("staged", ahead=True),
    Kind("cached"),
    Kind("cached", ahead=True),
    Kind("uva"),
    Kind("host"),
)


@dataclass(frozen=True, slots=True)
class Equivalence:
    """What training the same batches gave."""

    equal: bool  # Within float32 rounding of sums in another order.
    largest_difference: float | None = None  # Of any weight or state, to the unplaced model's.
    same_bits: bool | None = None  # As with all rows in HBM.
    error: str = ""  # Why it could not be trained at all.


def check_kinds(model: Model, batch_size: int, device: torch.device) -> dict[str, Equivalence]:
    """Train a small model a few steps with every kind, and with plain PyTorch."""
    batches = draw(model, batch_size, _STEPS, device, seed=7).batches
    grads = gradients(model, batch_size, device)
    reference = UnplacedEmbeddings(model.tables, seed=0)
    optimizers = reference.optimizers(lr=LR, eps=EPS)
    for batch in batches:
        outputs = reference(batch.to("cpu"))
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(list(outputs.values()), [gradient.cpu() for gradient in grads])
        for optimizer in optimizers:
            optimizer.step()
    expected = {f"{name}.weight": weight for name, weight in reference.table_weights().items()}
    for table, weight in zip(model.tables, reference.weights, strict=True):
        expected[f"{table.name}.sum"] = optimizers[0].state[weight]["sum"]
    found: dict[str, Equivalence] = {}
    in_hbm: Mapping[str, Tensor] = {}
    for kind in KINDS:
        plan = make_plan(model, kind.lookup, 1.0 if kind.lookup == "device" else _SHARE, batch_size)
        try:
            placed = PlacedEmbeddings(
                plan, lr=LR, eps=EPS, device=device, backend="triton", cache_policy="lfu"
            )
            given = on_host(batches) if kind.ahead else batches
            steps = PlacedSteps(placed, given, grads, kind.ahead)
            for _ in batches:
                steps()
            trained = {**placed.state_dict(), **placed.optimizer_state_dict()}
        except Exception as error:  # One kind that fails must not take the others with it.
            found[kind.name] = Equivalence(False, error=why(error))
            continue
        in_hbm = in_hbm or trained
        found[kind.name] = Equivalence(
            all(torch.allclose(trained[n], expected[n], rtol=1e-4, atol=1e-5) for n in expected),
            max(float((trained[n] - expected[n]).abs().max()) for n in expected),
            all(torch.equal(trained[n], in_hbm[n]) for n in expected),
        )
    return found
