"""A step's lookups: the bags of all features for one batch of samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from placer.data.log import Chunk, weights_of
from placer.errors import BackendError, DataError, PlanMismatchError, check_kinds

FeatureInput = tuple[Tensor, Tensor | None, Tensor | None]
"""Ids, offsets (None: one id per sample) and per-sample weights (None: all one)."""


@dataclass(frozen=True, slots=True, eq=False)
class BagBatch:
    """Bags of ids, feature-major: all bags of the first feature, then of the second, …

    Raises DataError if shapes or dtypes do not fit together, or if offsets or bounds do not rise
    from 0 to the number of lookups. Offsets on a GPU are not checked.
    """

    ids: Tensor  # Row ids of each feature's table: int64 or int32, shape (lookups,).
    # Bag ``f · batch_size + b`` of feature f and sample b is ``ids[offsets[i]:offsets[i + 1]]``:
    # int64, shape (features · batch_size + 1,).
    offsets: Tensor
    batch_size: int  # Samples.
    # Factors that multiply rows before pooling: float32, shape (lookups,). They can have
    # gradients.
    weights: Tensor | None = None
    # Feature f's lookups are ``bounds[f]..bounds[f + 1]``, kept on the host to avoid waiting for a
    # GPU. Offsets on a CPU always determine them. Pass them with a batch that is made on a GPU.
    bounds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        lookups = self.ids.numel()
        if self.ids.dim() != 1 or self.ids.dtype not in (torch.int64, torch.int32):
            raise DataError(
                f"ids must be a vector of int64 or int32, not {self.ids.dtype} "
                f"of shape {tuple(self.ids.shape)}"
            )
        if self.offsets.dim() != 1 or self.offsets.dtype != torch.int64:
            raise DataError(
                f"offsets must be a vector of int64, not {self.offsets.dtype} "
                f"of shape {tuple(self.offsets.shape)}"
            )
        bags = self.offsets.numel() - 1
        if bags < 0 or (bags % self.batch_size if self.batch_size else bags):
            raise DataError(
                f"{bags + 1} offsets are not features × {self.batch_size} samples + 1; "
                "the last offset, the number of lookups, must be there"
            )
        if self.weights is not None and (
            self.weights.shape != self.ids.shape or self.weights.dtype != torch.float32
        ):
            raise DataError(
                f"{self.weights.dtype} weights of shape {tuple(self.weights.shape)} for "
                f"{lookups} lookups; each lookup needs one, in float32"
            )
        if self.offsets.device.type != "cpu":
            # Reading values would wait for the device.
            self._check_bounds(bags // self.batch_size if self.batch_size else 0)
            return
        ends = int(self.offsets[0]), int(self.offsets[-1])
        falls = self.offsets[1:] < self.offsets[:-1]
        if ends != (0, lookups) or bool(falls.any()):
            wrong = f"these go from {ends[0]} to {ends[1]}"
            if ends == (0, lookups):
                place = int(falls.int().argmax())
                wrong = "after {} comes {}".format(*self.offsets[place : place + 2].tolist())
            raise DataError(
                f"offsets must rise from 0 to the number of lookups, {lookups}; {wrong}"
            )
        if self.batch_size:
            bounds = tuple(self.offsets[:: self.batch_size].tolist())
            object.__setattr__(self, "bounds", bounds)

    def _check_bounds(self, features: int) -> None:
        """Check the bounds of a batch on a GPU, as far as that needs no values from the GPU."""
        bounds = self.bounds
        if bounds is None or not self.batch_size:
            return
        rising = all(start <= stop for start, stop in pairwise(bounds))
        if len(bounds) != features + 1 or not rising or bounds[0] or bounds[-1] != self.ids.numel():
            raise DataError(
                f"bounds of {features} features must be {features + 1} numbers that rise from 0 "
                f"to the number of lookups, {self.ids.numel()}, not {bounds}"
            )

    def to(self, device: str | torch.device, non_blocking: bool = False) -> "BagBatch":
        """Return the same batch on another device.

        With `non_blocking`, the host does not wait for copies from pinned memory to a GPU. Work on
        the current stream does.
        """
        target = torch.device(device)
        if all(tensor.device == target for tensor in self._tensors()):
            return self
        return self._map(lambda tensor: tensor.to(target, non_blocking=non_blocking))

    def pin_memory(self) -> "BagBatch":
        """Return the same batch in pinned host memory, from which copies to a GPU are asynchronous.

        Raises BackendError if there is no GPU.
        """
        if not torch.cuda.is_available():
            raise BackendError("memory is pinned for a GPU, and torch finds none here")
        return self._map(Tensor.pin_memory)

    def _tensors(self) -> tuple[Tensor, ...]:
        return (self.ids, self.offsets, *(() if self.weights is None else (self.weights,)))

    def _map(self, move: Callable[[Tensor], Tensor]) -> "BagBatch":
        weights = None if self.weights is None else move(self.weights)
        return replace(self, ids=move(self.ids), offsets=move(self.offsets), weights=weights)

    @classmethod
    def from_features(
        cls,
        features: Mapping[str, FeatureInput],
        order: Sequence[str],
        *,
        include_last_offset: bool = True,
    ) -> "BagBatch":
        """Make a batch from the ids, offsets and weights of each feature.

        Offsets and weights may be None. Without offsets every sample has one id. If only some
        features have weights, all others get weight 1. `order` lists the model's features
        (`PlacedEmbeddings.feature_names`); other features are ignored. `include_last_offset` says
        whether offsets end with the number of lookups, as in `nn.EmbeddingBag`.

        Raises PlanMismatchError if a feature of `order` is missing. Raises DataError if features
        have different numbers of samples or are malformed. Offsets on a GPU are not checked.

        Two samples. The second one has two words:

        >>> user = torch.tensor([4, 9]), None, None
        >>> words = torch.tensor([3, 7, 7]), torch.tensor([0, 1, 3]), None
        >>> batch = BagBatch.from_features({"user": user, "words": words}, ["user", "words"])
        >>> batch.ids, batch.offsets, batch.bounds
        (tensor([4, 9, 3, 7, 7]), tensor([0, 1, 2, 3, 5]), (0, 2, 5))
        """
        check_kinds(features=(features, Mapping), order=(order, Sequence))
        missing = [name for name in order if name not in features]
        if missing:
            raise PlanMismatchError(
                f"the batch lacks features {missing}; it has {sorted(features)}"
            )
        for name in order:
            _check_feature(name, features[name])
        ids = [features[name][0] for name in order]
        starts = [
            _starts(name, *features[name][:2], include_last_offset=include_last_offset)
            for name in order
        ]
        samples = {name: own.numel() for name, own in zip(order, starts, strict=True)}
        if len(set(samples.values())) > 1:
            raise DataError(f"features have different numbers of samples: {samples}")
        bounds = (0, *accumulate(own.numel() for own in ids))
        offsets = [own + base for own, base in zip(starts, bounds, strict=False)]
        # `full` fills on the device, while `torch.tensor` would wait for a copy to a GPU.
        device = ids[0].device if ids else torch.device("cpu")
        offsets.append(torch.full((1,), bounds[-1], device=device))
        weights = joined_weights(ids, [features[name][2] for name in order])
        size = samples[order[0]] if order else 0
        if len({tensor.dtype for tensor in ids}) > 1:
            ids = [tensor.long() for tensor in ids]
        joined = torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64)
        return cls(joined, torch.cat(offsets), size, weights, bounds)

    @classmethod
    def from_chunk(cls, chunk: Chunk, order: Sequence[str]) -> "BagBatch":
        """Make a batch from a chunk of a log (NumPy arrays).

        Raises PlanMismatchError if the log lacks a feature of `order`.
        """
        missing = [name for name in order if name not in chunk.features]
        if missing:
            raise PlanMismatchError(
                f"the log lacks features {missing}; it has {sorted(chunk.features)}"
            )
        bags = [chunk.features[name] for name in order]
        offsets = np.zeros(len(bags) * chunk.samples + 1, dtype=np.int64)
        base = 0
        for index, bag in enumerate(bags):
            ends = offsets[1 + index * chunk.samples : 1 + (index + 1) * chunk.samples]
            if bag.samples != chunk.samples:
                raise DataError(
                    f"feature {order[index]!r} has {bag.samples} bags "
                    f"in a chunk of {chunk.samples} samples"
                )
            ends[:] = np.arange(1, bag.ids.size + 1) if bag.offsets is None else bag.offsets[1:]
            ends += base
            base += bag.ids.size
        weights = weights_of(bags)
        ids = np.concatenate([bag.ids for bag in bags]) if bags else np.empty(0, np.int64)
        given = None if weights is None else torch.from_numpy(weights)
        return cls(torch.from_numpy(ids), torch.from_numpy(offsets), chunk.samples, given)


def _check_feature(name: str, feature: FeatureInput) -> None:
    """Raise if a feature's tensors do not fit together. Joined features would not show it."""
    match feature:
        case (Tensor() as ids, Tensor() | None as offsets, Tensor() | None as weights):
            pass
        case _:
            raise DataError(
                f"feature {name!r} is a tuple of tensors: ids, offsets or None, weights or None"
            )
    if ids.dim() != 1:
        raise DataError(
            f"feature {name!r}: ids are a vector, not of shape {tuple(ids.shape)}; flatten them, "
            "and say by offsets where each bag begins"
        )
    for what, values in (("ids", ids), ("offsets", offsets)):
        if values is not None and values.numel() and values.is_floating_point():
            raise DataError(f"feature {name!r}: {what} are integers, not {values.dtype}")
    if weights is not None and weights.shape != ids.shape:
        raise DataError(
            f"feature {name!r}: weights of shape {tuple(weights.shape)} for {ids.numel()} lookups; "
            "each lookup needs one"
        )


def joined_weights(ids: Sequence[Tensor], weights: Sequence[Tensor | None]) -> Tensor | None:
    """Join the weights of several features or calls, with 1 for those without weights.

    Returns None if all are without weights.
    """
    if all(own is None for own in weights):
        return None
    return torch.cat(
        [
            torch.ones(own.numel(), dtype=torch.float32, device=ids[0].device)
            if weight is None
            else weight.float()
            for own, weight in zip(ids, weights, strict=True)
        ]
    )


def _starts(name: str, ids: Tensor, offsets: Tensor | None, *, include_last_offset: bool) -> Tensor:
    """Return the start of each bag in a feature's ids, int64, shape (samples,)."""
    lookups = ids.numel()
    if offsets is None:
        return torch.arange(lookups, device=ids.device)
    readable = offsets.device.type == "cpu"
    starts = offsets.long()
    if include_last_offset:
        if not offsets.numel() or (readable and int(offsets[-1]) != lookups):
            raise DataError(
                f"feature {name!r}: the last offset must be {lookups}, the number of its "
                "lookups; pass include_last_offset=False if offsets hold starts alone"
            )
        starts = starts[:-1]
    if readable and starts.numel() and int(starts[0]) != 0:
        raise DataError(f"feature {name!r}: its first offset is {int(starts[0])}, not 0")
    return starts
