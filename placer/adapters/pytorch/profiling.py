"""Profile a model's tables from the model and its training batches."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import nn

from placer.adapters.pytorch.calls import bags_of, of_bags, of_rows, without
from placer.adapters.pytorch.models import ModelTable, dtype_of, model_tables, pooling_of
from placer.errors import DataError, PlanMismatchError, check_kinds
from placer.executor import BagBatch
from placer.profile.count import DenseCounts, TableOptions
from placer.profile.profile import Profile
from placer.profile.table_profile import FeatureCounts, RowCounts, TableProfile
from placer.tables import OptimizerName, Pooling

Batch = TypeVar("Batch")


def profile_model(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    steps: int | None = None,
    forward: Callable[[Batch], Any] | None = None,
    names: Mapping[str, str] | None = None,
    optimizer: OptimizerName = "rowwise_adagrad",
    source: str = "",
) -> Profile:
    """Count which rows a model reads.

    The model runs on each batch in eval mode and without gradients, so it does not change. Count
    how often its embedding modules are called with each id. If a module is called several times in
    a forward pass, each call is a feature. An `nn.Embedding` call has one bag for each entry of the
    input's first dimension. The number of samples of a batch is the most common number of bags.

    Raises PlanMismatchError if the model has no embedding modules, or `names` has paths where none
    are. Raises DataError if there is no batch, or the model cannot be called with a batch.

    Parameters
    ----------
    batches : iterable
        The training batches, such as a DataLoader.
    steps : int, optional
        Number of batches to read; by default all.
    forward : callable, optional
        Runs the model on a batch. By default, the model is called with the batch, or with the first
        element of a batch that is a list or tuple, such as (inputs, labels).
    names : mapping of table name to module path, optional
        Names of tables, as for `apply_plan`. Other tables are named by their modules' paths.
    optimizer : OptimizerName
        Optimizer that will train the tables. Its state takes memory.
    source : str
        Where the batches come from, for reports.
    """
    check_kinds(model=(model, nn.Module), batches=(batches, Iterable))
    if steps is not None and steps < 1:
        raise DataError(f"steps {steps} must be at least 1, or None for all batches")
    model = getattr(model, "_orig_mod", model)  # Paths in a compiled model have a prefix.
    tables = _named(model_tables(model), names or {})
    counters = [_TableCounter(name, table) for name, table in tables.items()]
    samples = batch_count = 0
    with _observed(model, counters):
        for batch in islice(batches, steps):
            _default_forward(model, batch) if forward is None else forward(batch)
            size = _samples(counters)
            for counter in counters:
                counter.end_batch(size)
            samples += size
            batch_count += 1
    if not batch_count:
        raise DataError("there was no batch to profile the model on")
    return Profile(
        tuple(counter.profile(samples, optimizer) for counter in counters), samples, source=source
    )


@contextmanager
def _observed(model: nn.Module, counters: Iterable["_TableCounter"]) -> Iterator[None]:
    """Record calls of the model in eval mode without gradients. Restore its modes at the end."""
    handles = [
        module.register_forward_pre_hook(counter.note, with_kwargs=True)
        for counter in counters
        for module in counter.table.modules
    ]
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in was_training.items():
            module.training = mode


def _default_forward(model: nn.Module, batch: Any) -> None:
    has_more = isinstance(batch, list | tuple)
    try:
        model(batch[0] if has_more else batch)
    except TypeError as error:
        what = "the first element of a batch" if has_more else "a batch"
        raise DataError(
            f"the model was called with {what}, and raised TypeError: {error}; pass how it is "
            "called: forward=lambda batch: model(batch[0], batch[1]), or model(**batch)"
        ) from error


def _named(tables: Iterable[ModelTable], names: Mapping[str, str]) -> dict[str, ModelTable]:
    by_path = {path: name for name, path in names.items()}
    named = {}
    for table in tables:
        own = [by_path.pop(path) for path in table.paths if path in by_path]
        named[own[0] if own else table.path] = table
    if by_path:
        raise PlanMismatchError(f"names has {sorted(by_path)}, where no embedding module is")
    if not named:
        raise PlanMismatchError(
            "the model has no nn.EmbeddingBag and no nn.Embedding; if a plan is applied to it, "
            "call remove_plan first"
        )
    return named


def _samples(counters: Iterable["_TableCounter"]) -> int:
    """Return the most common number of bags in the batch's calls; the largest if several tie."""
    sizes = Counter(lookups.batch_size for counter in counters for _, lookups in counter.calls)
    return max(sizes, key=lambda size: (sizes[size], size), default=0)


class _TableCounter:
    def __init__(self, name: str, table: ModelTable) -> None:
        self.name, self.table = name, table
        self.calls: list[tuple[Pooling, BagBatch]] = []
        self.features: dict[str, FeatureCounts] = {}
        self.poolings: dict[str, Pooling] = {}
        self.counts = DenseCounts(table.weight.shape[0])

    def note(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        lookups = _lookups(module, *args, **kwargs)
        if module.padding_idx is not None:
            lookups = without(lookups, module.padding_idx)
        self.calls.append((pooling_of(module), lookups))

    def end_batch(self, samples: int) -> None:
        """Count the calls of a forward pass over `samples` samples."""
        for number, (pooling, lookups) in enumerate(self.calls, 1):
            name = self.name if number == 1 else f"{self.name}#{number}"
            self.poolings.setdefault(name, pooling)
            ids = lookups.ids.detach().cpu().long().numpy()
            self.counts.check(ids, self.name)
            self.counts.add(ids)
            filled = int(torch.count_nonzero(lookups.offsets.diff()))
            # Take bags beyond the samples, such as drawn negatives, for longer bags.
            counts = FeatureCounts(ids.size, min(filled, samples))
            self.features[name] = self.features.get(name, FeatureCounts()) + counts
        self.calls.clear()

    def profile(self, samples: int, optimizer: OptimizerName) -> TableProfile:
        weight = self.table.weight
        dtype = dtype_of(weight.dtype, self.name)
        options = TableOptions(weight.shape[1], dtype, optimizer, self.poolings)
        counts = {self.name: RowCounts.from_dense(self.counts.values)}
        (profile,) = options.profiles(counts, {self.name: self.features}, samples)
        return profile


def _lookups(
    module: nn.Module,
    input: torch.Tensor,
    offsets: torch.Tensor | None = None,
    per_sample_weights: torch.Tensor | None = None,
) -> BagBatch:
    if isinstance(module, nn.EmbeddingBag):
        return of_bags(input, offsets, per_sample_weights, module.include_last_offset)
    rows = of_rows(input)
    bags = input.shape[0] if input.dim() else 1
    length = input.numel() // bags if bags else 0
    return bags_of(rows.ids, torch.arange(bags + 1, device=rows.ids.device) * length)
