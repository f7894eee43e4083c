"""`gpu.py --tune`: launch sizes of the Triton kernels; `--profile`: where a step's time goes."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from _gpu_check import KINDS
from _gpu_contenders import HostMemory, PlacedSteps, placed
from _gpu_measure import WARM_UP_STEPS, host_waits, time_steps, why
from _gpu_model import draw, gradients, make_plan
from _gpu_run import Sizes

from placer.executor import PlacedEmbeddings
from placer.executor.backends.triton.launch import Launch
from placer.executor.backends.triton.triton_backend import TritonBackend
from placer.plan.shard import Lookup

_SHARE = 0.1
_CALL_S = 0.2
_TUNE_LIMIT_S = 180.0
_PROFILED_STEPS = 2
_ROWS = 25

_TUNED: tuple[tuple[Lookup, float, tuple[str, ...]], ...] = (
    ("device", 1.0, ("pool", "update_rows")),
    ("staged", _SHARE, ("exchange", "translate", "pool", "update_rows")),
)

SIZES: Mapping[str, tuple[str, ...]] = {
    "pool": ("pool_bytes", "pool_columns", "rows"),
    "update_rows": (
        "update_unroll",
        "update_elements",
        "resident_warps",
        "sum_elements",
        "sum_warps",
        "scan",
    ),
    "exchange": ("exchange_programs", "exchange_bytes", "block"),
    "translate": ("block",),
}
"""Fields of `Launch` that each kernel looks at, those that should matter most first."""

FACTORS = (0.25, 0.5, 2, 4)


def _recording(backend: TritonBackend) -> dict[str, tuple[Any, ...]]:
    """Arguments that the backend's kernels were last called with, from here on."""
    calls: dict[str, tuple[Any, ...]] = {}

    def watched(name: str) -> Callable[..., None]:
        kernel = getattr(backend, name)

        def call(*arguments: Any) -> None:
            calls[name] = arguments
            kernel(*arguments)

        return call

    for name in SIZES:
        setattr(backend, name, watched(name))
    return calls


def tune(device: torch.device, sizes: Sizes, deadline_s: float) -> None:
    """Replay the kernels of real steps with other sizes; print each time and the best sizes.

    Pool and update are taken from a step with all rows in HBM, and once more from one that
    stages most rows, as are the exchange and the translation.
    """
    deadline_s = min(deadline_s, time.perf_counter() + _TUNE_LIMIT_S)
    for lookup, share, kernels in _TUNED:
        calls = _record(lookup, share, device, sizes)
        for kernel in kernels:
            if kernel in calls:
                print(f"\n{kernel}, {lookup}, {share:.0%} of the rows in HBM")
                best, seconds = _descend(kernel, calls[kernel], device, deadline_s)
                sizes_text = ", ".join(f"{n}={getattr(best, n)}" for n in SIZES[kernel])
                print(f"  best: {sizes_text}: {seconds * 1e3:.3f} ms", flush=True)


def _record(
    lookup: Lookup, share: float, device: torch.device, sizes: Sizes
) -> dict[str, tuple[Any, ...]]:
    """The arguments of the kernels in a step of the large batch."""
    model = sizes.model("zipf-1.05")
    batch_size = sizes.batch_sizes[0]
    memory = HostMemory(_cold_floats(lookup, share, sizes), device)
    embeddings = placed(make_plan(model, lookup, share, batch_size), memory, device)
    drawn = draw(model, batch_size, WARM_UP_STEPS, device, seed=1)
    calls = _recording(_backend(embeddings))
    steps = PlacedSteps(embeddings, drawn.batches, gradients(model, batch_size, device))
    for _ in range(WARM_UP_STEPS):
        steps()
    return calls


def _descend(
    kernel: str, arguments: tuple[Any, ...], device: torch.device, deadline_s: float
) -> tuple[Launch, float]:
    """The fastest sizes found by changing one at a time, from the defaults, keeping the best.

    Not all pairs of sizes: each change of a constant compiles the kernel anew.
    """
    best = Launch()
    best_s = _seconds(kernel, best, arguments, device)
    print(f"  as it is: {best_s * 1e3:.3f} ms", flush=True)
    for name in SIZES[kernel]:
        found = []
        for factor in FACTORS:
            value = int(getattr(Launch(), name) * factor)
            if not value or time.perf_counter() > deadline_s:
                continue
            launch = replace(best, **{name: value})
            try:
                seconds = _seconds(kernel, launch, arguments, device)
            except Exception as error:  # Too large for the chip, say.
                print(f"  {name}={value}: {why(error)}", flush=True)
                continue
            print(f"  {name}={value}: {seconds * 1e3:.3f} ms", flush=True)
            found.append((seconds, value, launch))
        if found and min(found)[0] < best_s:
            best_s, _, best = min(found, key=lambda each: each[:2])
    return best, best_s


def _seconds(
    kernel: str, launch: Launch, arguments: tuple[Any, ...], device: torch.device
) -> float:
    call = getattr(TritonBackend(device, launch=launch), kernel)
    return time_steps(lambda: call(*arguments), device, _CALL_S).median_s


def profile(device: torch.device, sizes: Sizes, deadline_s: float) -> None:
    """Print a profiler's table of steps of each kind: kernels, copies, the executor's phases."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    model = sizes.model("zipf-1.05")
    batch_size = sizes.batch_sizes[0]
    drawn = draw(model, batch_size, WARM_UP_STEPS + 2 * _PROFILED_STEPS, device, seed=1)
    grads = gradients(model, batch_size, device)
    memory = HostMemory(_cold_floats("staged", _SHARE, sizes), device)
    for kind in KINDS:
        if time.perf_counter() > deadline_s:
            print(f"{kind.name}: left out, no time")
            continue
        share = 1.0 if kind.lookup == "device" else _SHARE
        embeddings = placed(make_plan(model, kind.lookup, share, batch_size), memory, device)
        steps = PlacedSteps(embeddings, drawn.batches, grads, kind.ahead)
        timing = time_steps(steps, device, 0.5)
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(_PROFILED_STEPS):
                steps()
            if device.type == "cuda":
                torch.cuda.synchronize()
        order = "device_time_total" if device.type == "cuda" else "cpu_time_total"
        print(
            f"\n{kind.name}, {share:.0%} of the rows in HBM: {timing.median_s * 1e3:.3f} ms a step "
            f"without the profiler; {_PROFILED_STEPS} steps; "
            f"host waits: {host_waits(steps, device)}"
        )
        averages = profiler.key_averages()
        print(averages.table(sort_by=order, row_limit=_ROWS, max_name_column_width=60), flush=True)
        del steps, embeddings


def _cold_floats(lookup: Lookup, share: float, sizes: Sizes) -> int:
    """Room for all rows, but for those that stay in HBM whatever the kind."""
    if lookup == "device":
        return 512
    model = sizes.model("zipf-1.05")
    return model.rows * (model.width + 1) + 512 * (len(model.tables) + 2)


def _backend(embeddings: PlacedEmbeddings) -> TritonBackend:
    backend = embeddings._runtime.backend
    assert isinstance(backend, TritonBackend), "what backend='triton' gives"
    return backend
