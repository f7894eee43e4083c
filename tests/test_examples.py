"""Each example runs alone, trains with its plan as without, and resumes equal to the bit."""

import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config

import placer

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NEEDS = {
    "accelerate_loop": "accelerate",
    "ddp_bf16": "torch",
    "deepctr": "deepctr_torch",
    "hf_trainer": "transformers",
    "lightning_module": "lightning",
    "plain_loop": "torch",
    "ray_train": "ray",
    "rechub": "torch_rechub",
    "serving": "torch",
    "serving_growing": "numba",
    "torchrec_dmp": "torchrec",
}
"""Each example, and the package that it cannot do without."""

COMPARED = ("deepctr", "plain_loop", "rechub")
RESUMED = ("accelerate_loop", "hf_trainer", "lightning_module", "plain_loop", "ray_train")
PROCESSES = ("ddp_bf16", "ray_train", "torchrec_dmp")
"""Examples that start processes, which import them anew."""

COMPILED_FAST = {
    "cpp_cache_precompile_headers": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
}
pytestmark = pytest.mark.slow


def run(name: str) -> None:
    """Run an example as a script; in this process, for imports take longer than all else."""
    if name not in PROCESSES:
        # What is compiled once need not be compiled well.
        with torch._inductor.config.patch(COMPILED_FAST):
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout)


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss'?:? '?(\d+\.\d+)", printed)]


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_runs(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed (see examples/README.md)")
    monkeypatch.chdir(tmp_path)
    # Some libraries ask for their newest version; nothing is to leave this machine.
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    run(name)
    printed = capsys.readouterr().out
    if name in RESUMED:
        assert "the resumed run is equal to the bit" in printed
    if name == "serving_growing":
        assert "answers as one that loaded the last checkpoint whole" in printed
        return
    if name == "serving":
        share = float(re.findall(r"([\d.]+)% of lookups were served from HBM", printed)[0])
        assert share == pytest.approx(90, abs=5)  # What the example asks for.
        return
    found = losses(printed)
    assert found[-1] < 0.7 * found[0] or name == "ray_train"
    if name not in PROCESSES:
        assert re.search(r"table \S+: \d+ rows in hbm", printed)
        assert re.search(r"table \S+: [1-9]\d* rows in dram", printed)
    if name in COMPARED:
        unplaced = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
        monkeypatch.setattr(placer, "apply_plan", lambda *_, **__: unplaced)
        monkeypatch.setattr(placer, "remove_plan", lambda model: None)
        run(name)
        # BatchNorm and Adagrad's first steps make much of one rounded bit.
        tolerance = 1e-2 if name == "rechub" else 2e-4
        assert losses(capsys.readouterr().out) == pytest.approx(found, abs=tolerance)


def test_examples_are_short_and_stand_alone() -> None:
    scripts = {path.stem: path.read_text().splitlines() for path in EXAMPLES.glob("*.py")}
    assert scripts.keys() == NEEDS.keys()
    for name, lines in scripts.items():
        assert len(lines) <= 80, name
        for other in scripts:
            assert not any(re.match(rf"(from|import) {other}\b", line) for line in lines)
    listed = set(re.findall(r"\]\((\w+)\.(?:py|ipynb)\)", (EXAMPLES / "README.md").read_text()))
    assert listed == {path.stem for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}


def test_the_notebook_runs(tmp_path: Path) -> None:
    """All cells, in a kernel of their own, without an error."""
    if find_spec("nbclient") is None or find_spec("ipykernel") is None:
        pytest.skip("nbclient is not installed: pip install 'embedding-placer[examples]'")
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(EXAMPLES / "walkthrough.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    texts = [
        output.get("text", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    assert any("dram" in text for text in texts)
