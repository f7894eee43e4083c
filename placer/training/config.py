"""Configure a training run. Importing this needs no torch."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from placer.errors import PlacerError
from placer.executor.names import MOST_THREADS, Policy
from placer.files import StrPath
from placer.knobs import Knob, check_knobs

Activation = Literal["relu", "gelu"]


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How to train a DLRM on a log. The defaults suit a first run.

    The plan says which optimizer each table has. Samples are read in the log's order. Raises
    PlacerError if a value is out of range.

    >>> TrainConfig(batch_size=64, lr=0.1).embedding_rate
    0.1
    >>> TrainConfig(epochs=0)
    Traceback (most recent call last):
    placer.errors.PlacerError: epochs must be at least 1, not 0
    """

    epochs: Annotated[int, Knob("Number of passes over the log.", least=1)] = 1
    max_steps: Annotated[
        int | None,
        Knob("Stop after this many steps, those before a resumed checkpoint included.", least=0),
    ] = None
    batch_size: Annotated[
        int, Knob("Samples per step and process; the last batch of a pass may be smaller.", least=1)
    ] = 1024
    lr: Annotated[float, Knob("Learning rate of the MLPs.", above=0)] = 0.01
    embedding_lr: Annotated[
        float | None, Knob("Learning rate of the embeddings; by default that of the MLPs.", above=0)
    ] = None
    optimizer: Annotated[Literal["adagrad", "sgd", "adam"], Knob("Optimizer of the MLPs.")] = (
        "adagrad"
    )
    eps: Annotated[float, Knob("Added to the root of the embeddings' Adagrad state.")] = 1e-8
    rounding: Annotated[
        Literal["nearest", "stochastic"],
        Knob("Rounding of bfloat16 and float16 tables; nearest loses small updates."),
    ] = "stochastic"
    seed: Annotated[int, Knob("Seed of the initial weights.")] = 0
    dim: Annotated[
        int | None, Knob("Width of the vectors that interact; by default the widest embedding's.")
    ] = None
    bottom_mlp: Annotated[tuple[int, ...], Knob("Widths of the bottom MLP's hidden layers.")] = (
        64,
        32,
    )
    top_mlp: Annotated[tuple[int, ...], Knob("Widths of the top MLP's hidden layers.")] = (64, 32)
    activation: Annotated[Activation, Knob("Function after each hidden layer.")] = "relu"
    holdout_every: Annotated[
        int, Knob("Keep every batch of this number for evaluation; 0 keeps none.", least=0)
    ] = 10
    eval_samples: Annotated[
        int, Knob("Stop the evaluation after this many samples, at the end of a batch.", least=0)
    ] = 1_000_000
    report_every: Annotated[int, Knob("Steps between two calls of the callback.", least=1)] = 20
    device: Annotated[
        str, Knob("Device of the MLPs and of rows that the plan places in HBM: cpu or cuda.")
    ] = "cpu"
    threads: Annotated[
        int | None,
        Knob("CPU threads; by default as many as a step keeps busy (docs/training.md).", least=1),
    ] = None
    backend: Annotated[str, Knob("The executor's kernels; see `placer.executor`.")] = "auto"
    cache_policy: Annotated[
        Policy,
        Knob(
            "Rows that leave a full cache: lfu, the least read ones; rank, the coldest in the plan."
        ),
    ] = "lfu"
    drive: Annotated[
        str | None,
        Knob(
            "Folder for rows that the plan places on ssd; by default the one that holds the "
            "checkpoints' folder, or without checkpoints the system's folder for temporary files."
        ),
    ] = None
    look_ahead: Annotated[
        bool | None,
        Knob(
            "Read the log in a thread, and find and stage the next batch's rows while one trains. "
            "Results are the same without. By default as the plan's pipeline has it."
        ),
    ] = None
    compile: Annotated[
        str | None, Knob("Compile the MLPs with this backend of torch.compile, such as inductor.")
    ] = None
    # Float16 is left out: its gradients need a scale, which the embeddings' update in the backward
    # pass would have to undo.
    amp: Annotated[
        Literal["bfloat16"] | None,
        Knob("Compute the MLPs in this type; weights and embeddings stay float32."),
    ] = None
    other_data: Annotated[
        bool,
        Knob("Accept another log or vocabulary than the plan or the checkpoint was made with."),
    ] = False
    timeout_s: Annotated[
        float | None,
        Knob("How long processes wait for one another; by default PyTorch's timeout.", above=0),
    ] = None

    def __post_init__(self) -> None:
        check_knobs(self)
        if self.holdout_every == 1:
            raise PlacerError(
                "holdout_every 1 leaves nothing to train on; keep one batch of at least 2, "
                "or 0 to keep none"
            )
        if not -(1 << 63) <= self.seed < 1 << 64:
            raise PlacerError(f"seed must be a number of 64 bits, not {self.seed}")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise PlacerError(f"threads must be at most {MOST_THREADS}, not {self.threads}")
        rates = self.lr, self.embedding_rate
        if not all(0 < rate < math.inf for rate in rates) or not 0 <= self.eps < math.inf:
            raise PlacerError(
                f"learning rates must be positive and eps not negative, and finite: lr={self.lr}, "
                f"embedding_lr={self.embedding_rate}, eps={self.eps}"
            )

    @property
    def embedding_rate(self) -> float:
        """Learning rate of the embeddings."""
        return self.lr if self.embedding_lr is None else self.embedding_lr

    def embedding_options(self) -> dict[str, Any]:
        """Keyword arguments of `PlacedEmbeddings`."""
        return {
            "lr": self.embedding_rate,
            **{
                name: getattr(self, name)
                for name in ("eps", "device", "seed", "backend", "cache_policy", "drive")
            },
        }

    def is_held_out(self, batch: int) -> bool:
        """Return whether a batch is held out, by its number in its epoch, counted from 0."""
        return bool(self.holdout_every) and (batch + 1) % self.holdout_every == 0


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """Where and how often a run is saved.

    Raises PlacerError if no checkpoint would be kept or the steps are not positive.

    >>> CheckpointPolicy("checkpoints", every_steps=1000).is_due(2000)
    True
    """

    folder: StrPath  # Holds one folder per checkpoint.
    # Steps between checkpoints. A run is also saved at its end and if it is interrupted.
    every_steps: int | None = None
    keep: int = 2  # Number of newest checkpoints to keep.

    def __post_init__(self) -> None:
        if self.keep < 1 or (self.every_steps is not None and self.every_steps < 1):
            raise PlacerError(
                f"keep at least 1 checkpoint, not {self.keep}, "
                f"and save every 1 step or more, not {self.every_steps}"
            )

    def is_due(self, step: int) -> bool:
        """Return whether to write a checkpoint after this step."""
        return self.every_steps is not None and step % self.every_steps == 0


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Which steps to trace, and the file to write.

    Raises PlacerError if `steps` or `warm_up` is below 1, or the path is a folder.
    """

    path: Path  # JSON for chrome://tracing or Perfetto; compressed if it ends in ``.gz``.
    steps: int = 10  # Steps in the trace.
    # Steps before the trace, which compile kernels and allocate memory; at least 1.
    warm_up: int = 5

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warm_up < 1:
            raise PlacerError(
                f"trace 1 step or more, not {self.steps}, after 1 or more, not {self.warm_up}"
            )
        if self.path.is_dir():
            raise PlacerError(f"cannot write {self.path}: it is a folder; name a file in it")
