"""The placement problems of planners.py: a workload, a machine, a batch and a time limit.

Where nothing else is published, 65,536 samples on all GPUs together make a step. ``half``
as HBM stands for 2x oversubscription: all GPUs together hold half of the tables' bytes.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from placer import Problem, Topology
from placer.workloads import named_workload


@dataclass(frozen=True, slots=True)
class Case:
    """A problem by names alone, so that another process can make the same.

    Attributes
    ----------
    topology : str
        A preset, or a file beside this one.
    hbm : str or None
        Of each GPU; ``half`` for half of the tables' bytes on all GPUs together, None for
        what the topology's preset has.
    dram : str or None
        Of each host.
    batch_size : int
        Samples per GPU and step.
    time_limit_s : float
        What the targets allow for this problem.
    quick : bool
        Whether ``--quick`` runs it.
    """

    name: str
    workload: str
    topology: str
    hbm: str | None = None
    dram: str | None = None
    batch_size: int = 8192
    time_limit_s: float = 20.0
    quick: bool = False

    def problem(self) -> Problem:
        """The problem itself."""
        profile = named_workload(self.workload)
        machine = self.topology
        if machine.endswith(".yaml"):
            machine = str(Path(__file__).with_name(machine))
        if self.hbm != "half":
            topology = Topology.parse(machine, hbm=self.hbm, dram=self.dram)
            return Problem(profile, topology, self.batch_size)
        topology = Topology.parse(machine, dram=self.dram)
        share = profile.total_bytes // 2 // len(topology.gpus)
        return Problem(profile, topology.with_memory(hbm=share), self.batch_size)


DCNV2 = tuple(
    Case(f"dcnv2-{hbm}", "mlperf-dcnv2", "8xh100", hbm, quick=hbm == "8GiB")
    for hbm in ("4GiB", "8GiB", "16GiB", "80GiB")
)

DRAWN_MACHINES = (
    "2xh100", "4xt4", "8xa100-40", "8xh100", "2x4xt4", "2x8xh100", "8x8xh100"
)  # fmt: skip
DRAWN_BUFFERS = 2000
"""Bytes for each sample of a GPU and table."""

# HBM of the preset: T180 just fits, T200 and T510 take about 1.5 times what there is.
HUGECTR = (
    *(Case(name, f"hugectr-{name}", "8xa100-40") for name in ("t180", "t200", "t510")),
    Case("t7", "hugectr-t7", "2x8xh100", batch_size=4096),
)

# Machines that grow with the models, with HBM for half of the tables; colossal has the memory
# of its 128 GPUs, which is 40% of it.
NVIDIA = (
    Case("tiny", "nvidia-tiny", "4xt4", "half", batch_size=16384, quick=True),
    Case("small", "nvidia-small", "8xa100-40", "half"),
    Case("medium", "nvidia-medium", "8xa100-40", "half"),
    Case("large", "nvidia-large", "8xh100", "half"),
    Case("jumbo", "nvidia-jumbo", "4x8xh100", "half", batch_size=2048),
    Case("colossal", "nvidia-colossal", "16x8xh100", batch_size=512, time_limit_s=60.0),
)

# RecShard's 16 GPUs with 24 GiB of HBM and 128 GiB of DRAM each. The kind of GPU is assumed;
# that of 80 GB has room for RM3 at 2x too. RecShard compares lookups alone, without exchanges,
# which are two thirds of the step between two hosts. Behind one switch they count least.
RECSHARD = tuple(
    Case(
        f"rm{n}{suffix}",
        f"recshard-rm{n}",
        machine,
        hbm,
        dram,
        4096,
        quick=suffix == "-2x-switch" and n == 1,
    )
    for suffix, machine, hbm, dram in (
        ("", "2x8xa100-80", "24GiB", "1TiB"),
        ("-2x", "2x8xa100-80", "half", "1TiB"),
        ("-2x-switch", "16xa100-80.yaml", "half", "2TiB"),
    )
    for n in (1, 2, 3)
)

# 23 and 50 GiB a GPU are what TorchRec's planner was tried with on models of that many tables.
# On 128 and 1,024 H100 whole tables fit, so that balance is all; at 2x memory binds as well.
RANDOM = (
    Case("random-400", "random-400", "8xh100", "23GiB"),
    Case("random-856", "random-856", "8xh100", "50GiB"),
    Case("meta-t856-128", "meta-t856", "16x8xh100", batch_size=512, time_limit_s=10.0),
    Case("meta-t856-128-large", "meta-t856", "16x8xh100", batch_size=65536),
    Case("random-856-128", "random-856", "16x8xh100", batch_size=512, time_limit_s=10.0),
    Case("random-856-128-2x", "random-856", "16x8xh100", "half", None, 512, 10.0),
    Case("random-10000-1024", "random-10000", "128x8xh100", None, None, 256, 60.0),
    Case("random-10000-1024-2x", "random-10000", "128x8xh100", "half", None, 256, 60.0),
)

OWN = (*DCNV2, *HUGECTR, *NVIDIA, *RECSHARD, *RANDOM)

# What TorchRec's planner is tried with: eight ranks with 8,192 samples each. The seeds are those
# whose tables come closest to 369 and 807 GiB; several, because how far its plans are from the
# bound depends on the tables.
TORCHREC = (
    *(
        Case(f"torchrec-{tables}@{seed}", f"random-{tables}@{seed}", "8xh100", hbm)
        for tables, hbm, seeds in (
            (400, "23GiB", (422, 369, 833)),
            (856, "50GiB", (916, 202, 529)),
        )
        for seed in seeds
    ),
    *(
        Case(f"torchrec-dcnv2-{hbm}", "mlperf-dcnv2", "8xh100", hbm, quick=hbm == "8GiB")
        for hbm in ("8GiB", "16GiB", "80GiB")
    ),
)

# Tables × GPUs grow tenfold from rung to rung, tables and GPUs by √10 each.
RUNGS = ((128, "8xh100"), (320, "4x8xh100"), (985, "13x8xh100"), (3122, "41x8xh100"),
         (10000, "128x8xh100"))  # fmt: skip
SCALE = {
    title: tuple(
        Case(f"{tables}{suffix}", f"random-{tables}", machine, hbm, None, 512, 60.0, tables < 500)
        for tables, machine in RUNGS
    )
    for title, suffix, hbm in (
        ("HBM for half of the tables", "-2x", "half"),
        ("HBM for all tables", "", None),
    )
}


def drawn_tasks(count: int, time_limit_s: float) -> tuple[Case, ...]:
    """Problems of all kinds: tables, GPUs, memory and batch drawn with the task's number as seed.

    5 to 200 tables of `random-N`, on 2 to 64 GPUs of seven machines with 3 to 150% of the tables'
    bytes in HBM, in batches of 16 to 16,384 samples a GPU: from steps that wait for launches to
    such that wait for memory.
    """
    cases = []
    for seed in range(count):
        draws = random.Random(seed)
        tables = round(5 * 40 ** draws.random())
        machine = draws.choice(DRAWN_MACHINES)
        gpus = len(Topology.parse(machine).gpus)
        total = named_workload(f"random-{tables}@{seed}").total_bytes
        hbm = round(total * 0.03 * 50 ** draws.random() / gpus)
        batch = 2 ** draws.randint(4, 14)
        name = f"{tables} tables, {machine}, batch {batch}, seed {seed}"
        # Buffers of a step take some of it, which small models have not.
        room = f"{hbm + DRAWN_BUFFERS * batch * tables}"
        cases.append(
            Case(name, f"random-{tables}@{seed}", machine, room, None, batch, time_limit_s)
        )
    return tuple(cases)


def pick(cases: Iterable[Case], only: frozenset[str] | None, quick: bool) -> list[Case]:
    """The cases that were asked for: by name, else the quick ones or all."""
    if only is not None:
        return [case for case in cases if case.name in only]
    return [case for case in cases if case.quick or not quick]
