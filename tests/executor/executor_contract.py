"""What every backend of the executor must do: train like the unplaced model."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from executor_cases import (
    LR,
    DoubleModel,
    assert_alike,
    assert_same_bits,
    backward,
    placed,
    placements,
    plan_of,
    random_batch,
    random_gradients,
    shard,
    take_over,
    train_step,
    train_steps,
    two_features,
)
from fast_and_full import combinations, examples, fewer, mostly_slow
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from placer.errors import DataError
from placer.executor import BagBatch, PlacedEmbeddings
from placer.plan.plan import Plan
from placer.tables import OPTIMIZERS, Feature, Table

PLACEMENTS = list(placements(two_features()))
COLD = [name for name in PLACEMENTS if name.startswith("cold rows")]
ROW_PLACEMENTS = ("hbm", "split 50%", "row-wise", "hot, then row-wise", "cold rows cached")


def close(actual: Tensor, expected: Tensor, rtol: float = 1e-4, atol: float = 2e-5) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol)


class BackendContract:
    """Inherit and name the backend."""

    backend: str
    device = "cpu"
    thread_samples = 400
    """Enough for kernels to take several threads."""
    steps = fewer(3, 2)
    """Batches that most tests train on."""

    def placed(self, plan: Plan, **options: object) -> PlacedEmbeddings:
        return placed(plan, backend=self.backend, device=self.device, **options)

    def trains_alike(
        self,
        plan: Plan,
        batches: Sequence[BagBatch],
        padding_idx: Mapping[str, int] | None = None,
    ) -> PlacedEmbeddings:
        """Train the placed and the float64 model side by side and compare all that there is."""
        model = self.placed(plan, padding_idx=padding_idx)
        weights = {table.name: model.state_dict()[f"{table.name}.weight"] for table in plan.tables}
        # The float64 model knows one optimizer, so tables are grouped by theirs.
        optimizers = {table.optimizer for table in plan.tables}
        assert len(optimizers) == 1
        expected = DoubleModel(plan.tables, weights, optimizers.pop(), padding_idx)
        for number, batch in enumerate(batches):
            outputs = model(batch)
            gradients = random_gradients(outputs, seed=number)
            expected_outputs = expected.step(batch, gradients)
            for name, output in outputs.items():
                close(output.detach(), expected_outputs[name].detach())
            backward(outputs, gradients)
        self.equals_double(model, expected)
        return model

    def equals_double(self, model: PlacedEmbeddings, expected: DoubleModel) -> None:
        state = model.optimizer_state_dict()
        for table in model.plan.tables:
            close(model.state_dict()[f"{table.name}.weight"], expected.weights[table.name].detach())
            states = expected.states(table.name)
            own = {key for key in state if key.startswith(f"{table.name}.")}
            assert own == {f"{table.name}.{name}" for name in states}
            for name, expected_state in states.items():
                close(state[f"{table.name}.{name}"], expected_state)
        assert ("updates" in state) == (expected.optimizer == "adam")
        assert state.get("updates", expected.updates) == expected.updates

    @combinations("placement, optimizer", PLACEMENTS, OPTIMIZERS)
    def test_every_placement_trains_like_the_unplaced_model(
        self, placement: str, optimizer: str
    ) -> None:
        table = two_features(optimizer)
        batches = [random_batch([table], seed=seed) for seed in range(self.steps)]
        self.trains_alike(placements(table)[placement], batches)

    @combinations(
        "placement, pooling, optimizer",
        ["crossing cuts", *COLD],
        ["sum", "mean", "max", "none"],
        OPTIMIZERS,
    )
    def test_poolings(self, placement: str, pooling: str, optimizer: str) -> None:
        table = replace(two_features(optimizer), features=(Feature("f", pooling=pooling),))
        batches = [random_batch([table], seed=seed) for seed in range(self.steps)]
        self.trains_alike(placements(table)[placement], batches)

    @pytest.mark.parametrize("optimizer", mostly_slow(OPTIMIZERS, "rowwise_adagrad"))
    def test_one_table_read_with_every_pooling_is_updated_once(self, optimizer: str) -> None:
        features = tuple(Feature(name, pooling=name) for name in ("max", "sum", "none", "mean"))
        table = replace(two_features(optimizer), features=features)
        batches = [random_batch([table], seed=seed) for seed in range(self.steps)]
        self.trains_alike(placements(table)["grid"], batches)

    @pytest.mark.parametrize("placement", mostly_slow(["grid", "cold rows host", "narrow"], "grid"))
    def test_the_default_dtype_of_torch_changes_nothing(self, placement: str) -> None:
        table = two_features()
        plan = placements(table)[placement.replace("narrow", "cold rows staged")]
        if placement == "narrow":
            narrow = [replace(each, dtype="int8") for each in plan.shards if each.memory == "dram"]
            plan = replace(plan, shards=(plan.shards[0], *narrow))
        batches = [random_batch([table], seed=seed, weighted=True) for seed in range(self.steps)]
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            torch.set_default_dtype(dtype)
            try:
                model = self.placed(plan)
                for batch in batches:
                    outputs = model(batch)
                    backward(outputs, {name: output.detach() for name, output in outputs.items()})
            finally:
                torch.set_default_dtype(torch.float32)
            found.append({**outputs, **model.state_dict(), **model.optimizer_state_dict()})
        assert_same_bits(found[0], found[1])

    def test_tables_of_several_widths_share_the_step(self) -> None:
        tables = [
            Table(f"t{i}", 10 + i, dim, features=(Feature(f"f{i}"),))
            for i, dim in enumerate((4, 8, 4, 16, 5, 1))
        ]
        shards = [shard(table, on=f"gpu:{i % 4}") for i, table in enumerate(tables)]
        self.trains_alike(
            plan_of(tables, shards),
            [random_batch(tables, seed=seed) for seed in range(self.steps)],
        )

    def test_each_table_has_its_own_optimizer(self) -> None:
        tables = [replace(two_features(name), name=name) for name in OPTIMIZERS]
        tables = [replace(table, features=(Feature(table.name),)) for table in tables]
        model = self.placed(plan_of(tables))
        weights = model.state_dict()
        batch = random_batch(tables)
        outputs = model(batch)
        gradients = random_gradients(outputs)
        backward(outputs, gradients)
        for index, table in enumerate(tables):
            single = DoubleModel(
                [table], {table.name: weights[f"{table.name}.weight"]}, table.optimizer
            )
            start, stop = (int(batch.offsets[(index + i) * batch.batch_size]) for i in (0, 1))
            part = BagBatch(
                batch.ids[start:stop],
                batch.offsets[index * batch.batch_size :][: batch.batch_size + 1] - start,
                batch.batch_size,
            )
            single.step(part, {table.name: gradients[table.name]})
            close(model.state_dict()[f"{table.name}.weight"], single.weights[table.name].detach())

    @pytest.mark.parametrize("optimizer", mostly_slow(OPTIMIZERS, "rowwise_adagrad"))
    def test_one_id_fills_the_batch(self, optimizer: str) -> None:
        table = two_features(optimizer)
        ids = torch.full((2 * 8 * 6,), 7)
        batch = BagBatch(ids, torch.arange(0, 97, 6), 8)
        self.trains_alike(placements(table)["grid"], [batch] * self.steps)

    @pytest.mark.parametrize(
        ("before", "optimizer"),
        mostly_slow(
            [(1, "sgd"), (127, "adagrad"), (128, "rowwise_adagrad"), (129, "adam"), (256, "sgd")],
            (128, "rowwise_adagrad"),
        ),
    )
    def test_a_row_of_many_lookups_is_updated_once(self, before: int, optimizer: str) -> None:
        """Wherever its lookups begin among all, sorted by row."""
        table = replace(two_features(optimizer), features=(Feature("f"),))
        ids = torch.tensor([0] * before + [1] * 300 + [2] * 12)
        batch = BagBatch(ids, torch.arange(0, ids.numel() + 1), ids.numel())
        self.trains_alike(placements(table)["hbm"], [batch] * 2)

    @pytest.mark.parametrize("optimizer", mostly_slow(OPTIMIZERS, "rowwise_adagrad"))
    def test_batches_with_only_empty_bags_change_nothing(self, optimizer: str) -> None:
        table = two_features(optimizer)
        model = self.placed(placements(table)["grid"])
        before = model.state_dict()["t.weight"]
        outputs = model(BagBatch(torch.empty(0, dtype=torch.int64), torch.zeros(9).long(), 4))
        assert all(bool((output == 0).all()) for output in outputs.values())
        backward(outputs, random_gradients(outputs))
        assert torch.equal(model.state_dict()["t.weight"], before)

    def test_a_batch_of_no_samples(self) -> None:
        table = two_features()
        model = self.placed(placements(table)["grid"])
        before = model.state_dict()["t.weight"]
        outputs = model(BagBatch(torch.empty(0, dtype=torch.int64), torch.zeros(1).long(), 0))
        assert {name: output.shape for name, output in outputs.items()} == {
            "t.sum": (0, 8),
            "t.mean": (0, 8),
        }
        backward(outputs, random_gradients(outputs))
        assert torch.equal(model.state_dict()["t.weight"], before)

    @pytest.mark.parametrize("pooling", ["sum", "mean", "max", "none"])
    def test_a_table_without_rows_gives_zeros(self, pooling: str) -> None:
        empty = Table("empty", 0, 8, features=(Feature("e", pooling=pooling),))
        alone = self.placed(plan_of([empty]))
        outputs = alone(random_batch([empty]))
        assert outputs["e"].shape == ((0, 8) if pooling == "none" else (12, 8))
        assert bool((outputs["e"] == 0).all())
        backward(outputs, random_gradients(outputs))
        assert alone.state_dict()["empty.weight"].shape == (0, 8)
        tables = [empty, two_features()]
        model = self.placed(plan_of(tables))
        train_step(model, random_batch(tables))

    def test_int32_ids_are_int64_ids(self) -> None:
        table = two_features()
        models = [self.placed(placements(table)["split 50%"]) for _ in range(2)]
        for model, dtype in zip(models, (torch.int32, torch.int64), strict=True):
            train_step(model, random_batch([table], id_dtype=dtype))
        assert torch.equal(models[0].state_dict()["t.weight"], models[1].state_dict()["t.weight"])

    @combinations("padding, pooling", [0, 7], ["sum", "mean", "max"])
    def test_padding_is_left_out_as_in_embedding_bag(self, pooling: str, padding: int) -> None:
        table = replace(two_features(), features=(Feature("f", pooling=pooling), Feature("g")))
        batches = [random_batch([table], seed=seed) for seed in range(self.steps)]
        for batch in batches:
            batch.ids[::3] = padding
        self.trains_alike(placements(table)["split 50%"], batches, {"f": padding})

    def test_padding_may_lie_outside_of_the_table(self) -> None:
        features = (Feature("sum"), Feature("none", pooling="none"))
        table = replace(two_features(), features=features)
        model = self.placed(placements(table)["split 50%"], padding_idx={"sum": -1, "none": -1})
        before = model.state_dict()["t.weight"]
        batch = BagBatch(torch.tensor([4, -1, -1, 5, -1, 6]), torch.tensor([0, 2, 3, 5, 6]), 2)
        outputs = model(batch)
        close(outputs["sum"], torch.stack([before[4], torch.zeros(8)]))
        close(outputs["none"], torch.stack([before[5], torch.zeros(8), before[6]]))
        backward(outputs, random_gradients(outputs))
        changed = (model.state_dict()["t.weight"] != before).any(1)
        assert torch.nonzero(changed).squeeze(1).tolist() == [4, 5, 6]

    @combinations("placement, optimizer", ["hbm", "grid", "crossing cuts"], OPTIMIZERS)
    def test_weights_per_sample_and_their_gradients(self, placement: str, optimizer: str) -> None:
        table = replace(two_features(optimizer), features=(Feature("f"), Feature("g")))
        plan = placements(table)[placement]
        model = self.placed(plan)
        expected = DoubleModel([table], {"t": model.state_dict()["t.weight"]}, optimizer)
        for seed in range(self.steps):
            batch = random_batch([table], seed=seed, weighted=True)
            assert batch.weights is not None
            own, reference = (batch.weights.clone().requires_grad_() for _ in range(2))
            outputs = model(replace(batch, weights=own))
            gradients = random_gradients(outputs, seed)
            backward(outputs, gradients)
            expected.step(replace(batch, weights=reference), gradients)
            assert own.grad is not None
            assert reference.grad is not None
            close(own.grad, reference.grad)
        self.equals_double(model, expected)

    @pytest.mark.parametrize("pooling", ["mean", "max", "none"])
    def test_weights_scale_rows_before_any_pooling(self, pooling: str) -> None:
        table = replace(two_features("sgd"), features=(Feature("f", pooling=pooling),))
        model = self.placed(placements(table)["crossing cuts"])
        before = model.state_dict()["t.weight"].double()
        batch = random_batch([table], weighted=True)
        scale = batch.weights.clone().requires_grad_()
        outputs = model(replace(batch, weights=scale))
        gradients = random_gradients(outputs)
        backward(outputs, gradients)

        weight = before.clone().requires_grad_()
        reference = batch.weights.double().requires_grad_()
        rows = weight[batch.ids] * reference.unsqueeze(1)
        expected = rows
        if pooling != "none":
            ends = batch.offsets.tolist()
            bags = [rows[i:j] for i, j in itertools.pairwise(ends)]
            pool = {"mean": lambda bag: bag.mean(0), "max": lambda bag: bag.max(0).values}[pooling]
            expected = torch.stack([pool(b) if len(b) else rows[:0].sum(0) for b in bags])
        close(outputs["f"].detach(), expected.detach())
        expected.backward(gradients["f"].double())
        assert scale.grad is not None
        assert reference.grad is not None
        close(scale.grad, reference.grad)
        close(model.state_dict()["t.weight"], before - LR * weight.grad)

    def test_max_gives_a_tie_to_its_first_lookup(self) -> None:
        table = Table("t", 4, 3, "float32", "sgd", (Feature("f", pooling="max"),))
        start = torch.tensor([[1.0, 2, 3], [1, 5, 0], [1, 5, 3], [0, 0, 0]])
        ids, offsets = torch.tensor([2, 0, 1, 2, 3, 3]), torch.tensor([0, 4, 4, 6])
        model = self.placed(plan_of([table]), weights={"t": start})
        outputs = model(BagBatch(ids, offsets, 3))
        bag = nn.EmbeddingBag.from_pretrained(
            start.clone(), freeze=False, mode="max", include_last_offset=True
        )
        expected = bag(ids, offsets)
        assert torch.equal(outputs["f"], expected)
        gradient = random_gradients(outputs)["f"]
        outputs["f"].backward(gradient)
        expected.backward(gradient)
        close(model.state_dict()["t.weight"], start - LR * bag.weight.grad)

    @combinations("optimizer, dtype", OPTIMIZERS, ["float16", "bfloat16"])
    def test_half_precision_weights(self, optimizer: str, dtype: str) -> None:
        """Sums and state are float32; a weight is rounded once when it is written."""
        table = replace(two_features(optimizer), dtype=dtype)
        model = self.placed(placements(table)["crossing cuts"])
        # bfloat16 keeps 8 bits of a weight, float16 11.
        ulp = {"float16": 2**-11, "bfloat16": 2**-8}[dtype]
        for seed in range(self.steps):
            weight = model.state_dict()["t.weight"]
            assert weight.dtype == getattr(torch, dtype)
            state = model.optimizer_state_dict()
            expected = DoubleModel([table], {"t": weight}, optimizer)
            expected.updates = seed
            for name, target in expected.states("t").items():
                assert state[f"t.{name}"].dtype == torch.float32
                target.copy_(state[f"t.{name}"])
            batch = random_batch([table], seed=seed)
            outputs = model(batch)
            assert outputs["t.sum"].dtype == torch.float32
            gradients = random_gradients(outputs, seed)
            expected_outputs = expected.step(batch, gradients)
            close(outputs["t.sum"].detach(), expected_outputs["t.sum"].detach())
            backward(outputs, gradients)
            close(
                model.state_dict()["t.weight"],
                expected.weights["t"].detach(),
                rtol=1.01 * ulp,
                atol=1e-6,
            )

    @pytest.mark.parametrize("dtype", mostly_slow(["float16", "bfloat16"], "bfloat16"))
    def test_stochastic_rounding_follows_updates_too_small_for_nearest(self, dtype: str) -> None:
        """Each update is an eighth of the distance to the next number of the type."""
        table = replace(two_features("sgd"), dtype=dtype, features=(Feature("f"),))
        plan = placements(table)["cold rows staged"]
        generator = torch.Generator().manual_seed(0)
        # Within 0.5..1, where neighbours are equally far apart, and staying there.
        start = torch.rand(table.rows, table.dim, generator=generator) * 0.25 + 0.75
        start = start.to(getattr(torch, dtype))
        neighbour = {"float16": 2**-11, "bfloat16": 2**-8}[dtype]
        gradient = torch.rand(table.rows, table.dim, generator=generator) + 0.5
        gradient *= neighbour / 8 / LR
        ids = torch.arange(table.rows)
        batch = BagBatch(ids, torch.arange(table.rows + 1), table.rows)
        moved = {}
        for rounding, steps in (("nearest", 4), ("stochastic", 24)):
            model = self.placed(plan, weights={"t": start}, rounding=rounding)
            for _ in range(steps):
                model(batch)["f"].backward(gradient)
            moved[rounding] = start.double() - model.state_dict()["t.weight"].double()
        assert float(moved["nearest"].abs().max()) == 0
        # A weight's error is that of `steps` coins, each with a standard deviation of at most
        # half the distance to the neighbour; 5 standard deviations of the mean of all weights.
        tolerance = 5 * neighbour / 2 * (steps / start.numel()) ** 0.5
        wanted = float((steps * LR * gradient).double().mean())
        assert float(moved["stochastic"].mean()) == pytest.approx(wanted, abs=tolerance)
        assert tolerance < wanted / 5
        # And each weight by itself, not only their mean.
        error = moved["stochastic"] - steps * LR * gradient
        assert float(error.abs().max()) < 6 * neighbour / 2 * steps**0.5

    @pytest.mark.parametrize("optimizer", mostly_slow(OPTIMIZERS, "rowwise_adagrad"))
    def test_a_run_may_change_its_plan_midway(self, optimizer: str) -> None:
        table = two_features(optimizer)
        plans = placements(table)
        batches = [random_batch([table], seed=seed) for seed in range(6)]

        through, first = (self.placed(plans["split 50%"]) for _ in range(2))
        train_steps(through, batches)
        train_steps(first, batches[:3])
        second = self.placed(plans["hot, then row-wise"], seed=99)
        take_over(second, first)
        train_steps(second, batches[3:], 3)
        assert_alike(through, second)

    @combinations("placement, optimizer", PLACEMENTS, OPTIMIZERS)
    def test_weights_and_state_survive_a_round_trip(self, placement: str, optimizer: str) -> None:
        table = two_features(optimizer)
        model = self.placed(placements(table)[placement])
        weight = torch.randn(table.rows, table.dim)
        model.load_state_dict({"t.weight": weight})
        assert torch.equal(model.state_dict()["t.weight"], weight)
        state = {
            key: torch.rand(value.shape) for key, value in model.optimizer_state_dict().items()
        }
        if "updates" in state:
            state["updates"] = torch.tensor(7)
        model.load_optimizer_state_dict(state)
        assert_same_bits(state, model.optimizer_state_dict())

    @combinations("placement, bad", ["hbm", "split 50%"], [-1, 61, 2**40])
    def test_an_id_outside_of_the_table_is_named(self, bad: int, placement: str) -> None:
        table = two_features()
        model = self.placed(placements(table)[placement])
        batch = random_batch([table])
        batch.ids[-1] = bad
        steps = [batch] * (1 if self.device == "cpu" else 9)  # A GPU tells of it later.
        with pytest.raises(DataError, match=rf"'t.mean': id {bad} .*'t'.* 61 rows"):
            _ = [model(step) for step in steps]

    @pytest.mark.parametrize("optimizer", mostly_slow(OPTIMIZERS, "rowwise_adagrad"))
    def test_runs_are_bit_equal_on_any_number_of_threads(self, optimizer: str) -> None:
        features = (Feature("s"), Feature("m", pooling="mean"), Feature("x", pooling="max"))
        table = replace(two_features(optimizer, rows=500, dim=17), features=features)
        results = []
        threads = torch.get_num_threads()
        try:
            for count in (1, 2, 2):
                torch.set_num_threads(count)
                model = self.placed(placements(table)["split 50%"])
                for seed in range(2):
                    outputs = model(
                        random_batch([table], self.thread_samples, seed=seed, longest=20)
                    )
                    backward(outputs, random_gradients(outputs, seed))
                results.append(model.state_dict()["t.weight"])
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[1], results[2])

    @pytest.mark.parametrize(
        ("dtype", "optimizer"),
        mostly_slow(
            [("float32", "adagrad"), ("float32", "adam"), *product(["bfloat16"], OPTIMIZERS)],
            ("float32", "adam"),
            ("bfloat16", "rowwise_adagrad"),
        ),
    )
    def test_row_placements_are_bit_equal(self, dtype: str, optimizer: str) -> None:
        """Sums run in the order of the lookups, wherever the rows are; so are they rounded."""
        table = replace(two_features(optimizer), dtype=dtype)
        batches = [random_batch([table], seed=seed) for seed in range(3)]
        hbm, *others = ROW_PLACEMENTS

        def trained(name: str, rounding: str) -> Tensor:
            model = self.placed(placements(table)[name], rounding=rounding)
            train_steps(model, batches)
            return model.state_dict()["t.weight"]

        expected = trained(hbm, "stochastic")
        assert all(torch.equal(trained(name, "stochastic"), expected) for name in others)
        assert torch.equal(trained(hbm, "nearest"), expected) == (dtype == "float32")

    def test_nothing_is_updated_without_gradients(self) -> None:
        table = two_features()
        model = self.placed(placements(table)["grid"])
        before = model.state_dict()["t.weight"]
        with torch.no_grad():
            outputs = model(random_batch([table]))
        assert not any(output.requires_grad for output in outputs.values())
        assert torch.equal(model.state_dict()["t.weight"], before)
        assert list(model.parameters()) == []

    def test_outputs_may_be_changed_in_place_or_left_unused(self) -> None:
        table = replace(two_features("sgd"), features=(Feature("f"), Feature("g")))
        model = self.placed(plan_of([table]))
        before = model.state_dict()["t.weight"]
        outputs = model(random_batch([table], longest=3))
        untouched = outputs["g"].detach().clone()
        outputs["f"].mul_(2).sum().backward()
        assert torch.equal(outputs["g"], untouched)
        batch = random_batch([table], longest=3)
        counts = torch.bincount(batch.ids[: int(batch.offsets[12])], minlength=table.rows)
        close(model.state_dict()["t.weight"], before - LR * 2 * counts.unsqueeze(1))

    def test_bags_that_change_before_the_backward_pass_are_refused(self) -> None:
        model = self.placed(plan_of([two_features("sgd")]))
        batch = random_batch(model.plan.tables)
        outputs = model(batch)
        batch.offsets.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            backward(outputs, random_gradients(outputs))

    def test_learning_rate_may_change(self) -> None:
        table = replace(two_features("sgd"), features=(Feature("f"),))
        model = self.placed(plan_of([table]))
        before = model.state_dict()["t.weight"]
        model.set_lr(0.5)
        model(BagBatch(torch.tensor([3]), torch.tensor([0, 1]), 1))["f"].sum().backward()
        close(model.state_dict()["t.weight"][3], before[3] - 0.5)

    @settings(examples(25), derandomize=True)
    @given(data=st.data())
    def test_random_plans_train_like_the_unplaced_model(self, data: st.DataObject) -> None:
        optimizer = data.draw(st.sampled_from(OPTIMIZERS))
        tables = []
        shards = []
        hot = {}
        for index in range(data.draw(st.integers(1, 3))):
            features = tuple(
                Feature(f"t{index}.{i}", pooling=pooling)
                for i, pooling in enumerate(
                    data.draw(
                        st.lists(
                            st.sampled_from(["sum", "mean", "max", "none"]), min_size=1, max_size=2
                        )
                    )
                )
            )
            table = Table(
                f"t{index}",
                data.draw(st.integers(1, 40)),
                data.draw(st.integers(1, 9)),
                "float32",
                optimizer,
                features,
            )
            tables.append(table)
            if data.draw(st.booleans()):
                count = data.draw(st.integers(0, table.rows))
                order = np.random.default_rng(count).permutation(table.rows)
                hot[table.name] = order[:count].tolist()
            shards += draw_shards(data, table)
        plan = plan_of(tables, shards, hot)
        seed = data.draw(st.integers(0, 1000))
        batches = [random_batch(tables, 6, seed=seed + i, longest=4) for i in range(2)]
        self.trains_alike(plan, batches)


def draw_shards(data: st.DataObject, table: Table) -> list:
    """A random valid cut: column slices, each cut by rows, some pieces strided."""
    shards = []
    edges = sorted({0, table.dim, *data.draw(st.lists(st.integers(0, table.dim), max_size=2))})
    for cols in itertools.pairwise(edges):
        cuts = data.draw(st.lists(st.integers(0, table.rows), max_size=2))
        bounds = sorted({0, table.rows, *cuts})
        for start, stop in itertools.pairwise(bounds):
            stride = data.draw(st.integers(1, min(3, stop - start)))
            for phase in range(stride):
                gpu = f"gpu:{data.draw(st.integers(0, 3))}"
                memory = data.draw(st.sampled_from(["hbm", "dram"]))
                rows = (start + phase, stop, stride)
                shards.append(shard(table, rows, cols, on=gpu, memory=memory))
    return shards
