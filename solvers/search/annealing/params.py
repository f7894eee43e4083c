"""Knobs of annealing."""

from dataclasses import dataclass

Heat = tuple[int, float]
"""A power, `LOW_POWER` or `HIGH_POWER`, and a temperature."""


@dataclass(frozen=True, slots=True)
class AnnealingParams:
    """Knobs of `anneal`.

    Attributes
    ----------
    heats : tuple of (int, float)
        Powers and temperatures at the start of a run, by turns: from those that leave the best
        assignment behind to one that looks around it. A temperature is what a move may cost, as a
        share of the step.
    heats_of_many : tuple of (int, float)
        The same on more than `many_gpus` GPUs, none of which changes much of the step by itself.
    cooling : float
        Temperature at the end of a run, beside that at its start.
    steps_per_place, least_steps : int
        Steps of the first runs, for each table and GPU, and at least; later runs are longer.
    least_turns : int
        Times that there is to be a run of each heat: with little time, first runs are shorter.
    longest : int
        Times the first run's steps that a run may take.
    idle_runs : int
        Runs of the longest kind without a gain after which the search ends.
    resharded_below, gathered_below, swapped_below : float
        Of a random number in [0, 1): below the first a table is sharded anew, below the second all
        shards of an arena leave a GPU, below the third two blocks are swapped, and else one is
        moved.
    most_shards : int
        Finer sharding options than this are not tried.
    most_items : int
        Shards whose costs are computed, besides those that tables have: other tables keep their
        options.
    options_share : float
        Of the time that is left, at most, for computing these.
    steps_between_looks : int
        Steps between two looks at the clock.
    many_gpus : int
        On more GPUs than these, a few are looked at where else all would be: for the slowest one,
        or for one to move a shard to.
    most_threads : int
        Runs at once, at most.
    polished : float
        A run's end is improved by moves that are rated exactly if it is slower than the best
        assignment by no more than this share: that pays where curves jump, as those of caches do.
    polish_share : float
        Of the time that is left, at most, for each of these.
    tried_share : float
        Of the time, for runs from several starts.
    clearly : float
        Share of its step by which a plan has to be faster for its start to come first.
    """

    heats: tuple[Heat, ...] = ((8, 0.3), (24, 0.03), (8, 0.03), (24, 0.003))
    heats_of_many: tuple[Heat, ...] = ((24, 0.001), (24, 0.0003))
    cooling: float = 1e-3
    steps_per_place: int = 300
    least_steps: int = 400_000
    least_turns: int = 2
    longest: int = 8
    idle_runs: int = 6
    resharded_below: float = 0.4
    gathered_below: float = 0.43
    swapped_below: float = 0.76
    most_shards: int = 8
    most_items: int = 20_000
    options_share: float = 0.15
    steps_between_looks: int = 20_000
    many_gpus: int = 64
    most_threads: int = 16
    polished: float = 0.02
    polish_share: float = 0.05
    tried_share: float = 0.2
    clearly: float = 0.007
