"""The examples of docs/pytorch.md run, one after the other, on a small model."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from resume_cases import STEPS, Model, batch_of
from torch import Tensor

import placer
from placer import Topology

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pytorch.md"


class OneInput(Model):
    """Called with a batch, as most loaders give it."""

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return super().forward(batch["item"], batch["pages"])


@pytest.mark.slow
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Topology.parse("1xh100")
    monkeypatch.setattr(Topology, "parse", lambda *_: machine)  # `auto` is this machine.
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    batches = [dict(zip(("item", "pages"), batch_of(step), strict=False)) for step in range(STEPS)]
    model = OneInput()
    known = {"torch": torch, "model": model, "loader": batches, "path": tmp_path / "run.pt"}
    known |= {"folder": tmp_path / "tables", "topology": machine}
    for block in blocks:
        is_placed = not list(model.item.parameters())
        if "apply_plan(" in block and is_placed:
            placer.remove_plan(model)
        if "clip_grad_norm_" in block:
            model(batches[0]).sum().backward()
        exec(compile(block, str(PAGE), "exec"), known)
    assert (tmp_path / "run.pt").exists()
    assert len(blocks) == 5
