"""The `triton` backend keeps the contract: in Triton's interpreter, or compiled for a GPU."""

from itertools import cycle, product

import pytest
import torch
from executor_cases import DEVICE, assert_same_bits, machine, placed, shard
from executor_contract import PLACEMENTS, BackendContract
from fast_and_full import mostly_slow
from torch import Tensor

from placer.errors import DataError
from placer.executor import BagBatch, PlacedEmbeddings
from placer.plan.plan import Plan
from placer.tables import OPTIMIZERS, Feature, OptimizerName, Table

SOME = ("grid", "crossing cuts", "cold rows staged", "cold rows cached")
FAST = list(zip(SOME, OPTIMIZERS, strict=True))
WITH_STATE = ("rowwise_adagrad", "adam")
EACH = list(zip(PLACEMENTS, cycle(OPTIMIZERS), strict=False))


class TestTriton(BackendContract):
    backend = "triton"
    device = DEVICE
    thread_samples = 4  # The interpreter has one thread, and takes long for each launch.
    steps = 2
    # Fast for other backends. The fast tests of kernels have what is Triton's own in them.
    slow_tests = frozenset(
        {
            "test_a_row_of_many_lookups_is_updated_once",
            "test_a_run_may_change_its_plan_midway",
            "test_half_precision_weights",
            "test_one_id_fills_the_batch",
            "test_one_table_read_with_every_pooling_is_updated_once",
            "test_random_plans_train_like_the_unplaced_model",
            "test_row_placements_are_bit_equal",
            "test_runs_are_bit_equal_on_any_number_of_threads",
            "test_stochastic_rounding_follows_updates_too_small_for_nearest",
            "test_tables_of_several_widths_share_the_step",
            "test_the_default_dtype_of_torch_changes_nothing",
        }
    )

    # Placements differ in what `tiered` has, too: of the interpreter's slow steps a few are enough.
    @pytest.mark.parametrize(
        ("placement", "optimizer"),
        mostly_slow([*dict.fromkeys([*EACH, *FAST])], *FAST),
    )
    def test_every_placement_trains_like_the_unplaced_model(
        self, placement: str, optimizer: str
    ) -> None:
        super().test_every_placement_trains_like_the_unplaced_model(placement, optimizer)

    @pytest.mark.parametrize("dtype", ["bfloat16"])  # Kernels round both types like the executor.
    def test_stochastic_rounding_follows_updates_too_small_for_nearest(self, dtype: str) -> None:
        super().test_stochastic_rounding_follows_updates_too_small_for_nearest(dtype)

    @pytest.mark.parametrize(
        ("dtype", "optimizer"), [("float32", "adagrad"), *product(["bfloat16"], WITH_STATE)]
    )
    def test_row_placements_are_bit_equal(self, dtype: str, optimizer: str) -> None:
        super().test_row_placements_are_bit_equal(dtype, optimizer)

    @pytest.mark.parametrize("optimizer", WITH_STATE)
    def test_a_run_may_change_its_plan_midway(self, optimizer: str) -> None:
        super().test_a_run_may_change_its_plan_midway(optimizer)

    @pytest.mark.parametrize("optimizer", ["rowwise_adagrad"])  # There is one thread.
    def test_runs_are_bit_equal_on_any_number_of_threads(self, optimizer: str) -> None:
        super().test_runs_are_bit_equal_on_any_number_of_threads(optimizer)


def _model(optimizer: OptimizerName, captures: bool) -> PlacedEmbeddings:
    tables = tuple(
        Table(name, 50, 8, "float32", optimizer, features=(Feature(name, 2, pooling=pooling),))
        for name, pooling in (("a", "sum"), ("b", "mean"), ("c", "none"))
    )
    plan = Plan(tables, machine(1), tuple(shard(table) for table in tables))
    model = placed(plan, device=DEVICE, backend="triton")
    model._captured._can &= captures
    return model


def _batch(seed: int, samples: int = 6) -> BagBatch:
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(0, 3 * samples * 2 + 1, 2)
    return BagBatch(torch.randint(0, 50, (6 * samples,), generator=generator), offsets, samples)


def _loss(outputs: dict[str, Tensor]) -> Tensor:
    weighted = [(index + 1) * rows.square().sum() for index, rows in enumerate(outputs.values())]
    return torch.stack(weighted).sum()


@pytest.mark.skipif(DEVICE != "cuda", reason="only a GPU has graphs")
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_captured_steps_train_like_others_to_the_bit(optimizer: OptimizerName) -> None:
    models = [_model(optimizer, captures) for captures in (True, False)]
    losses: list[list[float]] = []
    for model in models:
        seen: list[float] = []

        def step(
            batch: BagBatch, model: PlacedEmbeddings = model, seen: list[float] = seen
        ) -> None:
            loss = _loss(model(batch))
            loss.backward()
            seen.append(float(loss))

        for seed in range(6):
            step(_batch(seed))
        first, second = _loss(model(_batch(6))), _loss(model(_batch(7)))  # Both are open.
        second.backward()
        first.backward()
        _loss(model(_batch(8)))  # Never trained on.
        with torch.no_grad():
            seen.append(float(_loss(model(_batch(9)))))
        step(_batch(10, samples=4))
        model.set_lr(0.5)
        step(_batch(11))
        model.set_eps(1e-2)
        for seed in range(12, 18):
            step(_batch(seed))
        losses.append(seen)
    captured, plain = models
    assert captured._captured._captured, "nothing was captured"
    assert losses[0] == losses[1]
    assert captured.update_count() == plain.update_count()
    assert captured.hit_rates() == plain.hit_rates()
    assert_same_bits(plain.state_dict(), captured.state_dict())


@pytest.mark.skipif(DEVICE != "cuda", reason="only a GPU has graphs")
def test_a_bad_id_of_a_captured_step_is_reported() -> None:
    model = _model("sgd", True)
    for seed in range(6):
        _loss(model(_batch(seed))).backward()
    bad = _batch(6)
    bad.ids[3] = 50
    _loss(model(bad)).backward()
    torch.cuda.synchronize()
    with pytest.raises(DataError, match="id 50 is not a row of table 'a'"):
        model(_batch(7))
