"""What a training run is told."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from placer.errors import PlacerError
from placer.executor.names import Policy

DenseOptimizer = Literal["adagrad", "sgd", "adam"]
Activation = Literal["relu", "gelu"]
Amp = Literal["bfloat16"]


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How a DLRM is trained on a log.

    Attributes
    ----------
    epochs : int
        Passes over the log.
    max_steps : int, optional
        Stop after this many steps, those before a resumed checkpoint included.
    batch_size : int
        Samples per step and rank; the last batch of an epoch may be smaller.
    lr, embedding_lr : float
        Learning rate of the MLPs, and of the embeddings (by default the same).
    optimizer : {"adagrad", "sgd", "adam"}
        Of the MLPs. The embeddings' is the one that the plan gives each table.
    eps : float
        Added to the root of the embeddings' Adagrad state.
    seed : int
        Of the initial weights. Samples are read in the log's order.
    dim, bottom_mlp, top_mlp, activation
        Of the model; see `placer.training.dlrm.Dlrm`.
    holdout_every : int
        Every so many batches, one is not trained on but kept for evaluation: the last of each
        group. 0 keeps none.
    eval_samples : int
        Stop the evaluation after the batch that reaches this many held-out samples.
    report_every : int
        Steps between two calls of the progress callback.
    device : str
        Where the MLPs run, and what stands for the GPU of the plan: ``cpu`` or ``cuda``.
    backend : str
        The executor's kernels; see `placer.executor`.
    cache_policy : {"lfu", "rank"}
        Which cached rows make room for others; see `PlacedEmbeddings`.
    look_ahead : bool
        Read the log in a thread, and find and stage the rows of the next batch while one trains.
        Results are the same without.
    compile : str, optional
        Compile the MLPs and the interaction with this backend of `torch.compile`, such as
        ``inductor``.
    amp : {"bfloat16"}, optional
        Compute the MLPs and the interaction in this type, by `torch.autocast`; weights and
        embeddings stay float32. There is no float16: its gradients need a scale, which the
        embeddings' update in the backward pass would have to take back.
    timeout_s : float, optional
        How long ranks wait for one another before the run fails; by default as long as
        `torch.distributed` does.

    Raises
    ------
    PlacerError
        If a value is out of range.
    """

    epochs: int = 1
    max_steps: int | None = None
    batch_size: int = 1024
    lr: float = 0.01
    embedding_lr: float | None = None
    optimizer: DenseOptimizer = "adagrad"
    eps: float = 1e-8
    seed: int = 0
    dim: int | None = None
    bottom_mlp: tuple[int, ...] = (64, 32)
    top_mlp: tuple[int, ...] = (64, 32)
    activation: Activation = "relu"
    holdout_every: int = 10
    eval_samples: int = 1_000_000
    report_every: int = 20
    device: str = "cpu"
    backend: str = "auto"
    cache_policy: Policy = "lfu"
    look_ahead: bool = True
    compile: str | None = None
    amp: Amp | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        at_least = {"epochs": 1, "batch_size": 1, "report_every": 1, "eval_samples": 0}
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise PlacerError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.max_steps is not None and self.max_steps < 0:
            raise PlacerError(f"max_steps must be at least 0, not {self.max_steps}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise PlacerError(f"timeout_s must be positive, not {self.timeout_s}")
        if self.holdout_every < 0 or self.holdout_every == 1:
            raise PlacerError(
                f"holdout_every {self.holdout_every} leaves nothing to train on; "
                "keep one batch of at least 2, or 0 to keep none"
            )
        if not self.lr > 0 or not self.embedding_rate > 0 or not self.eps >= 0:
            raise PlacerError(
                f"learning rates must be positive and eps not negative: lr={self.lr}, "
                f"embedding_lr={self.embedding_rate}, eps={self.eps}"
            )
        for name, known in (
            ("optimizer", get_args(DenseOptimizer)),
            ("activation", get_args(Activation)),
            ("cache_policy", get_args(Policy)),
            ("amp", (None, *get_args(Amp))),
        ):
            if getattr(self, name) not in known:
                raise PlacerError(
                    f"{name} {getattr(self, name)!r} is none of {', '.join(map(str, known))}"
                )

    @property
    def embedding_rate(self) -> float:
        """Learning rate of the embeddings."""
        return self.lr if self.embedding_lr is None else self.embedding_lr

    def is_held_out(self, batch: int) -> bool:
        """Whether the batch with this number, counted from 0 in its epoch, is held out."""
        return bool(self.holdout_every) and (batch + 1) % self.holdout_every == 0


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """Where and how often a run is saved.

    Attributes
    ----------
    folder : Path
        Holds one folder per checkpoint.
    every_steps : int, optional
        Steps between checkpoints. A run is saved at its end and when it is interrupted too.
    keep : int
        Newest checkpoints that are kept.

    Raises
    ------
    PlacerError
        If nothing would be kept, or the steps are not positive.
    """

    folder: Path
    every_steps: int | None = None
    keep: int = 2

    def __post_init__(self) -> None:
        if self.keep < 1 or (self.every_steps is not None and self.every_steps < 1):
            raise PlacerError(
                f"keep at least 1 checkpoint, not {self.keep}, "
                f"and save every 1 step or more, not {self.every_steps}"
            )

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after this step."""
        return self.every_steps is not None and step % self.every_steps == 0


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Which steps are traced, and where to.

    Attributes
    ----------
    path : Path
        A JSON file for chrome://tracing or Perfetto; compressed where it ends in ``.gz``.
    steps : int
        Steps in the trace.
    warm_up : int
        Steps before it, in which kernels are compiled and memory is allocated; at least 1.

    Raises
    ------
    PlacerError
        If there is no step to trace or to warm up with, or the path is a folder.
    """

    path: Path
    steps: int = 10
    warm_up: int = 5

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warm_up < 1:
            raise PlacerError(
                f"trace 1 step or more, not {self.steps}, after 1 or more, not {self.warm_up}"
            )
        if self.path.is_dir():
            raise PlacerError(f"cannot write {self.path}: it is a folder; name a file in it")
