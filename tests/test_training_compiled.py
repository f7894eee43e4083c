"""The model compiled, and in bfloat16: what it learns, and what stays as it was."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_cases import load
from fast_and_full import mostly_slow
from torch import Tensor, nn
from training_cases import QUICK, losses_of, plan_for, small_log

from placer.errors import CheckpointError, PlacerError
from placer.executor import PlacedEmbeddings
from placer.training.config import CheckpointPolicy
from placer.training.loop import train
from placer.training.reading import readings
from placer.training.trainer import Trainer

LOG = small_log(700)  # The last batch is smaller: compiled code must take other sizes.
PLAN = plan_for(LOG, "staged")


@pytest.mark.slow
def test_a_compiled_model_trains_alike(tmp_path: Path) -> None:
    config = replace(QUICK, compile="aot_eager", backend="tiered")
    compiled = train(PLAN, LOG, config, checkpoints=CheckpointPolicy(tmp_path / "compiled"))
    plain = train(PLAN, LOG, replace(config, compile=None))
    assert losses_of(compiled) == pytest.approx(losses_of(plain), abs=1e-5)
    assert compiled.auc == pytest.approx(plain.auc, abs=1e-3)
    # A checkpoint knows nothing of it, and goes on without.
    longer = replace(config, compile=None, epochs=2)
    assert train(PLAN, LOG, longer, resume=tmp_path / "compiled").steps == 2 * 20


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_compiles_the_model() -> None:
    config = replace(QUICK, compile="inductor")
    compiled, plain = train(PLAN, LOG, config), train(PLAN, LOG, QUICK)
    assert losses_of(compiled) == pytest.approx(losses_of(plain), abs=1e-4)


def test_a_compiler_that_there_is_not_is_named() -> None:
    with pytest.raises(PlacerError, match=r"torch.compile with 'gcc' failed: .*train without it"):
        train(PLAN, LOG, replace(QUICK, compile="gcc"))


@pytest.mark.slow
def test_bfloat16_learns_what_float32_learns() -> None:
    log = small_log(3200)
    config = replace(QUICK, epochs=3)
    half = train(plan_for(log, "split"), log, replace(config, amp="bfloat16"))
    full = train(plan_for(log, "split"), log, config)
    assert half.losses != full.losses
    ends = [np.mean(losses_of(result)[-30:]) for result in (half, full)]
    assert ends[0] == pytest.approx(ends[1], abs=0.01)
    assert half.auc == pytest.approx(full.auc, abs=0.01)


@pytest.mark.parametrize("compiler", mostly_slow([None, "aot_eager"], None))
def test_the_mlps_compute_in_bfloat16_and_embeddings_and_weights_in_float32(
    compiler: str | None,
) -> None:
    embeddings = PlacedEmbeddings(PLAN)
    config = replace(QUICK, amp="bfloat16", compile=compiler)
    trainer = Trainer(embeddings, PLAN, 2, config)
    seen: list[torch.dtype] = []

    def note_pooled(module: nn.Module, args: object, outputs: dict[str, Tensor]) -> None:
        for output in outputs.values():
            seen.append(output.dtype)
            if output.requires_grad:
                output.register_hook(lambda gradient: seen.append(gradient.dtype))

    embeddings.register_forward_hook(note_pooled)
    lookups, read = next(readings(LOG, embeddings.feature_names, QUICK))
    assert lookups is not None
    loss = trainer.step(lookups, read.dense, read.labels)
    assert loss.dtype == torch.float32
    assert seen == 2 * 3 * [torch.float32]  # Three features and their gradients.
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
    assert trainer.predict(LOG.chunk).dtype == np.float32


def test_the_mlps_products_are_in_bfloat16() -> None:
    trainer = Trainer(PlacedEmbeddings(PLAN), PLAN, 2, replace(QUICK, amp="bfloat16"))
    seen: list[torch.dtype] = []
    for layer in trainer.model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    trainer.predict(LOG.chunk)
    assert set(seen) == {torch.bfloat16}


def test_a_run_does_not_go_on_in_another_type(tmp_path: Path) -> None:
    policy = CheckpointPolicy(tmp_path)
    train(PLAN, LOG, replace(QUICK, max_steps=2), checkpoints=policy)
    assert load(tmp_path).settings["amp"] is None
    with pytest.raises(CheckpointError, match='amp was absent and is "bfloat16"'):
        train(PLAN, LOG, replace(QUICK, amp="bfloat16"), resume=tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [({"amp": "float16"}, "amp 'float16' is none of"), ({"cache_policy": "lru"}, "lfu, rank")],
)
def test_choices_that_there_are_not(values: dict, message: str) -> None:
    with pytest.raises(PlacerError, match=message):
        replace(QUICK, **values)
