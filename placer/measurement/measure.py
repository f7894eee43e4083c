"""How long steps of a plan take on this machine: prefetch, forward, backward and update."""

from collections.abc import Sequence
from types import TracebackType

from placer.measurement.processes import Processes
from placer.measurement.timed_steps import Job, quiet, run
from placer.measurement.times import Effort, Measured, Setting
from placer.plan.plan import Plan
from placer.profile.profile import Profile


def measure_plan(
    plan: Plan,
    profile: Profile,
    batch_size: int | None = None,
    backend: str = "auto",
    *,
    device: str = "cpu",
    ranks: int = 1,
    threads: int = 1,
    seed: int = 0,
    effort: Effort | None = None,
) -> Measured:
    """Time steps of a plan whose lookups are drawn from a profile.

    Several plans are measured faster by one `Measurer`.

    Parameters
    ----------
    batch_size : int, optional
        Samples per rank; the plan's by default.

    Raises
    ------
    BackendError
        If the backend is not there, or a rank fails.
    """
    with Measurer(Setting(backend, device, ranks, threads)) as measurer:
        return measurer.measure(plan, profile, batch_size, seed=seed, effort=effort)


class Measurer:
    """Measures plans one after the other, in this process or in several that it keeps.

    As `placer train` does, the process that measures keeps memory that it has freed
    (`placer.executor.keep_freed_memory`).

    Parameters
    ----------
    setting : Setting
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._processes: Processes | None = None

    def __enter__(self) -> "Measurer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def measure(
        self,
        plan: Plan,
        profile: Profile,
        batch_size: int | None = None,
        *,
        seed: int = 0,
        effort: Effort | None = None,
    ) -> Measured:
        """See `measure_plan`."""
        samples = plan.batch_size if batch_size is None else batch_size
        job = Job(plan, profile, samples, seed, effort or Effort())
        if self.setting.ranks == 1:
            with quiet(self.setting, 0):
                return run(job, self.setting)
        if self._processes is None:
            self._processes = Processes(self.setting)
        try:
            return _slowest(self._processes.run(job))
        except BaseException:
            self._processes.close()
            self._processes = None
            raise


def _slowest(of_ranks: Sequence[Measured]) -> Measured:
    """Step by step the slowest rank's time."""
    return Measured(
        tuple(map(max, zip(*(times.wall_s for times in of_ranks), strict=True))),
        tuple(map(max, zip(*(times.cpu_s for times in of_ranks), strict=True))),
    )
