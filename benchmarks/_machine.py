"""Results of a benchmark: the machine and versions beside its numbers, files, and tables."""

import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from placer.files.atomic import write_text

RESULTS = Path(__file__).parent / "results"


def cpu_model() -> str:
    """Name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, object]:
    """Processor, cores, system and load."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": os.getloadavg(),
    }


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python and of packages, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def slug() -> str:
    """The machine in a file's name."""
    words = re.findall(r"[a-z0-9.]+", cpu_model().lower())
    return f"{'-'.join(words)}-{os.cpu_count()}-cores"


def write_results(name: str, packages: Sequence[str], found: Mapping[str, Any]) -> None:
    """Write results/NAME-MACHINE.json, with the machine and the versions of packages."""
    path = RESULTS / f"{name}-{slug()}.json"
    known = {"machine": machine(), "versions": versions(*packages)}
    write_text(path, json.dumps({**known, **found}, indent=1) + "\n")
    print(f"written to {path}")


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """A Markdown table; the first `texts` columns stand to the left, the others to the right."""
    rule = ["---" if place < texts else "---:" for place in range(len(headers))]
    lines = (headers, *rows)
    shown = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([shown[0], f"|{'|'.join(rule)}|", *shown[1:]])
