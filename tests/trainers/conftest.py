"""Leaves out tests of trainers that are not installed: pip install 'embedding-placer[examples]'."""

from importlib.util import find_spec

import pytest
from resume_cases import GROWS

PACKAGES = {
    "accelerate": "accelerate",
    "huggingface": "transformers",
    "lightning": "lightning",
    "ray": "ray",
}
collect_ignore = [
    f"test_resume_{name}.py" for name, package in PACKAGES.items() if find_spec(package) is None
]


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)])
def grows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether tables grow, in this process and those that it starts."""
    if request.param:
        monkeypatch.setenv(GROWS, "1")
    return bool(request.param)
