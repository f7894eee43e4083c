"""What a solver is asked: tables with their profile, a machine and a batch size."""

from dataclasses import dataclass
from functools import cached_property

from placer.errors import ProblemError
from placer.profile.profile import Profile
from placer.topology.topology import Topology


@dataclass(frozen=True)
class Problem:
    """Tables and their accesses, a machine, and samples per GPU and step.

    Raises
    ------
    ProblemError
        If there is no table or the batch is not positive.
    """

    profile: Profile
    topology: Topology
    batch_size: int = 8192

    def __post_init__(self) -> None:
        if not len(self.profile):
            raise ProblemError("the profile has no table to place")
        if self.batch_size < 1:
            raise ProblemError(
                f"batch_size must be at least 1 sample per GPU, not {self.batch_size}"
            )

    @property
    def global_batch_size(self) -> int:
        """Samples per step over all GPUs."""
        return self.batch_size * len(self.topology.gpus)

    @cached_property
    def sha256(self) -> str:
        """Hash of everything that a placement depends on: tables, accesses, machine, batch."""
        from placer.plan.fingerprint import problem_sha256

        return problem_sha256(self)
