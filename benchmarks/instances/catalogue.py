"""The recipes of the library, written to instances.json with the hash of what each makes.

    python benchmarks/instances/catalogue.py

What is in instances.json stays as it is, whatever this says of it: best known plans are held
against it. An instance that should be another one gets another name.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from expand import CATALOGUE, FORMAT, VERSION, Recipe, document, machine_of

from placer.files.atomic import write_text

STEP_SAMPLES = 65_536
"""Samples of a step on all GPUs together, where nothing else is published."""

CONSTANTS = {
    "lookup_share": 0.80,
    "update_share": 0.63,
    "lookup_bytes": 35.0,
    "update_bytes": 95.0,
    "repeat_share": 0.24,
    "probe_bytes": 6200.0,
    "copy_share": 0.75,
    "in_place_share": 0.64,
    "in_place_update_share": 0.76,
    "id_bytes": 8,
    "length_bytes": 4,
    "output_bytes": 4,
    "sort_bytes": 112,
    "update_kernels": 10,
}
"""Of the step equation, as docs/cost-model.md has them: those of version 1, whatever becomes of
the cost model's."""

DCNV2 = {
    "8xh100": ("2GiB", "4GiB", "6GiB", "8GiB", "10GiB", "12GiB", "16GiB", "80GiB"),
    "4xh100": ("8GiB", "16GiB", "24GiB"),
    "2xh100": ("16GiB", "40GiB"),
    "8xa100-40": ("4GiB", "8GiB", None),
    "8xv100-16": (None,),
    "8xt4": (None,),
    "2x8xh100": ("2GiB", "4GiB", "8GiB"),
    "2x8xa100-80": ("4GiB",),
    "4x8xh100": ("2GiB",),
    "16x8xh100": ("1GiB",),
}
CRITEO = (
    ("criteo-kaggle", (("2xt4", "50%"), ("4xt4", "25%"), ("8xt4", "10%"), ("2xv100-16", "50%"))),
    ("criteo-terabyte", (
        ("8xh100", "25%"), ("8xh100", "50%"), ("4xa100-40", "50%"), ("8xt4", "10%"),
        ("2x4xt4", "25%"),
    )),
)  # fmt: skip
NVIDIA = (
    ("nvidia-tiny", (("4xt4", "50%"), ("4xt4", "25%"), ("8xa100-40", None))),
    ("nvidia-small", (("8xa100-40", "50%"), ("8xa100-40", "20%"), ("2x4xt4", "30%"))),
    ("nvidia-medium", (("8xa100-40", "50%"), ("8xh100", "25%"))),
    ("nvidia-large", (("8xh100", "50%"), ("2x8xh100", "50%"))),
    ("nvidia-jumbo", (("4x8xh100", "50%"),)),
    ("nvidia-colossal", (("16x8xh100", None),)),
)
HUGECTR = (
    ("hugectr-t180", (
        ("8xa100-40", None), ("8xh100", "50%"), ("8xh100", None), ("16x8xh100", None))),
    ("hugectr-t200", (("8xa100-40", None), ("8xh100", None), ("16x8xh100", None))),
    ("hugectr-t510", (
        ("8xa100-40", None), ("2x8xa100-40", None), ("8xh200", None), ("16x8xh100", None))),
    ("hugectr-t7", (("16x8xh100", None),)),
)  # fmt: skip
RECSHARD = tuple(
    (f"recshard-rm{n}", (
        ("2x8xa100-80", "24GiB"), ("2x8xa100-80", "50%"), ("16xa100-80.yaml", "50%")))
    for n in (1, 2, 3)
)  # fmt: skip
SMALL_TABLES = (26, 30, 40, 50, 60)
SMALL = (
    ("2xh100", "30%"), ("4xa100-40", "10%"), ("8xh100", "60%"), ("8xv100-16", "20%"),
    ("4xt4", "40%"), ("2x2xh100", "50%"),
)  # fmt: skip
MEDIUM = (
    (80, "8xh100", "20%"), (80, "2x4xt4", "60%"), (100, "8xa100-40", "10%"), (100, "8xh100", None),
    (100, "2x8xh100", "25%"), (128, "8xh100", "50%"), (128, "4x4xa100-40", "40%"),
    (150, "8xa100-80", "30%"), (150, "2x8xh100", "75%"), (200, "8xh100", "8GiB"),
    (200, "8xh200", "50%"), (200, "8xb200", None), (200, "4x8xh100", "15%"),
    (250, "2x8xa100-40", "50%"), (300, "8xh100", "35%"),
)  # fmt: skip
LARGE = (
    (320, "4x8xh100", "50%"), (400, "8xh100", "23GiB"), (400, "16x8xh100", None),
    (500, "2x8xh100", "40%"), (640, "4x8xa100-80", "50%"), (856, "8xh100", "50GiB"),
    (856, "16x8xh100", "50%"), (985, "13x8xh100", "50%"), (1000, "4x8xh100", "8GiB"),
    (2000, "8x8xh100", "50%"), (3122, "41x8xh100", "50%"), (5000, "64x8xh100", None),
    (10000, "128x8xh100", "50%"),
)  # fmt: skip
UNEQUAL = (
    (26, "2xh100+2xt4", "20%"), (30, "4xa100-40+4xv100-16", "4GiB"),
    (40, "2xh100+2xt4", ("8GiB", "2GiB")), (50, "4xh100", ("16GiB", "8GiB", "4GiB", "2GiB")),
    (60, "8xa100-40", ("12GiB", "4GiB")), (60, "4xt4+4xv100-16", "3GiB"),
    (100, "8xh100+8xa100-40", ("10GiB", "5GiB")), (128, "2x8xv100-16+8xh100", "6GiB"),
    (40, "8xh100+4xt4", "4GiB"), (200, "4xh200+4xh100+4xa100-80", "16GiB"),
)  # fmt: skip
MIXED_EDITS = (
    ("types", ({"every": 3, "dtype": "float16"}, {"first": 1, "every": 4, "optimizer": "adam"},
               {"first": 2, "every": 5, "optimizer": "sgd"})),
    ("bags", ({"every": 4, "pooling": "max"}, {"first": 1, "every": 4, "pooling": "none"},
              {"first": 2, "every": 4, "pooling": "mean"})),
    ("shared", ({"every": 2, "features": 2}, {"first": 1, "every": 6, "features": 4})),
    ("widths", ({"every": 3, "dim": 256}, {"first": 1, "every": 3, "dim": 8},
                {"first": 2, "every": 3, "dim": 96})),
)  # fmt: skip
READS: dict[str, tuple[str, ...]] = {
    "uva": ("staged", "cached", "host"),
    "cached": ("staged", "uva", "host"),
    "host": ("staged", "uva", "cached"),
    "staged": ("uva", "cached", "host"),
}
RULES: dict[str, dict[str, Any]] = {
    "pins": {"tables": {"t1*": {"devices": ["gpu:0", "gpu:1"]}, "t2": {"devices": ["gpu:3"]}}},
    "whole": {"tables": {"*": {"forbid": ["row-wise", "column-wise", "replicated"]}}},
    "no-split": {"tables": {"*": {"forbid": ["split"]}}},
    "together": {"together": [["t1", "t2", "t3"], ["t10", "t11"], ["t20", "t21", "t22", "t23"]]},
    "tiers": {"tables": {"t?": {"tier": "hbm"}, "t1?": {"tier": "dram"}}},
    "reserve": {"reserve": {"gpu": "512MiB", "gpu:0": "1GiB", "host": "16GiB"}},
}


WITHOUT_PLAN = frozenset(
    {
        "criteo-kaggle-8xt4-10pct",
        "random-26s11-4xa100-40-10pct",
        "random-40s11-4xa100-40-10pct",
    }
)
"""Of the rules below, those whose GPUs have no room for the buffers of a step, which is proven."""


def published() -> Iterator[Recipe]:
    """Models whose tables somebody has published, on several machines."""
    for machine, sizes in DCNV2.items():
        for hbm in sizes:
            yield _recipe("mlperf-dcnv2", machine, hbm)
    for workload, machines in (*CRITEO, *NVIDIA, *HUGECTR, *RECSHARD):
        for machine, hbm in machines:
            yield _recipe(workload, machine, hbm)
    yield _recipe("meta-t856", "16x8xh100", None)
    for title, hbm, edit in (
        ("float16", "4GiB", {"dtype": "float16"}),
        ("adam", "16GiB", {"optimizer": "adam"}),
        ("adagrad", "8GiB", {"optimizer": "adagrad"}),
        ("sgd", "8GiB", {"optimizer": "sgd"}),
        ("max", "8GiB", {"pooling": "max"}),
    ):
        one = _recipe("mlperf-dcnv2", "8xh100", hbm)
        yield replace(one, name=f"{one.name}-{title}", edits=(edit,))
    for workload in ("mlperf-dcnv2", "nvidia-small"):
        one = _recipe(workload, "8xh100", "8GiB" if workload == "mlperf-dcnv2" else "20%")
        yield replace(one, name=f"{one.name}-serial", pipeline="serial")


def neuroshard() -> Iterator[Recipe]:
    """Tasks in NeuroShard's setting, and with less memory or other numbers of GPUs."""
    for number in range(18):
        tables = 26 + 2 * number if number < 17 else 59
        yield _recipe(f"neuroshard-{tables}@{number}", "4xt4", "4GiB")
    for number in range(6):
        yield _recipe(f"neuroshard-{30 + 5 * number}@{100 + number}", "4xt4", "1GiB")
    for machine, hbm in (("2xt4", "4GiB"), ("8xt4", "2GiB"), ("8xv100-16", "512MiB")):
        for seed in (200, 201):
            yield _recipe(f"neuroshard-{40 + 10 * (seed - 200)}@{seed}", machine, hbm)


def drawn() -> Iterator[Recipe]:
    """Drawn models, from 26 tables on two GPUs to 10,000 on 1,024."""
    for at, (machine, hbm) in enumerate(SMALL):
        for tables in SMALL_TABLES:
            yield _recipe(f"random-{tables}@{10 + at}", machine, hbm)
    for tables, machine, hbm in (*MEDIUM, *LARGE):
        yield _recipe(f"random-{tables}", machine, hbm)
    for tables, machine, sizes in UNEQUAL:
        one = _recipe(f"random-{tables}@20", machine, "mixed")
        yield replace(one, name=one.name.removesuffix("-mixed"), hbm=sizes)


def special() -> Iterator[Recipe]:
    """Mixed tables, one way to read rows in host memory, constraints, no look-ahead."""
    for title, edits in MIXED_EDITS:
        for tables, machine, hbm in ((40, "4xa100-40", "25%"), (100, "2x4xh100", "25%")):
            one = _recipe(f"random-{tables}@30", machine, hbm)
            yield replace(one, name=f"{one.name}-{title}", edits=edits)
    for title, forbidden in READS.items():
        for tables, machine, hbm in ((30, "4xh100", "30%"), (60, "8xa100-40", "30%")):
            one = _recipe(f"random-{tables}@40", machine, hbm)
            rules = {"tables": {"*": {"forbid": list(forbidden)}}}
            yield replace(one, name=f"{one.name}-{title}", constraints=rules)
    for title, rules in RULES.items():
        hbm = "90%" if title == "tiers" else "30%"  # Its small tables are all in HBM.
        one = _recipe("random-50@50", "2x2xa100-40", hbm)
        yield replace(one, name=f"{one.name}-{title}", constraints=rules)
    for tables, machine, hbm in ((30, "4xt4", "30%"), (60, "2x4xa100-40", "20%")):
        one = _recipe(f"random-{tables}@60", machine, hbm)
        yield replace(one, name=f"{one.name}-serial", pipeline="serial")


def _recipe(workload: str, machine: str, hbm: str | None) -> Recipe:
    """A recipe named after what it is, with `STEP_SAMPLES` samples a step."""
    recipe = Recipe("", workload, machine, None if hbm == "mixed" else hbm)
    gpus = len(machine_of(machine).gpus)
    name = "-".join(
        part.removesuffix(".yaml").replace("%", "pct").replace("@", "s")
        for part in (workload.removeprefix("mlperf-"), machine, hbm or "preset")
    )
    return replace(recipe, name=name, batch_size=max(64, STEP_SAMPLES // gpus))


def main() -> None:
    """Add what is new to the catalogue."""
    known: dict[str, Any] = {}
    if CATALOGUE.exists():
        content = json.loads(CATALOGUE.read_text(encoding="utf-8"))
        known = {one["name"]: one for one in content["instances"]}
    for recipe in (*published(), *neuroshard(), *drawn(), *special()):
        if recipe.name not in known and recipe.name not in WITHOUT_PLAN:
            made = document(recipe.name, recipe.problem(), CONSTANTS)
            sizes = {key: len(made[key]) for key in ("tables", "gpus")}
            known[recipe.name] = replace(recipe, **sizes, sha256=made["sha256"]).to_json()
    lines = ",\n".join(f"  {json.dumps(one)}" for one in known.values())
    head = json.dumps({"format": FORMAT, "version": VERSION, "constants": CONSTANTS}, indent=1)
    write_text(CATALOGUE, f'{head[:-2]},\n "instances": [\n{lines}\n ]\n}}\n')
    print(f"{len(known)} instances in {CATALOGUE}")


if __name__ == "__main__":
    main()
