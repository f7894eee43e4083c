"""`placer show --memory`: what each GPU has at once in each phase of a step."""

from collections.abc import Mapping

from placer.plan.peak_memory import DevicePeak, PhaseMemory, largest_batch, peak_memory
from placer.plan.plan import Plan
from placer.profile.profile import Profile
from placer.report.section import Column, Report, Row, Section, columns, table_of
from placer.topology.kinds import GPU_KINDS
from placer.units import counted, format_bytes
from solvers.report.plan import MOST_DEVICES


def memory_report(plan: Plan, profile: Profile) -> Report:
    """Report the phases of a step on the fullest GPU, each GPU's peak, and the batch that fits.

    A GPU's memory is its card's where the chip is known, else what the plan and its dense part may
    take.
    """
    cards = _cards(plan)
    peaks = peak_memory(plan, profile, capacity_bytes=cards)
    worst = min(peaks, key=lambda peak: peak.free_bytes)
    batch = largest_batch(plan, profile, capacity_bytes=cards)
    return Report(
        f"Memory of a training step: {counted(len(plan.tables), 'table')} on {plan.topology.name}",
        (_phase_section(worst), _device_section(peaks)),
        facts={
            "fits": worst.free_bytes >= 0,
            "fullest_device": worst.device,
            "fullest_phase": worst.fullest.name,
            "peak_bytes": worst.peak_bytes,
            "capacity_bytes": worst.capacity_bytes,
            "free_bytes": worst.free_bytes,
            "batch_size": plan.batch_size,
            "largest_batch_size": batch,
        },
        headline=(
            verdict(worst),
            f"largest batch that fits this plan: {counted(batch, 'sample')} a GPU; it was made for "
            f"{plan.batch_size:,}",
        ),
    )


def verdict(peak: DevicePeak) -> str:
    """Return whether a step fits, and by how much.

    Examples
    --------
    >>> from placer.plan.peak_memory import DevicePeak, PhaseMemory
    >>> verdict(DevicePeak("gpu:0", 5 << 30, (PhaseMemory("update", {"weights": 2 << 30}),)))
    'fits, with 3 GiB to spare in phase update of gpu:0'
    """
    where = f"in phase {peak.fullest.name} of {peak.device}"
    if peak.free_bytes >= 0:
        return f"fits, with {format_bytes(peak.free_bytes)} to spare {where}"
    return (
        f"does not fit: {format_bytes(-peak.free_bytes)} ({-peak.free_bytes} bytes) are short "
        f"{where}; make the batch smaller, or plan with less --hbm"
    )


def _cards(plan: Plan) -> Mapping[str, int]:
    """Return the memory of the cards whose chip is known and that can hold what was planned for."""
    known = [(gpu, GPU_KINDS[gpu.chip]) for gpu in plan.topology.gpus if gpu.chip in GPU_KINDS]
    return {
        gpu.id: kind.memory_bytes for gpu, kind in known if kind.memory_bytes >= gpu.memory_bytes
    }


def _phase_section(peak: DevicePeak) -> Section:
    largest: dict[str, int] = {}
    for phase in peak.phases:
        for purpose, size in phase.parts.items():
            largest[purpose] = max(size, largest.get(purpose, 0))
    rows: list[Row] = [
        {"purpose": purpose, **{_key(phase): phase.parts.get(purpose, 0) for phase in peak.phases}}
        for purpose in sorted(largest, key=lambda purpose: (-largest[purpose], purpose))
    ]
    rows.append({"purpose": "total", **{_key(phase): phase.total_bytes for phase in peak.phases}})
    shown = columns(purpose="purpose", **{_key(phase): phase.name for phase in peak.phases})
    return table_of(rows, "phases", f"{peak.device} in each phase of a step", *shown)


def _key(phase: PhaseMemory) -> str:
    return phase.name.replace(" ", "_") + "_bytes"


def _device_section(peaks: tuple[DevicePeak, ...]) -> Section:
    return table_of(
        sorted(peaks, key=lambda peak: peak.free_bytes),
        "devices",
        "Peak of each GPU",
        Column("device", "device"),
        Column("phase", "phase", of=lambda peak: peak.fullest.name),
        *columns(peak_bytes="peak", capacity_bytes="of", free_bytes="to spare"),
        shown=MOST_DEVICES,
        order="fullest first",
    )
