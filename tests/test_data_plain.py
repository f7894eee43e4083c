"""Blocks of plain delimited text give the samples that Arrow gives, bit by bit."""

from pathlib import Path

import pytest
from fast_and_full import examples
from hypothesis import given
from hypothesis import strategies as st

from placer.data.formats.delimited import DelimitedSource
from placer.data.formats.plain import PlainText
from placer.data.layout import IdType, Layout, NamedColumns
from placer.errors import DataError

WHOLE = st.sampled_from(["0", "7", "-3", "12345678", "-1234567", "", "00", "-0"])
NUMBER = st.decimals(-99999, 99999, places=2).map(str) | st.from_regex(
    r"\A-?[0-9]{0,4}\.?[0-9]{0,4}\Z"
)
ODD = st.sampled_from(
    ["123456789", "x", "NA", "1.0", "+5", "-", " 5", "1e3", "-.", ".", "1.2.3", "5.", "-.5", "--1"]
)
HEX = st.integers(0, 2**32 - 1).map("{:08x}".format)
TEXT = st.sampled_from(["site-1", "site-12", "", "ä", "NULL", "ABCDEF01", "abcdefgh", "x" * 40])
STRANGE = st.sampled_from([r"\N", r"a\N", '"q"', 'x"y', "a\rb"])
FIELDS = {"i": WHOLE, "d": WHOLE | NUMBER, "h": HEX, "t": TEXT | HEX}


def usually(field: st.SearchStrategy[str], odd: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.integers(0, 60).flatmap(lambda one: odd if one == 60 else field)


@st.composite
def logs(draw: st.DrawFn) -> tuple[list[str], str, str]:
    """Names of columns, whose first letter says what they hold; the separator; the file."""
    kinds = [*draw(st.lists(st.sampled_from("idht"), min_size=1, max_size=4)), "t"]
    separator = draw(st.sampled_from(",\t|"))
    lines = []
    for _ in range(draw(st.integers(1, 12))):
        label = draw(st.sampled_from("01"))
        odd = {"i": ODD, "d": ODD, "h": STRANGE, "t": STRANGE}
        lines.append(
            separator.join([label, *(draw(usually(FIELDS[one], odd[one])) for one in kinds)])
        )
    end = draw(st.sampled_from(["\n", "\n", "\n", "\r\n"]))
    names = ["label", *(f"{kind}{number}" for number, kind in enumerate(kinds))]
    return names, separator, end.join(lines) + draw(st.sampled_from(["", end]))


def samples(file: Path, names: list[str], separator: str, missing: str) -> object:
    """All that is read, or the message."""
    types: dict[str, IdType] = {}
    types |= {one: "integer" for one in names if one[0] == "i"}
    types |= {one: "text" for one in names if one[0] in "ht"}
    try:
        source = DelimitedSource(
            [str(file)],
            layout=Layout(separator=separator, names=tuple(names), types=types, lists={}),
            named=NamedColumns(
                sparse=list(types),
                dense=[one for one in names if one[0] == "d"],
                label="label",
                missing=missing,  # type: ignore[arg-type]
            ),
        )
        cursor, found = source.open(), []
        while (batch := cursor.read(7)) is not None:
            bags = [
                (name, one.keys.tolist(), None if one.offsets is None else one.offsets.tolist())
                for name, one in batch.features.items()
            ]
            assert batch.labels is not None
            found.append((batch.place.of(0), bags, batch.dense.tobytes(), batch.labels.tobytes()))
        return found
    except DataError as error:
        return str(error)


@examples(60)
@given(logs(), st.sampled_from(["zero", "empty"]))
def test_samples_are_those_of_arrow(
    tmp_path_factory: pytest.TempPathFactory, log: tuple[list[str], str, str], missing: str
) -> None:
    names, separator, text = log
    file = tmp_path_factory.mktemp("plain") / "log.csv"
    file.write_text(text, newline="")
    found = samples(file, names, separator, missing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainText, "batch", lambda *_: None)
        assert samples(file, names, separator, missing) == found


def test_plain_blocks_are_not_left_to_arrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "log.csv"
    file.write_text("label,i0,d1,t2\n1,-5,2.5,abc\n0,,70,\n")
    source = DelimitedSource([str(file)], layout=Layout(header=True))
    monkeypatch.setattr("placer.data.formats.delimited._table", None)
    batch = source.open().read(7)
    assert batch is not None
    assert batch.features["i0"].keys.view("i8").tolist() == [-5, 0]
    assert batch.dense.tolist() == [[2.5], [70.0]]
