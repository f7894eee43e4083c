"""Configure a training run. Importing this needs no torch."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from placer.errors import PlacerError
from placer.executor import MOST_THREADS, Policy
from placer.files.atomic import StrPath, check_place
from placer.knobs import check_knobs, knob

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

    HEADING: ClassVar[str] = "Training"

    epochs: int = knob(1, "Number of passes over the log.", least=1)
    max_steps: int | None = knob(
        None,
        "Stop after this many steps, those before a resumed checkpoint included.",
        "steps --steps",
        least=0,
    )
    batch_size: int = knob(
        1024, "Samples per step and process; the last batch of a pass may be smaller.", least=1
    )
    lr: float = knob(0.01, "Learning rate of the MLPs.", above=0)
    embedding_lr: float | None = knob(
        None, "Learning rate of the embeddings; by default that of the MLPs.", above=0
    )
    optimizer: Literal["adagrad", "sgd", "adam"] = knob(
        "adagrad", "Optimizer of the MLPs.", "dense_optimizer --dense-optimizer"
    )
    eps: float = 1e-8  # Added to the root of the embeddings' Adagrad state.
    rounding: Literal["nearest", "stochastic"] = knob(
        "stochastic", "Rounding of bfloat16 and float16 tables; nearest loses small updates."
    )
    seed: int = knob(0, "Seed of the initial weights.")
    dim: int | None = None  # Width of vectors that interact; by default the widest embedding's.
    # Widths of the hidden layers, and the function after each of them.
    bottom_mlp: tuple[int, ...] = (64, 32)
    top_mlp: tuple[int, ...] = (64, 32)
    activation: Activation = knob("relu", "Function after each hidden layer.")
    holdout_every: int = knob(
        10, "Keep every batch of this number for evaluation; 0 keeps none.", least=0
    )
    eval_samples: int = knob(
        1_000_000, "Stop the evaluation after this many samples, at the end of a batch.", least=0
    )
    report_every: int = knob(20, "Steps between two calls of the callback.", least=1)
    device: str = knob(
        "cpu", "Device of the MLPs and of rows that the plan places in HBM: cpu or cuda."
    )
    threads: int | None = knob(
        None, "CPU threads; by default as many as a step keeps busy (docs/training.md).", least=1
    )
    backend: str = "auto"  # The executor's kernels; see `placer.executor`.
    cache_policy: Policy = knob(
        "lfu",
        "Rows that leave a full cache: lfu, the least read ones; rank, the coldest in the plan.",
    )
    drive: str | None = knob(
        None,
        "Folder for rows that the plan places on ssd; by default the one that holds the "
        "checkpoints' folder, or without checkpoints the system's folder for temporary files.",
    )
    # Read the log in a thread, and find and stage the next batch's rows while one trains. Results
    # are the same without. By default as the plan's pipeline has it.
    look_ahead: bool | None = None
    compile: str | None = None  # Backend of torch.compile for the MLPs, such as inductor.
    # Float16 is left out: its gradients need a scale, which the embeddings' update in the backward
    # pass would have to undo.
    amp: Literal["bfloat16"] | None = knob(
        None, "Compute the MLPs in this type; their weights stay float32, tables keep theirs."
    )
    other_data: bool = knob(
        False, "Accept another log or vocabulary than the plan or the checkpoint was made with."
    )
    timeout_s: float | None = knob(
        None,
        "How long processes wait for one another; by default PyTorch's timeout.",
        "timeout_s --timeout",
        above=0,
        metavar="SECONDS",
    )

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
        names = "eps", "device", "seed", "backend", "cache_policy", "drive"
        return {"lr": self.embedding_rate, **{name: getattr(self, name) for name in names}}

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

    Raises PlacerError if `steps` or `warm_up` is below 1, or no file can be written there.
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
        check_place(self.path, makes_folders=True)
