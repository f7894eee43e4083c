"""What ``--topology`` takes: a preset, a file, or ``auto``."""

from pathlib import Path

from placer.errors import TopologyError
from placer.topology.file import SUFFIXES, load, save
from placer.topology.presets import preset, preset_help
from placer.topology.topology import Topology

__all__ = ["load", "parse", "save"]


def parse(text: str, *, hbm: str | int | None = None, dram: str | int | None = None) -> Topology:
    """A preset (``8xh100``, ``2x8xa100-80``, ``big-basin``), a YAML/TOML file, or ``auto``.

    `hbm` and `dram` override the budget of each GPU and of each host; without them presets
    keep a part of the memory for the rest of the model (see `presets`).

    Raises
    ------
    TopologyError
        If the text is none of these; the message lists the presets.
    """
    if text.strip().lower() == "auto":
        from placer.topology.detect import detect

        return detect(hbm=hbm, dram=dram)
    if Path(text).suffix.lower() in SUFFIXES:
        return load(text).with_memory(hbm=hbm, dram=dram)
    topology = preset(text)
    if topology is None:
        raise TopologyError(
            f"unknown topology {text!r}; use {preset_help()}; auto for this machine; "
            f"or a file that ends in {', '.join(SUFFIXES)}"
        )
    return topology.with_memory(hbm=hbm, dram=dram)
