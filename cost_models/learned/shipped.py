"""Learned cost models that come with placer: one for each machine and backend measured."""

import re
from pathlib import Path

from cost_models.learned.file import LearnedFile
from placer.errors import PlacerError

FOLDER = Path(__file__).parent / "weights"

_SUFFIX = ".safetensors"


def shipped() -> dict[str, Path]:
    """Files by name: of the processor and its cores, then the backend."""
    return {path.name.removesuffix(_SUFFIX): path for path in sorted(FOLDER.glob(f"*{_SUFFIX}"))}


def shipped_name(file: LearnedFile) -> str:
    """The name under which a model would come with placer."""
    return _name(file.facts["machine"], file.facts["setting"]["backend"])


def of_this_machine() -> Path:
    """The file that was measured on this processor, with the backend that ``auto`` takes.

    Raises
    ------
    PlacerError
        If there is none; the message lists those that there are.
    """
    import torch

    from placer.measurement.dataset import machine
    from placer.measurement.times import Setting, resolved

    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = _name(machine(), resolved(Setting(device=device)).backend)
    models = shipped()
    if name not in models:
        known = ", ".join(f"learned:{other}" for other in models) or "none"
        raise PlacerError(
            f"no learned cost model for this machine ({name}) comes with placer; those that do: "
            f"{known}. Make one by `placer calibrate --learn`, and name it as learned:FILE"
        )
    return models[name]


def _name(of: dict[str, object], backend: str) -> str:
    words = re.findall(r"[a-z0-9]+", str(of.get("cpu", "unknown")).lower())
    return f"{'-'.join(words)}-{of.get('cores')}-cores-{backend}"
