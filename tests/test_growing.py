"""Tables with more rows, or fewer: rows stay with their ids, the others are as freshly drawn."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_cases import STATE, checkpoint_of, load
from cli_cases import fail, succeed
from plan_cases import in_dram, in_hbm, plan_of

from placer import Plan, Table
from placer.data.encoding import Encoding, Hash, Identity, Vocabulary
from placer.errors import PlanMismatchError
from placer.executor.memory.arena import initial_weights
from placer.storage.tensor_rows import TensorRows
from placer.training.growing import counts, earlier_rows, grown


def plan(rows: int, optimizer: str = "adagrad", dtype: str = "float32", name: str = "t") -> Plan:
    table = Table(name, rows, 8, dtype=dtype, optimizer=optimizer)
    half = rows // 2
    return plan_of(
        table,
        in_hbm(name, (0, half, 1), (0, 8), "gpu:0"),
        in_dram(name, (half, rows, 1), (0, 8), "gpu:1"),
    )


def encoding(*keys: int) -> Encoding:
    return Encoding({"t": "t"}, {"t": Vocabulary(np.array(keys, np.uint64))})


@pytest.mark.parametrize("optimizer", STATE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_stay_and_new_ones_are_drawn(optimizer: str, dtype: str) -> None:
    old, new = plan(100, optimizer, dtype), plan(140, optimizer, dtype)
    before = checkpoint_of(old)
    rows = earlier_rows(old, new)
    after = grown(before, old, new, rows).tensors
    weight = TensorRows.of(after["embeddings"]["t.weight"])
    was = before.tensors["embeddings"]["t.weight"]
    assert torch.equal(weight.read(0, 100), was)
    drawn = torch.cat([values for _, values in initial_weights(new.tables[0], 0)])
    assert torch.equal(weight.read(90, 140)[10:], drawn[100:].to(was.dtype))
    for name in STATE[optimizer]:
        state = TensorRows.of(after["embedding_optimizer"][f"t.{name}"]).whole()
        assert torch.equal(state[:100], before.tensors["embedding_optimizer"][f"t.{name}"])
        assert not state[100:].any()
    (count,) = counts(old, rows)
    assert (count.kept_rows, count.new_rows, count.dropped_rows) == (100, 40, 0)


def test_a_vocabulary_says_which_row_is_whose() -> None:
    old, new = plan(4), plan(6)
    rows = earlier_rows(old, new, (encoding(50, 60, 70), encoding(70, 80, 50, 90, 60)))["t"]
    assert rows.tolist() == [0, 3, -1, 1, -1, 2]
    before = checkpoint_of(old)
    weight = TensorRows.of(grown(before, old, new, {"t": rows}).tensors["embeddings"]["t.weight"])
    was = before.tensors["embeddings"]["t.weight"]
    for step in (1, 2, 6):  # However it is read.
        found = torch.cat([block for _, block in weight.blocks(step)])
        assert torch.equal(found[[0, 1, 3, 5]], was[[0, 3, 1, 2]])
    # What the newer vocabulary has not is left out.
    fewer = earlier_rows(old, plan(3), (encoding(50, 60, 70), encoding(70, 60)))
    assert fewer["t"].tolist() == [0, 3, 2]
    assert counts(old, fewer)[0].dropped_rows == 1


def test_a_list_says_which_ids_stay() -> None:
    old, new = plan(100), plan(3)
    kept = {"t": np.array([70, 5, 99])}
    assert earlier_rows(old, new, keep=kept)["t"].tolist() == [70, 5, 99]
    with pytest.raises(PlanMismatchError, match=r"100 rows and would have 3.*--keep t=FILE"):
        earlier_rows(old, new)
    for bad, message in (
        ([5, 5, 6], "listed twice"),
        ([5, 6, 100], "100 is no row of 100"),
        ([1, 2, 3, 4], "4 ids do not fit its 3 rows"),
    ):
        with pytest.raises(PlanMismatchError, match=message):
            earlier_rows(old, new, keep={"t": np.array(bad)})
    with pytest.raises(PlanMismatchError, match="no table 'u'"):
        earlier_rows(old, new, keep={"u": np.array([1])})


def test_rows_whose_ids_are_unknown_are_refused() -> None:
    def mapped(mapping: object) -> Encoding:
        return Encoding({"t": "t"}, {"t": mapping})  # type: ignore[dict-item]

    hashed = (mapped(Hash(100)), mapped(Hash(140)))
    with pytest.raises(PlanMismatchError, match="ids are hashed to rows"):
        earlier_rows(plan(100), plan(140), hashed)
    assert earlier_rows(plan(9), plan(9), (mapped(Hash(9)),) * 2)["t"].tolist() == [*range(9)]
    with pytest.raises(PlanMismatchError, match="mapped in another way"):
        earlier_rows(plan(100), plan(100), (mapped(Identity(100)), encoding(*range(99))))
    with pytest.raises(PlanMismatchError, match=r"dtype float32 .* and bfloat16"):
        earlier_rows(plan(100), plan(140, dtype="bfloat16"))
    with pytest.raises(PlanMismatchError, match="give the plan that it was trained with"):
        grown(checkpoint_of(plan(90)), plan(100), plan(140), earlier_rows(plan(100), plan(140)))
    both = replace(plan(100), tables=(), shards=())
    assert earlier_rows(both, plan(5))["t"].tolist() == [-1] * 5


def clicks(path: Path, ids: range, samples: int) -> Path:
    rng = np.random.default_rng(ids.stop)
    lines = [f"{rng.integers(2)},{item}" for item in rng.choice(list(ids), samples)]
    path.write_text("label,item\n" + "\n".join(lines) + "\n")
    return path


def test_a_run_goes_on_with_more_ids(tmp_path: Path) -> None:
    """As users do: the refusal names the command, and the run goes on from what it makes."""
    first = clicks(tmp_path / "one.csv", range(1000, 1100), 600)
    clicks(tmp_path / "two.csv", range(1050, 1160), 600)
    for day, logs in (("old", [first]), ("new", [tmp_path / "two.csv", first])):
        profile = ("profile", *logs, "--sparse", "item", "--label", "label")
        succeed(*profile, "--id-mapping", "vocabulary", "-o", tmp_path / day)
        succeed("plan", "--profile", tmp_path / day, "--topology", "1xt4", "--dim", "8",
                "--solver", "greedy-size", "-o", tmp_path / f"{day}.json")  # fmt: skip
    old, new = (tmp_path / f"{day}.json" for day in ("old", "new"))

    def train(day: str, log: str, runs: str, *more: str) -> tuple[object, ...]:
        return ("train", "--plan", tmp_path / f"{day}.json", "--data", tmp_path / f"{log}.csv",
                "--batch-size", "32", "--checkpoints", tmp_path / runs, *more)  # fmt: skip

    succeed(*train("old", "one", "a", "--steps", "8"))
    refused = fail(*train("new", "two", "a", "--resume", "--other-data"))
    assert "placer grow OLD NEW --checkpoint" in refused
    grow = ("grow", old, new, "--checkpoint", tmp_path / "a", "-o", tmp_path / "b")
    (tmp_path / "b" / ".step-000000000008.partial" / "left").mkdir(parents=True)  # Of a killed one.
    made = succeed(*grow, "--format", "json")
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["step-000000000008"]
    assert "is there already" in fail(*grow)
    assert '"new_rows": ' in made.stdout
    assert load(tmp_path / "b").data["ids_sha256"] == Plan.load(new).provenance.ids_sha256
    was, now = (load(tmp_path / runs).tensors["embeddings"]["item.weight"] for runs in "ab")
    names = [placer_profile(tmp_path / day) for day in ("old", "new")]
    common = sorted(set(names[0]) & set(names[1]))
    assert len(common) > 90
    for key in common:
        assert torch.equal(was[names[0][key]], now[names[1][key]])
    succeed(*train("new", "two", "b", "--resume", "--other-data", "--steps", "12"))


def placer_profile(path: Path) -> dict[int, int]:
    from placer import Profile

    encoding = Profile.load(path).encoding
    return {int(key): row for row, key in enumerate(encoding.vocabularies["item"], 1)}
