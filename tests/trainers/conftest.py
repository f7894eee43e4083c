"""Leaves out tests of trainers that are not installed: pip install 'embedding-placer[examples]'."""

from importlib.util import find_spec

PACKAGES = {
    "accelerate": "accelerate",
    "huggingface": "transformers",
    "lightning": "lightning",
    "ray": "ray",
}
collect_ignore = [
    f"test_resume_{name}.py" for name, package in PACKAGES.items() if find_spec(package) is None
]
