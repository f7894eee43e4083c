"""Checkpoints that somebody made to harm who reads them, or that lack what they should have."""

import contextlib
import io
import itertools
import pickle
import pickletools
import resource
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from placer.errors import CheckpointError
from placer.executor import PlacedEmbeddings
from placer.files.torch_files import (
    OtherContentError,
    TensorFileError,
    read_pickle,
    read_tensors,
)
from placer.storage.checkpoint import load_model, save_model
from placer.storage.checkpoint.dcp_reader import read_metadata

sys.path.append(str(Path(__file__).resolve().parent / "executor"))
from checkpoint_ranks_cases import small_blocks
from executor_cases import plan_of, two_features


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("hostile") / "saved"
    with small_blocks():
        save_model(folder, PlacedEmbeddings(plan_of([two_features()])))
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def saved(tmp_path: Path, original: dict[str, bytes]) -> Path:
    for name, content in original.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def loads(folder: Path) -> None:
    load_model(folder, PlacedEmbeddings(plan_of([two_features()])))


def refused(folder: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        loads(folder)


def changed(folder: Path, change: Callable[[Metadata], Any]) -> None:
    """Let something happen to the metadata, as torch reads it."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def test_members_of_an_enum_may_be_pickled_by_name(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Python 3.11.0 to 3.11.3. Checkpoints that were saved there could not be read."""
    by_name = lambda one, _: (getattr, (type(one), one.name))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    changed(saved, lambda _: None)
    assert b"getattr" in (saved / ".metadata").read_bytes()
    loads(saved)


def test_metadata_sets_no_attribute_of_a_class(saved: Path) -> None:
    # Rebinds `Path` in the module that would write the checkpoint, if it were run.
    program = pickle.dumps(None)[:-2]  # Its beginning.
    program += b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    program += b"N}\x8c\x07__doc__\x8c\x05takens\x86b."
    (saved / ".metadata").write_bytes(program)
    document = Metadata.__doc__
    refused(saved, r"adds to a Global.*nothing of it was run")
    assert Metadata.__doc__ == document


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x04\x8d" + b"\xff\xff\xff\xff\x02\0\0\0",  # A text of 12.9 GB.
        b"\x80\x04X\xff\xff\xff\xff",
        b"\x80\x04B\xff\xff\xff\xff",
        b"\x80\x04\x96\xff\xff\xff\xff\x02\0\0\0",  # BYTEARRAY8
        b"\x80\x04\x8b\xff\xff\xff\x7f",  # LONG4
        b"\x80\x04Nr\xff\xff\xff\xff.",  # A memo of 4 G entries.
        b"\x80\x04" + b"(" * 200_000,
        b"\x80\x04" + b"]q\0" + b"h\0" * 200_000,
        b"\x80\x04" + b"}q\0" + b"\x85" * 20_000 + b".",  # 20,000 deep.
    ],
    ids=range(9),
)
def test_a_short_program_takes_little_memory(saved: Path, program: bytes) -> None:
    (saved / ".metadata").write_bytes(program)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(saved, r"no metadata of torch.distributed.checkpoint")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # In KiB.


def test_a_part_in_place_of_another_is_noticed(saved: Path) -> None:
    def change(metadata: Metadata) -> None:
        chunks = metadata.state_dict_metadata["model.t.weight"].chunks
        chunks[3] = chunks[2]

    changed(saved, change)
    refused(saved, r"the same bytes of __0_0.distcp are a part of")


def test_tensors_have_at_most_so_many_parts(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(metadata: Metadata) -> None:
        chunks = metadata.state_dict_metadata["model.t.weight"].chunks
        chunks += chunks * len(metadata.storage_data)
        most = "placer.storage.checkpoint.dcp_reader.MOST_BLOCKS"
        monkeypatch.setattr(most, len(metadata.storage_data))

    changed(saved, change)
    refused(saved, "weight' is in too many parts")


def test_a_tensor_whose_name_is_no_text_is_refused(saved: Path) -> None:
    def change(metadata: Metadata) -> None:
        tensors = metadata.state_dict_metadata
        tensors[5] = tensors.pop("model.t.weight")  # type: ignore[index]

    changed(saved, change)
    refused(saved, r"names a tensor twice, or not by a text: 5")


def test_cells_are_counted_not_numbers(saved: Path) -> None:
    def change(metadata: Metadata) -> None:
        """A part lies over the one before; both have bytes of their own."""
        name = "model.t.weight"
        chunk = metadata.state_dict_metadata[name].chunks[3]
        places = metadata.storage_data
        index = next(i for i in places if i.fqn == name and i.offset == chunk.offsets)
        place = places.pop(index)
        chunk.offsets = torch.Size((chunk.offsets[0] - 1, 0))
        places[type(index)(name, chunk.offsets)] = place

    changed(saved, change)
    refused(saved, r"a part of rows .* of model.t.weight twice")


@pytest.mark.parametrize(
    ("name", "value"),
    [("offset", -1), ("offset", 1 << 70), ("length", -3), ("length", 1.5), ("length", None)],
)
def test_a_place_is_two_numbers(saved: Path, name: str, value: object) -> None:
    changed(saved, lambda m: setattr(next(iter(m.storage_data.values())), name, value))
    refused(saved, r"has a part of .* bytes from byte")


@pytest.mark.parametrize("number", [-1, 1 << 63, 1 << 500])
def test_a_shape_is_of_numbers_that_are_not_negative(saved: Path, number: int) -> None:
    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.t.weight"].size = torch.Size([1234567])

    changed(saved, change)
    path = saved / ".metadata"
    as_long = b"\x8a" + bytes([80]) + number.to_bytes(80, "little", signed=True)
    path.write_bytes(path.read_bytes().replace(b"J" + (1234567).to_bytes(4, "little"), as_long))
    refused(saved, r"a shape that is none")


@pytest.mark.parametrize("seed", range(4))
def test_no_change_of_a_byte_ends_in_anything_but_a_clear_error(saved: Path, seed: int) -> None:
    content = (saved / ".metadata").read_bytes()
    for place in range(seed, len(content), 29):
        altered = bytearray(content)
        altered[place] ^= 1 << (place % 8)
        (saved / ".metadata").write_bytes(altered)
        with contextlib.suppress(CheckpointError):  # It may be sound all the same.
            read_metadata(saved)


def test_all_opcodes_that_python_writes_are_read() -> None:
    value = ("text", 3, -70000, 1 << 40, 2.5, None, True, [1, 2, 3], {"a": ()}, b"raw", "x" * 300)
    for protocol in (2, 3, 4, 5):
        content = pickle.dumps(value, protocol)
        if protocol == 2:
            content = pickle.dumps((*value[:9], *value[10:]), protocol)
        read = read_pickle(pickletools.optimize(content), admits=lambda name: False)
        assert read[:8] == value[:8]
        assert read[8].items == [("a", ())]
    with pytest.raises(TensorFileError, match=r"opcode 0x69"):
        read_pickle(b"\x80\x02(imodule\nname\n.", admits=lambda name: True)


# Tensors of torch.save -------------------------------------------------------------------------


def written(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_are_read_as_torch_reads_them(dtype: torch.dtype) -> None:
    base = torch.arange(24).reshape(4, 6).to(dtype)
    tensors = [base, base.t(), base[1:3, ::2], base[:0], base[0, 0]]
    if dtype.is_floating_point:
        tensors.append(torch.nn.Parameter(base))
    for tensor in tensors:
        content = written((tensor, [base]))
        read = read_tensors(io.BytesIO(content))
        assert torch.equal(read[0], torch.load(io.BytesIO(content))[0])
        assert read[0].dtype == dtype
        assert torch.equal(read[1][0], base)


def test_a_tensor_has_no_more_elements_than_its_storage() -> None:
    huge = torch.zeros(1).expand(1 << 40)
    with pytest.raises(TensorFileError, match=r"elements, its storage 1"):
        read_tensors(io.BytesIO(written(huge)))


@pytest.mark.parametrize(
    "value",
    [
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        torch.empty(3, device="meta"),
        torch.zeros(3).to_sparse(),
        {"a": 1},
        "text",
        bytearray(4),
    ],
    ids=["nested", "meta", "sparse", "dict", "text", "bytearray"],
)
def test_other_content_is_refused(value: object) -> None:
    with pytest.raises(OtherContentError):
        read_tensors(io.BytesIO(written(value)))


@pytest.mark.parametrize(("method", "order", "says"), [
    (zipfile.ZIP_DEFLATED, b"little", "larger than the file"),
    (zipfile.ZIP_STORED, b"big", "big-endian"),
])  # fmt: skip
def test_other_archives_are_refused(method: int, order: bytes, says: str) -> None:
    content, packed = written(torch.zeros(100_000)), io.BytesIO()
    plain = zipfile.ZipFile(io.BytesIO(content))
    with zipfile.ZipFile(packed, "w", method) as other:
        for name in plain.namelist():
            other.writestr(name, order if name.endswith("byteorder") else plain.read(name))
    with pytest.raises(TensorFileError, match=says):
        read_tensors(packed)


def test_no_change_of_a_tensor_file_ends_in_anything_but_a_clear_error() -> None:
    content = written((torch.arange(3), torch.zeros(2, 2)))
    for place, bit in itertools.product(range(0, len(content), 3), (0, 7)):
        altered = bytearray(content)
        altered[place] ^= 1 << bit
        with contextlib.suppress(TensorFileError):
            read_tensors(io.BytesIO(altered))
