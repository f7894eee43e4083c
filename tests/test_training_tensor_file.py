"""Files of tensors: safetensors' format, some rows at a time."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from placer.storage.tensor_rows import READ_ROWS, TensorRows, write_safetensors


def test_no_more_than_a_chunk_of_a_table_is_in_memory(tmp_path: Path) -> None:
    asked: list[int] = []
    values = torch.arange(200_000 * 3, dtype=torch.float32).reshape(-1, 3)

    def read(start: int, stop: int) -> torch.Tensor:
        asked.append(stop - start)
        return values[start:stop]

    rows = TensorRows((200_000, 3), torch.bfloat16, read)
    write_safetensors(tmp_path / "file", {"big": rows})
    assert max(asked) == READ_ROWS < 200_000
    assert sum(asked) == 200_000
    assert torch.equal(load_file(tmp_path / "file")["big"], values.to(torch.bfloat16))


def test_files_are_those_of_safetensors(tmp_path: Path) -> None:
    given = {
        "b": torch.arange(6, dtype=torch.uint8).reshape(2, 3),
        "a": torch.randn(3, 2),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(7),
        "half": torch.randn(5).to(torch.float16),
    }
    write_safetensors(tmp_path / "ours", given)
    assert load_file(tmp_path / "ours").keys() == given.keys()
    assert all(torch.equal(load_file(tmp_path / "ours")[name], given[name]) for name in given)
