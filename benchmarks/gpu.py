"""One training step of DLRM-DCNv2's tables on a GPU: every lookup kind, beside others.

    python benchmarks/gpu.py [--scale 0.5] [--time-limit 420] [--output FILE]
    python benchmarks/gpu.py --published
    python benchmarks/gpu.py --growing
    python benchmarks/gpu.py --tiny [--published | --growing]
    python benchmarks/gpu.py --predict FILE [--topology 1xh100]

The 26 tables of MLPerf DLRM-DCNv2 (dim 128, fp32, row-wise Adagrad, 214 lookups a sample), with
--scale of the rows of the large ones (by default what fits the machine twice in HBM, since
`torch.optim.Adagrad` has that much state, and once in host memory). Batches of 65,536 and 8,192
samples; every lookup is drawn by itself, from Zipf's law with exponent 1.05 or from laws fitted
to the Criteo log; ids are ranks, so that plans are made by hand: the hottest 100, 25, 10, 1.5 or
0% of all rows in HBM, the others staged, cached, read in place (uva) or pooled by the host. The
rows of two steps in flight have room in HBM beside that budget; "HBM GiB" is what was in use.

A step is forward, backward and update, with the gradients of the pooled rows given. Each takes a
batch of its own; times are between CUDA events at the ends of steps, with no waiting in between;
means count. Before a kind is timed, it trains a small model and is compared with plain PyTorch.
Bytes per second are held against copies measured in the same run. What does not fit the time
limit is left out, and the table says so.

--published times NVIDIA's published setting, beside the figures of its report
--predict   says what plans count of HBM, and the roofline cost model of time, for the steps in FILE
--growing   times tables that grow beside fixed ones instead
--tiny      runs everything at tiny shapes in Triton's interpreter, on a machine without a GPU

Exit status: 0; 1 if a kind differs from plain PyTorch or breaks; 2 without a GPU.
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from _gpu_check import Equivalence
    from _gpu_run import Record, Sizes

_HBM_FOR_STEPS = 40e9
"""Bytes left for what `nn.EmbeddingBag`'s sparse gradients take, batches and outputs."""

_HOST_SHARE = 0.75

PACKAGES = ("torch", "triton", "numpy", "numba", "fbgemm-gpu")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="embedding step on a GPU, placer and others")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--predict", type=Path, metavar="FILE", help="predict what FILE measured")
    mode.add_argument("--published", action="store_true", help="NVIDIA's setting of ten tables")
    mode.add_argument("--growing", action="store_true", help="tables that grow, and fixed ones")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, interpreted on the CPU")
    parser.add_argument("--topology", default="1xh100", help="machine of --predict")
    parser.add_argument("--scale", type=float, help="share of the rows of the large tables")
    parser.add_argument("--batch-sizes", default="65536,8192")
    parser.add_argument("--time-limit", type=float, default=420.0, metavar="SECONDS")
    parser.add_argument("--output", type=Path, help="JSON file; - for none")
    return parser.parse_args(arguments)


def main() -> int:
    """Measure, print, save."""
    started = time.perf_counter()
    options = parse()
    if options.tiny:  # Triton looks at it when it is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("placer") is None:  # A bare machine with a copy of the project.
        sys.path.insert(0, str(Path(__file__).parents[1]))
    if options.predict is not None:
        from _gpu_predictions import print_predictions

        print_predictions(json.loads(options.predict.read_text()), options.topology)
        return 0
    import torch

    if not options.tiny and not torch.cuda.is_available():
        print("torch finds no GPU here; --tiny runs without one", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    device = torch.device("cpu" if options.tiny else "cuda:0")
    # Said, so that nobody warns of it.
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    if options.tiny:
        torch.set_num_threads(1)
        print("Triton's interpreter on tiny shapes: times and rates mean nothing here")
    if options.published:
        return run_published(options, device)
    if options.growing:
        from _gpu_published import print_growing

        print_growing(device, options.tiny)
        return 0
    sizes = _sizes(options, device)
    return run(options, sizes, device, started)


def run_published(options: argparse.Namespace, device: "torch.device") -> int:
    """NVIDIA's setting, its table and file."""
    from _gpu_published import lines, measure
    from _machine import versions

    from placer.files.atomic import write_text

    found = measure(device, _HOST_SHARE * _host_bytes(), options.tiny)
    print("\n".join(lines(found)))
    output = _output(options, device, "gpu-published")
    if output is not None:
        report = {
            "benchmark": "ten tables of 128 columns, one id of each a sample, as NVIDIA publishes",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": _machine(device),
            "versions": versions(*PACKAGES),
            "steps": [asdict(step) for step in found],
        }
        write_text(output, json.dumps(report, indent=1) + "\n")
    return int(any(step.note for step in found))


def run(options: argparse.Namespace, sizes: "Sizes", device: "torch.device", started: float) -> int:
    """The table, its targets, and the file."""
    from _gpu_contenders import HostMemory
    from _gpu_measure import measure_copies
    from _gpu_report import HEADER, line, target_lines, targets
    from _gpu_run import Bench
    from _machine import versions

    from placer.files.atomic import write_text

    model = sizes.model("zipf-1.05")
    print(
        f"{len(model.tables)} tables, {model.rows:,} rows × {model.width} "
        f"({model.rows * model.row_bytes / 1e9:.1f} GB with state), scale {sizes.scale:.3g}, "
        f"{sum(model.lookups)} lookups a sample",
        flush=True,
    )
    copies = measure_copies(device, 1 << 20 if options.tiny else 1 << 30)
    for name, value in asdict(copies).items():
        print(f"{name.removesuffix('_bytes_per_s'):<12}{value / 1e9:>9.1f} GB/s")
    floats = model.rows * (model.width + 1) + 512 * (len(model.tables) + 2)
    memory = HostMemory(floats, device)
    print(f"host memory ready after {time.perf_counter() - started:.0f} s", flush=True)
    report: dict[str, object] = {
        "benchmark": "embedding step on a GPU: forward, backward, update",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(device),
        "versions": versions(*PACKAGES),
        "options": {
            "scale": sizes.scale,
            "batch_sizes": sizes.batch_sizes,
            "time_limit_s": options.time_limit,
            "tiny": options.tiny,
        },
        "tables": len(model.tables),
        "rows": model.rows,
        "lookups_per_sample": sum(model.lookups),
        "roofline_bytes_per_sample": model.roofline_bytes,
        "copies": asdict(copies),
    }
    output = _output(options, device)

    def save(bench: Bench) -> None:
        if output is not None:
            found = targets(bench.records, sizes.batch_sizes[0])
            kinds = {name: asdict(outcome) for name, outcome in bench.equivalence.items()}
            rest = {
                "seconds": time.perf_counter() - started,
                "equivalence": kinds,
                "targets": [asdict(target) for target in found],
                "records": [asdict(record) for record in bench.records],
            }
            write_text(output, json.dumps({**report, **rest}, indent=1) + "\n")

    def seen(record: "Record") -> None:
        if len(bench.records) == 1:
            _print_equivalence(bench.equivalence)
            print(f"\n{HEADER}")
        print(line(record), flush=True)
        save(bench)  # Whatever ends the run, the file has what was measured before.

    bench = Bench(device, sizes, copies, memory, started + options.time_limit, seen)
    bench.run()
    print()
    print("\n".join(target_lines(targets(bench.records, sizes.batch_sizes[0]))))
    print(f"\n{time.perf_counter() - started:.0f} s; raw numbers: {output or 'not written'}")
    return int(any(record.failed for record in bench.records))


def _print_equivalence(equivalence: "Mapping[str, Equivalence]") -> None:
    print("\ntrained like plain PyTorch (largest difference), with the bits of all rows in HBM:")
    for name, outcome in equivalence.items():
        verdict = "yes" if outcome.equal else "NO"
        if outcome.largest_difference is not None:
            verdict += (
                f" ({outcome.largest_difference:.1e}), {'yes' if outcome.same_bits else 'no'}"
            )
        print(f"  {name:<22}{verdict} {outcome.error}")


def _sizes(options: argparse.Namespace, device: "torch.device") -> "Sizes":
    from _gpu_model import dcnv2
    from _gpu_run import Sizes

    if options.tiny:
        return Sizes(1e-5, (6, 3), limit_s=0.0, job_s=0.0, tiny=True)
    import torch

    scale = options.scale
    if scale is None:
        full = dcnv2("zipf-1.05", 1.0)
        hbm = torch.cuda.get_device_properties(device).total_memory
        weights = full.rows * full.width * 4
        scale = min(
            1.0,
            (hbm - _HBM_FOR_STEPS) / (2 * weights),
            _HOST_SHARE * _host_bytes() / (full.rows * full.row_bytes),
        )
        scale = int(scale * 20) / 20 or scale
    batch_sizes = tuple(int(size) for size in options.batch_sizes.split(","))
    return Sizes(scale, batch_sizes)


def _host_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _machine(device: "torch.device") -> dict[str, object]:
    import torch
    from _machine import machine

    found = machine()
    found["host_memory_bytes"] = _host_bytes()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["gpu_memory_bytes"] = properties.total_memory
        found["gpu_multiprocessors"] = properties.multi_processor_count
        found["cuda"] = torch.version.cuda
        if shutil.which("nvidia-smi"):
            asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            answer = subprocess.run(asked, capture_output=True, text=True, check=False)
            found["driver"] = answer.stdout.strip()
    return found


def _output(options: argparse.Namespace, device: "torch.device", kind: str = "gpu") -> Path | None:
    if options.output is not None:
        return None if str(options.output) == "-" else Path(options.output)
    if options.tiny:
        return None
    import torch
    from _machine import RESULTS

    name = "-".join(torch.cuda.get_device_name(device).lower().split())
    return RESULTS / f"{kind}-{name}.json"


if __name__ == "__main__":
    sys.exit(main())
