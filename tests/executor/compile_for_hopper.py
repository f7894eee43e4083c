"""Compiles the Triton kernels as a step would launch them, for a GPU that need not be there.

Run without the interpreter: ``python compile_for_hopper.py`` prints a JSON list, one object for
each kernel and variant; with ``--all``, for more types and widths.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from placer.errors import BackendError
from placer.executor import Policy
from placer.executor.backends.torch_kernels import RowReads, SegmentTable
from placer.executor.backends.triton import key_kernels
from placer.executor.backends.triton.triton_backend import TritonBackend
from placer.executor.device_keys import BLOCK, WARPS
from placer.executor.lookups.steps import CHUNK
from placer.executor.memory.arena import Arena, TieredRows
from placer.executor.memory.layout import ArenaKey, ArenaSpec, SlotRange
from placer.executor.memory.row_cache import Moves, RowCache
from placer.executor.optimizers import Rule
from placer.tables import OPTIMIZER_STATE, OptimizerName

META = torch.device("meta")
NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.uint8: "u8",
    torch.bool: "i1",
}


class Compiler(TritonBackend):
    """Compiles what it should launch, and keeps a report."""

    def __init__(self) -> None:
        super().__init__(META)
        self.variant = ""
        self.reports: list[dict[str, Any]] = []
        self._seen: set[str] = set()

    def run(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        constants = {name: value for name, value in options.items() if name.isupper()}
        signature, attributes = {}, {}
        for index, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
            if value is None:
                constants[name] = None
            elif isinstance(value, Tensor):
                signature[name] = f"*{NAMES[value.dtype]}"
                attributes[(index,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
        signature |= dict.fromkeys(constants, "constexpr")
        assert signature.keys() == set(kernel.arg_names), kernel
        ordered = {name: signature[name] for name in kernel.arg_names}
        key = f"{kernel.__name__} {ordered} {constants}"
        if key in self._seen:
            return
        self._seen.add(key)
        binary = triton.compile(
            source_of(kernel, ordered, constants, attributes),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": options["num_warps"], "enable_fp_fusion": False},
        )
        report = {"kernel": kernel.__name__, "variant": self.variant, **usage(binary)}
        self.reports.append(report)


def source_of(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], attributes: Any
) -> ASTSource:
    """What to compile."""
    if triton.__version__.startswith("3.2."):  # Of no more than its types and constants.
        types = {name: kind for name, kind in signature.items() if kind != "constexpr"}
        return ASTSource(kernel, types, constants)
    return ASTSource(kernel, signature, constexprs=constants, attrs=attributes)


def usage(binary: Any) -> dict[str, Any]:
    """Registers of a thread, bytes it spills, and loads and stores by width in bits."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    assert found, text
    # 'LDG.E.128' is a load from global memory of 16 bytes, 'STL' a store to the stack.
    widest = {
        kind: max([int(width or 32) for width in re.findall(rf"{kind}\.E(?:\.(\d+))?", text)] + [0])
        for kind in ("LDG", "STG")
    }
    spills = len(re.findall(r"\b(?:STL|LDL)\b", text))
    return {"registers": int(found[1]), "spills": spills + int(found[3]), **widest}


def matrix(rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> TieredRows:
    """Rows half in one memory and half in the other."""
    half = torch.empty(rows // 2, *shape, dtype=dtype, device=META)
    return TieredRows(half, half, rows // 2)


def indices(number: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Nobody reads them."""
    return torch.empty(number, dtype=dtype, device=META)


def compile_all(kernels: Compiler) -> None:
    """Call everything, for several types and widths."""
    segments = SegmentTable(indices(16).view(2, 8), 100)
    for kinds in ((torch.int64, torch.int32, torch.int32), (torch.int32, torch.int64, torch.int64)):
        ids, slot_map, out = (indices(200, kind) for kind in kinds)
        kernels.translate(ids, segments, slot_map, out, indices(1))
    narrow, shape = indices(99, torch.int32), {"BLOCK": BLOCK, "num_warps": WARPS}
    rows, noted = indices(200), indices(91)
    for kind in (torch.int64, torch.int32):
        ids = indices(200, kind)
        keys = segments.table, ids, narrow, indices(99), rows, indices(4), noted, 30
        kernels.run(key_kernels.find, (1, 2), *keys, **shape)
        chosen = segments.table, ids, indices(99, torch.bool), rows, noted, 30
        kernels.run(key_kernels.readers, (1, 2), *chosen, **shape)
    read = segments.table, rows, narrow, narrow, indices(99, torch.uint8)
    kernels.run(key_kernels.note_reads, (1, 2), *read, **shape)
    for kind, policy in ((torch.int32, "lfu"), (torch.int64, "rank")):
        kernels.variant = f"{NAMES[kind]} {policy}"
        stage(kernels, kind, policy)
    lookups = 5 * CHUNK
    scales = torch.empty(lookups, device=META)
    for dtype, width, kind, optimizers in variants():
        kernels.variant = f"{NAMES[dtype]} width {width} {NAMES[kind]}"
        weights = matrix(200, width, dtype=dtype)
        places, gradients = indices(lookups, kind), torch.empty(40, width, device=META)
        kernels.pool(weights, places, indices(41), None, torch.empty(40, width, device=META))
        kernels.dot_rows(weights, places, places, gradients, scales)
        reads = RowReads(kernels.find_runs(indices(lookups)), places, places, None, gradients)
        kernels.squares(replace(reads, scales=scales), scales)
        for optimizer in optimizers:
            update(kernels, optimizer, weights, reads, scales)


def stage(kernels: Compiler, kind: torch.dtype, policy: Policy) -> None:
    """Two steps that are open at once, over an arena whose rows are half in HBM, half cached."""
    key = ArenaKey("fp32", 4, "sgd", False, stored=False)
    cached = (SlotRange(100, 200, 10, 20),)
    ranges = (SlotRange(0, 100, 0, 0, memory="hbm", lookup="device"), *cached)
    spec = ArenaSpec(key, 200, ranges, indices(1))
    row_cache = RowCache(cached, 100, META, policy)
    arena = Arena(spec, matrix(200, 4), None, row_cache)
    tickets = [kernels.window.open(), kernels.window.open()]
    for ticket in tickets:
        kernels.stage(0, arena, row_cache, [indices(300, kind)], ticket, training=True)


def variants() -> Iterator[tuple[torch.dtype, int, torch.dtype, Sequence[OptimizerName]]]:
    yield torch.float32, 128, torch.int32, ("rowwise_adagrad", "adam")
    yield torch.bfloat16, 64, torch.int64, ("sgd",)
    if "--all" in sys.argv:
        every = tuple(OPTIMIZER_STATE)
        yield torch.float16, 64, torch.int32, every
        yield from ((torch.float32, width, torch.int64, every) for width in (1, 16, 100, 128, 1024))


def update(
    kernels: Compiler,
    optimizer: OptimizerName,
    weights: TieredRows,
    reads: RowReads,
    mean_squares: Tensor,
) -> None:
    """The kernels of an optimizer, and the moves of its state."""
    width = weights.hbm.shape[1]
    shapes = {"sgd": None, "adagrad": (width,), "rowwise_adagrad": (), "adam": (2 * width,)}
    shape = shapes[optimizer]
    state = None if shape is None else matrix(200, *shape)
    rate, updates = torch.empty((), device=META), indices(1)[0]
    rule = Rule(optimizer, rate, 1e-8, updates, stochastic=True)
    kernels.update_rows(weights, state, reads, rule)
    if optimizer == "rowwise_adagrad":
        kernels.update_rows(weights, state, reads, rule, mean_squares)
    moves = Moves(indices(9, torch.int32), indices(9), indices(9), indices(1, torch.int32))
    matrices = [weights] if state is None else [weights, state]
    kernels.exchange(matrices, moves)


def main() -> None:
    try:
        TritonBackend(torch.device("cpu"))
    except BackendError as error:
        print(error, file=sys.stderr)
    kernels = Compiler()
    compile_all(kernels)
    print(json.dumps(kernels.reports))


if __name__ == "__main__":
    main()
