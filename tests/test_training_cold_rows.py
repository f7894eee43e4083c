"""Training with cold rows that are narrow or on a drive: resumed, killed, and in little memory."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fast_and_full import mostly_slow
from plan_cases import with_drives
from training_cases import QUICK, Placement, assert_same_tensors, losses_of, plan_for, small_log

from placer import Plan
from placer.errors import PlacerError
from placer.tables import ColdDType, OptimizerName
from placer.training.config import CheckpointPolicy
from placer.training.loop import train

LOG = small_log(320)
CONFIG = replace(QUICK, epochs=2, report_every=1, backend="tiered")
HOME = Path(__file__).resolve().parent


def cold_plan(
    placement: Placement = "cached",
    memory: str = "ssd",
    dtype: ColdDType | None = None,
    optimizer: OptimizerName = "adagrad",
) -> Plan:
    """The coldest two thirds of each table in some home."""
    plan = plan_for(LOG, placement, optimizer=optimizer)
    shards = [
        replace(part, memory=memory, dtype=dtype) if part.memory == "dram" else part  # type: ignore[arg-type]
        for part in plan.shards
    ]
    return with_drives(replace(plan, shards=tuple(shards)))


def policy(folder: Path, every: int | None = None) -> CheckpointPolicy:
    return CheckpointPolicy(folder, every)


@pytest.mark.parametrize("optimizer", mostly_slow(["adagrad", "adam"], "adam"))
def test_a_run_on_a_drive_is_bit_equal_to_one_in_memory(
    tmp_path: Path, optimizer: OptimizerName
) -> None:
    runs = {}
    for memory in ("dram", "ssd"):
        plan = cold_plan(memory=memory, optimizer=optimizer)
        runs[memory] = train(plan, LOG, CONFIG, checkpoints=policy(tmp_path / memory))
    assert runs["dram"].losses == runs["ssd"].losses
    assert runs["dram"].log_loss == runs["ssd"].log_loss
    assert_same_tensors(tmp_path / "dram", tmp_path / "ssd")


@pytest.mark.parametrize("dtype", mostly_slow(["bfloat16", "int8"], "int8"))
def test_a_run_with_narrow_rows_resumes_bit_equal(tmp_path: Path, dtype: ColdDType) -> None:
    plan = cold_plan(dtype=dtype)
    whole = train(plan, LOG, CONFIG, checkpoints=policy(tmp_path / "whole"))
    short = replace(CONFIG, max_steps=7)
    train(plan, LOG, short, checkpoints=policy(tmp_path / "parts"))
    other = cold_plan("staged", "dram", dtype)
    rest = train(
        other, LOG, CONFIG, checkpoints=policy(tmp_path / "parts"), resume=tmp_path / "parts"
    )
    assert rest.losses == whole.losses[7:]
    assert_same_tensors(tmp_path / "whole", tmp_path / "parts")
    wide = train(cold_plan(memory="dram"), LOG, CONFIG)
    assert rest.losses != wide.losses[7:]
    assert losses_of(rest) == pytest.approx(losses_of(wide)[7:], abs=0.02)


@pytest.mark.parametrize(
    ("first", "then"), mostly_slow([("int8", None), (None, "int8")], ("int8", None))
)
def test_a_run_goes_on_with_rows_of_another_width(
    tmp_path: Path, first: ColdDType | None, then: ColdDType | None
) -> None:
    train(cold_plan(dtype=first), LOG, replace(CONFIG, max_steps=7), checkpoints=policy(tmp_path))
    rest = train(cold_plan(dtype=then), LOG, CONFIG, resume=tmp_path)
    wide = train(cold_plan(), LOG, CONFIG)
    assert losses_of(rest) == pytest.approx(losses_of(wide)[7:], abs=0.02)


def test_the_folder_of_the_drive_is_an_option_of_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PlacerError, match=str(tmp_path / "file")):
        train(cold_plan(), LOG, replace(CONFIG, drive=str(tmp_path / "file")))
    config = replace(CONFIG, max_steps=2, drive=str(tmp_path / "drive"))
    train(cold_plan(), LOG, config, checkpoints=policy(tmp_path / "run"))
    assert list((tmp_path / "drive").iterdir()) == []


_LIMITED = """
import resource, sys
import torch
from placer.executor import BagBatch, PlacedEmbeddings, look_ahead
from placer.plan.plan import Plan
from placer.plan.fields import Shard
from placer.tables import Feature, Table
from placer.topology.topology import Topology

memory, folder, limited = sys.argv[1], sys.argv[2], sys.argv[3] == "limited"
torch.set_num_threads(1)
WIDTH, SAMPLES = 32, 512


def plan_of(rows):
    table = Table("t", rows, WIDTH, "float32", "rowwise_adagrad", (Feature("t"),))
    shards = (
        Shard("t", (0, 1000, 1), (0, WIDTH), ("gpu:0",), "hbm", "device"),
        Shard("t", (1000, rows, 1), (0, WIDTH), ("gpu:0",), memory, "staged", staging_rows=8192),
    )
    return Plan((table,), Topology.parse("1xh100", ssd="1TiB"), shards)


def batches(rows):
    generator = torch.Generator().manual_seed(0)
    offsets = torch.arange(0, 8 * SAMPLES + 1, 8)
    for _ in range(10):
        ids = torch.randint(0, rows, (8 * SAMPLES,), generator=generator) ** 2 // rows
        yield BagBatch.from_features({"t": (ids, offsets, None)}, ["t"])


def train(rows):
    model = PlacedEmbeddings(plan_of(rows), lr=0.1, backend="tiered", drive=folder)
    for batch in look_ahead(batches(rows), model):
        loss = (model(batch)["t"] - 1).square().mean()
        loss.backward()
        yield loss.item().hex()


ROWS = 1 << 22
list(train(20_000))  # Libraries are loaded, and threads have started.
if limited:
    with open("/proc/self/status") as status:
        (used,) = (int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    limit = used + ROWS * WIDTH * 4 // 4
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
print(*train(ROWS))
"""


@pytest.mark.slow
def test_a_quarter_of_the_tables_memory_is_enough(tmp_path: Path) -> None:
    def losses_in(memory: str, limit: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", _LIMITED, memory, str(tmp_path), limit]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    expected = losses_in("dram", "unlimited")
    assert len(expected.stdout.split()) == 10, expected.stderr
    limited = losses_in("ssd", "limited")
    assert limited.stdout == expected.stdout, limited.stderr
    assert "CapacityError" in losses_in("dram", "limited").stderr, "the limit holds"
