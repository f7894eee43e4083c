"""Calls of modules: their outputs under a compiler, and which of them are open."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from placer.adapters.pytorch.calls import Call, Later, OpenCalls, Output, as_they_are, of_rows


class _Counted(Call):
    """Counts how often it is asked whether it has ended."""

    asked = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "ended":
            _Counted.asked += 1
        return super().__getattribute__(name)


def _call(kind: type[Call], table: object = None) -> Call:
    output = Output((3, 2), torch.float32, as_they_are)
    return kind(cast(Any, table), 0, of_rows(torch.arange(3)), False, output)


@pytest.mark.slow
def test_a_compiler_does_not_trace_the_exchange_of_an_output() -> None:
    traced: list[bool] = []

    def flush() -> None:
        traced.append(torch.compiler.is_compiling())
        call.rows = torch.ones(3, 2)

    shared = SimpleNamespace(flush=flush)
    call = _call(Call, SimpleNamespace(shared=shared, device=torch.device("cpu")))

    def both(rows: Tensor) -> Tensor:
        return torch.cat([rows, rows]).sum()

    assert torch.compile(both, backend="eager")(Later.of(call)) == 12
    assert traced == [False]


@pytest.mark.parametrize("waiting", [False, True])
def test_finding_the_first_open_call_does_not_take_longer_with_more_calls(waiting: bool) -> None:
    collected: list[Call] = []
    open_calls, kept = OpenCalls(collected), []
    for number in range(1, 201):
        kept.append(_call(_Counted))
        open_calls.add(kept[-1])
        if waiting:
            kept[-1].ended = True
            collected.append(kept[-1])
        _Counted.asked = 0
        assert open_calls.steps() == number
        assert _Counted.asked < 5
    for call in kept[:50]:
        call.ended = True
    if waiting:
        del collected[:50]
    assert open_calls.steps() == 150
    kept.clear()
    collected.clear()
    del call
    assert open_calls.steps() == 0
