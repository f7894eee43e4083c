"""The machine and the versions that a benchmark ran on, as written beside its numbers."""

import os
import platform
import re
from importlib import metadata
from pathlib import Path

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
