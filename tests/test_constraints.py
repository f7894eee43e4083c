"""Constraints: what files say, what problems make of them, and what plans break."""

import glob
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from cli_cases import fail, invoke, succeed
from docs_cases import REPOSITORY
from fast_and_full import examples
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import in_dram, in_hbm, machine, plan_of, plans
from problem_cases import problem_of, zipf_table

from placer import Constraints, Plan, Problem, Profile, Shard, Table, TableRule, Topology
from placer.constraints.constraints import matches
from placer.constraints.file import KINDS, Kind, dumps
from placer.constraints.unmet import kinds_of, unmet
from placer.errors import ProblemError
from placer.growing import Growing
from placer.profile.locality import WindowCounts

PAGE = (REPOSITORY / "docs" / "constraints.md").read_text(encoding="utf-8")
GIB = 1 << 30


def write(folder: Path, text: str, name: str = "rules.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def example(language: str) -> str:
    found = re.search(rf"```{language}.*?\n(.*?)```", PAGE, re.DOTALL)
    return found[1]


def rule(*devices: str, tier: str | None = None, forbid: tuple[str, ...] = ()) -> TableRule:
    return TableRule(devices or None, tier, frozenset(forbid))  # type: ignore[arg-type]


def ten_tables(topology: Topology | None = None, constraints: Constraints | None = None) -> Problem:
    """Tables t0 to t9 on two hosts of two GPUs of 1 GiB each."""
    tables = [zipf_table(f"t{number}", 20) for number in range(10)]
    topology = topology or machine(2, 2, hbm_bytes=GIB, dram_bytes=4 * GIB)
    return replace(problem_of(*tables, topology=topology), constraints=constraints or Constraints())


# Files


def test_the_documented_file(tmp_path: Path) -> None:
    read = Constraints.load(write(tmp_path, example("yaml")))
    assert read == Constraints.of(
        {
            "C3": rule("gpu:0"),
            "C9": rule(tier="hbm"),
            "C10": rule("host:1"),
            "C1*": rule(forbid=("row-wise", "column-wise", "replicated")),
        },
        [["C1", "C2"], ["C5", "C6", "C7"]],
        {"gpu": "16MiB", "gpu:0": "64MiB", "host": "1GiB"},
    )
    assert Constraints.load(write(tmp_path, example("toml"), "rules.toml")) == read


def test_the_page_names_every_kind_and_field() -> None:
    assert all(f"`{kind}`" in PAGE for kind in KINDS)
    assert all(f"| `{name}` |" in PAGE for name in TableRule.__dataclass_fields__)


_names = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=5)
_rules = st.builds(
    TableRule,
    st.none() | st.lists(_names, min_size=1, max_size=3).map(tuple),
    st.sampled_from([None, "hbm"]),
    st.frozensets(st.sampled_from(KINDS)),
)
_constraints = st.builds(
    Constraints,
    st.dictionaries(_names, _rules, max_size=3).map(lambda tables: tuple(tables.items())),
    st.lists(st.lists(_names, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    st.dictionaries(_names, st.integers(0, 1 << 60), max_size=3).map(lambda r: tuple(r.items())),
)


@given(_constraints)
@examples(100)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, constraints: Constraints
) -> None:
    path = tmp_path_factory.getbasetemp() / "again.yaml"
    path.write_text(dumps(constraints), encoding="utf-8")
    assert Constraints.load(path) == constraints


def test_saving(tmp_path: Path) -> None:
    constraints = Constraints.of({"t1": rule("gpu:0", tier="hbm")}, [["t1", "t2"]], {"gpu": 5})
    constraints.save(tmp_path / "rules.yaml")
    assert Constraints.load(tmp_path / "rules.yaml") == constraints
    with pytest.raises(ProblemError, match=r"end the name in \.yaml"):
        constraints.save(tmp_path / "rules.toml")
    twice = Constraints((("t1", rule(tier="hbm")), ("t1", rule("gpu:0"))))
    with pytest.raises(ProblemError, match="given twice"):
        twice.save(tmp_path / "twice.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["rules.yaml"]


@pytest.mark.parametrize("text", ["tables:\n", "# nothing\n", "tables: {}\ntogether: []\n"])
def test_an_empty_file_asks_nothing(tmp_path: Path, text: str) -> None:
    assert not Constraints.load(write(tmp_path, text))


@pytest.mark.parametrize("ending", ["yaml", "toml"])
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path, ending: str) -> None:
    texts = {"yaml": "together: [[C1, C2]]\r\n", "toml": 'together = [["C1", "C2"]]\r\n'}
    file = write(tmp_path, "\ufeff" + texts[ending], f"rules.{ending}")
    assert Constraints.load(file).together == (("C1", "C2"),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a constraints file: it is empty"),
        ("- C1", "holds a list"),
        ("tables: [", "is not a constraints file"),
        ("tables: {C1: {device: [gpu:0]}}", "constraints.md lists them; did you mean devices?"),
        ("table: {}", "table: no such field"),
        ("tables: {C1: {forbid: [rowwise]}}", "'rowwise': Input should be 'row-wise', 'column-wi"),
        ("tables: {C1: {tier: tape}}", "'tape': Input should be 'hbm', 'dram' or 'ssd'"),
        ("tables: {C1: {devices: []}}", "tables.C1.devices: []"),
        ("tables: {7: {tier: hbm}}", "7 is no name; write it in quotes"),
        ("tables: {C1: {tier: hbm}, C1: {}}", "'C1' is written twice in line 1, column"),
        ("tables: {C1: gpu:0}", "tables.C1: 'gpu:0': it must map fields to values, in { }"),
        ("reserve: 1GiB", "reserve: '1GiB': it must map names to values"),
        ("together: C1", "together: 'C1': it must be a list, in [ ]"),
        ("tables: {? [C1] : {}}", "unhashable key"),
        ("tables: {C1: {tier: dram, forbid: [staged, uva, host, cached]}}", "no way to read"),
        ("together: [C1, C2]", "together[0]: 'C1'"),
        ("together: [[C1, 2]]", "together[0][1]: 2 is no name"),
        ("reserve: {gpu: 2Gi}", "write it like 8GiB"),
        ("reserve: {gpu: -1}", "reserve.gpu: -1"),
        ("reserve: {gpu: 2}", "gpu: 2: 2 has no unit: write 2GiB, or 2B if bytes are meant"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ProblemError) as error:
        Constraints.load(path)
    assert words in str(error.value)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="cannot read the constraints"):
        Constraints.load(tmp_path / "none.yaml")
    with pytest.raises(ProblemError, match=r"ends in one of \.yaml, \.yml, \.toml, \.json"):
        Constraints.load(write(tmp_path, "{}", "rules.txt"))
    with pytest.raises(ProblemError, match="is not a constraints file"):
        Constraints.load(write(tmp_path, "tables = [", "rules.toml"))


# Rules of a table


def test_all_keys_that_match_apply() -> None:
    asked = {
        "t*": rule("host:0", forbid=("split",)),
        "t[1-3]": rule("gpu:1", "gpu:2", forbid=("uva",)),
        "t2": rule(tier="dram"),
        "t9": rule(),
    }
    problem = ten_tables(constraints=Constraints.of(asked))
    rules = problem.constraints
    assert rules.rule_of("t0") == rule("host:0", "gpu:0", "gpu:1", forbid=("split",))
    assert rules.rule_of("t1") == rule("gpu:1", forbid=("split", "uva"))
    assert rules.rule_of("t2") == rule("gpu:1", tier="dram", forbid=("split", "uva"))
    assert rules.rule_of("t9") == rules.rule_of("t0")
    assert problem.gpus_of("t0") == (0, 1)
    assert problem.gpus_of("t2") == (1,)


def test_a_name_may_look_like_a_pattern() -> None:
    problem = problem_of(zipf_table("t1", 9), zipf_table("t[1]", 9), zipf_table("u", 9))
    for key in ("t[[]1]", "t[1]"):  # A pattern of the one name, and the name itself.
        asked = Constraints.of({key: rule("gpu:1")}, [[key, "u"]])
        pinned = replace(problem, constraints=asked).constraints
        again = pinned.on(problem.topology, problem.profile.table_names)
        for constraints in (pinned, again):
            assert constraints.rule_of("t[1]") == rule("gpu:1")
            assert constraints.rule_of("t1") == constraints.rule_of("u") == rule()
            assert constraints.together == (("t[1]", "u"),)


def test_groups_that_share_a_table_are_one() -> None:
    asked = [["t9", "t3"], ["t1", "t2"], ["t3", "t[5-6]", "t7*"]]
    constraints = Constraints.of({"t3": rule("host:1"), "t5": rule("gpu:2", "gpu:0")}, asked)
    problem = ten_tables(constraints=constraints)
    assert problem.constraints.together == (("t1", "t2"), ("t3", "t5", "t6", "t7", "t9"))
    assert problem.constraints.group_of("t6") == ("t3", "t5", "t6", "t7", "t9")
    assert problem.constraints.group_of("t0") == ()
    assert problem.gpus_of("t9") == (2,)
    assert problem.gpus_of("t2") == problem.gpus_of("t0") == (0, 1, 2, 3)


_keys = st.sampled_from(["t*", "t?", "t[0-4]", "t[!1]", "t1", "t2", "t5", "*9"])
_pins = st.none() | st.lists(
    st.sampled_from(["gpu:0", "gpu:1", "gpu:2", "gpu:3", "host:0", "host:1"]),
    min_size=1, max_size=4, unique=True,
).map(tuple)  # fmt: skip
_asked = st.builds(
    Constraints,
    st.dictionaries(
        _keys,
        st.builds(TableRule, _pins, st.sampled_from([None, None, "dram"]),
                  st.frozensets(st.sampled_from(KINDS[:6]))),
        max_size=3,
    ).map(lambda tables: tuple(tables.items())),
    st.lists(st.lists(_keys, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
)  # fmt: skip


@given(_asked)
@examples(80)
def test_a_rule_is_what_all_its_keys_ask(asked: Constraints) -> None:
    problem = ten_tables()
    topology, names = problem.topology, problem.profile.table_names
    try:
        applied = asked.on(topology, names)
    except ProblemError as error:
        assert "pinned" in str(error) or "two or more" in str(error)  # noqa: PT017
        return
    assert applied.on(topology, names) == applied
    for name in names:
        rules = [entry for key, entry in asked.tables if matches(key, name)]
        allowed = {gpu.id for gpu in topology.gpus}
        for entry in rules:
            if entry.devices is not None:
                allowed &= {g.id for g in topology.gpus if {g.id, g.host} & set(entry.devices)}
        found = applied.rule_of(name)
        pinned = set(found.devices or topology.gpus_by_id)
        assert pinned & topology.gpus_by_id.keys() == allowed
        assert found.forbid == frozenset().union(*(entry.forbid for entry in rules))
        assert found.tier == next((entry.tier for entry in rules if entry.tier), None)


CANNOT_BE = {
    "no table is called 't11'; there are t1": ({"t11": rule(tier="hbm")},),
    "no table matches 'C*'": ({"C*": rule(tier="hbm")},),
    "no table is called 't22'": ({}, [["t1", "t22"]]),
    "['t1'] is of 1 table": ({}, [["t1"]]),
    "pinned to 'gpu:4', which the topology '2x2' lack": ({"t1": rule("gpu:4")},),
    "'t1' to gpu:0, 't*' to host:1, gpu:2, gpu:3": (
        {"t1": rule("gpu:0"), "t*": rule("host:1")},
    ),
    "'t1' for tier hbm and 't*' for tier dram": (
        {"t1": rule(tier="hbm"), "t*": rule(tier="dram")},
    ),
    "table 't1': tier dram with staged, uva, host and cached forbidden": (
        {"t1": rule(tier="dram"), "t*": rule(forbid=KINDS[4:])},
    ),
    "t1, t2, t3 have to share a GPU, but 't1' to gpu:0, 't2' to gpu:1": (
        {"t1": rule("gpu:0"), "t2": rule("gpu:1")}, [["t1", "t2", "t3"]],
    ),
    "no device is called 'gpus'; there are gpu and host": ({}, [], {"gpus": 1}),
    "of gpu:1 are to be kept free, but it has 1": ({}, [], {"gpu:1": GIB + 1}),
}  # fmt: skip


@pytest.mark.parametrize("words", CANNOT_BE)
def test_constraints_that_no_problem_can_have(words: str) -> None:
    with pytest.raises(ProblemError) as error:
        ten_tables(constraints=Constraints.of(*CANNOT_BE[words]))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"devices": ()}, "name no GPU"),
        ({"tier": "tape"}, "tier 'tape' is none of hbm, dram, ssd"),
        ({"forbid": frozenset({"rowwise"})}, "cannot forbid 'rowwise'; there are row-wise, "),
    ],
)
def test_rules_that_make_no_sense(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ProblemError, match=words):
        TableRule(**fields)  # type: ignore[arg-type]


# Problems


def test_a_reserve_is_taken_off_once() -> None:
    reserve = {"gpu": "1MiB", "gpu:2": GIB, "host:1": 7}
    asked = Constraints.of({"t1": rule("gpu:1")}, reserve=reserve)
    problem = ten_tables(constraints=asked)
    mib = 1 << 20
    left = [GIB - mib, GIB - mib, 0, GIB - mib]
    assert [gpu.memory_bytes for gpu in problem.topology.gpus] == left
    assert [host.memory_bytes for host in problem.topology.hosts] == [4 * GIB, 4 * GIB - 7]
    again = replace(problem, batch_size=3)
    assert again.topology == problem.topology
    assert again.constraints == problem.constraints
    assert again.constraints.rule_of("t1") == rule("gpu:1")
    # Constraints that are given anew are of the memory that there is.
    more = replace(problem, constraints=Constraints.of(reserve={"gpu:0": 5}))
    assert more.topology.gpus[0].memory_bytes == GIB - mib - 5


def test_the_hash_is_of_what_is_asked() -> None:
    plain = ten_tables()

    def sha256(tables: dict[str, TableRule], *together: list[str], **reserve: int) -> str:
        return replace(plain, constraints=Constraints.of(tables, together, reserve)).sha256

    assert sha256({"t*": rule()}) == plain.sha256
    pinned = sha256({"t1": rule("gpu:0", "gpu:1"), "t2": rule("gpu:0", "gpu:1")})
    assert sha256({"t[12]": rule("gpu:1", "gpu:0")}) == pinned
    asked = [
        plain.sha256,
        pinned,
        sha256({"t1": rule("gpu:0")}),
        sha256({"t1": rule(tier="hbm")}),
        sha256({"t1": rule(forbid=("split",))}),
        sha256({}, ["t1", "t2"]),
        sha256({}, ["t1", "t3"]),
        sha256({}, gpu=1),
    ]
    assert len(set(asked)) == len(asked)
    smaller = replace(plain, topology=plain.topology.with_memory(hbm=GIB - 1))
    assert sha256({}, gpu=1) == smaller.sha256


def test_the_hash_of_a_problem_is_of_all_that_its_plan_depends_on() -> None:
    plain = ten_tables()
    first, *others = plain.profile.tables
    tables = [zipf_table("t0", 21), zipf_table("t0", 20, 32), zipf_table("t0", 20, exponent=1.01)]
    tables.append(replace(first, locality=(WindowCounts(64, 10, 1920, 900),)))
    changed = [replace(plain, profile=Profile((one, *others), source="test")) for one in tables]
    link, *links = plain.topology.links
    faster = replace(link, bytes_per_s=1.5 * link.bytes_per_s)
    changed += [
        replace(plain, topology=replace(plain.topology, links=(faster, *links))),
        replace(plain, topology=plain.topology.with_memory(dram=GIB)),
        replace(plain, batch_size=65),
        replace(plain, pipeline="serial"),
        replace(plain, widths=("int8",)),
        replace(plain, exchange_dtype="bfloat16"),
        replace(plain, growing={"t0": Growing(capacity=20)}),
    ]
    assert len({one.sha256 for one in (plain, *changed)}) == 1 + len(changed)
    renamed = replace(plain.topology, name="another"), replace(plain.profile, source="another")
    assert replace(plain, topology=renamed[0], profile=renamed[1]).sha256 == plain.sha256


# What plans break


@st.composite
def option_tables(draw: st.DrawFn) -> tuple[Plan, set[Kind]]:
    """A table cut, split and replicated in drawn ways, and what those ways are called."""
    topology = machine(3)
    gpus = [gpu.id for gpu in topology.gpus]
    row_slices = draw(st.integers(1, 3))
    column_widths = draw(st.sampled_from([(4,), (3, 1), (2, 1, 1)]))
    replicated_rows = draw(st.integers(0, 3))
    blocked = draw(st.booleans())
    cold = draw(st.sampled_from(["staged", "uva", "host", "cached"]))
    rows_each = draw(st.integers(1, 4))
    table = Table("t", replicated_rows + row_slices * rows_each, sum(column_widths))
    shards, first = [], 0
    kinds: set[Kind] = {"row-wise"} if row_slices > 1 else set()
    kinds |= {"column-wise"} if len(column_widths) > 1 else set()
    if replicated_rows:
        shards.append(in_hbm("t", (0, replicated_rows, 1), (0, table.dim), *gpus))
        kinds.add("replicated")
    for width in column_widths:
        cols = (first, first + width)
        first += width
        for way in range(row_slices):
            hot = draw(st.integers(0, rows_each))
            # A contiguous part of a table is a slice of its own on another GPU only.
            gpu = gpus[way] if blocked else draw(st.sampled_from(gpus))
            offset, step = (way * rows_each, 1) if blocked else (way, row_slices)
            start = replicated_rows + offset
            edge, stop = start + hot * step, start + rows_each if blocked else table.rows
            if hot:
                shards.append(in_hbm("t", (start, min(edge, stop), step), cols, gpu))
            if hot < rows_each:
                shard = replace(in_dram("t", (edge, stop, step), cols, gpu), lookup=cold)
                shards.append(replace(shard, cache_rows=1) if cold == "cached" else shard)
                kinds.add(cold)
            if 0 < hot < rows_each:
                kinds.add("split")
    return plan_of(table, *draw(st.permutations(shards)), topology=topology), kinds


@given(option_tables())
@examples(100)
def test_ways_of_placing_are_told_from_the_plan(option: tuple[Plan, set[Kind]]) -> None:
    plan, kinds = option
    assert set(kinds_of(plan.shards)) == kinds


@given(plans(), st.data())
@examples(60)
def test_a_plan_meets_what_it_does_and_breaks_all_else(plan: Plan, data: st.DataObject) -> None:
    """Constraints read off the plan are met; each one turned round is broken."""
    table = data.draw(st.sampled_from(plan.tables))
    shards = plan.shards_by_table[table.name]
    served = {device for shard in shards for device in shard.devices}
    homes = {shard.memory for shard in shards if shard.row_count}
    kinds = set(kinds_of(shards))

    def broken(asked: TableRule) -> list[str]:
        found = unmet(plan, Constraints.of({glob.escape(table.name): asked}))
        assert all((v.rule, v.where) == ("constraint", table.name) for v in found)
        return [violation.message for violation in found]

    assert broken(rule(*served, forbid=tuple(set(KINDS) - kinds))) == []
    for gpu in plan.topology.gpus:
        assert len(broken(rule(gpu.id))) == (served != {gpu.id})
    for tier in ("hbm", "dram"):
        words = [
            f"table {table.name!r} has rows in {home}, but all are to be in {tier}"
            for home in homes - {tier}
        ]
        assert broken(rule(tier=tier)) == words
    for kind in kinds:
        (message,) = broken(rule(forbid=(kind,)))
        assert message.endswith(f"{kind} is forbidden")


A, B, C = (Table(name, 10, 4) for name in "ABC")


def whole(table: Table, *devices: str) -> Shard:
    return in_hbm(table.name, (0, 10, 1), (0, 4), *devices)


def of_three(*shards: Shard) -> Plan:
    return Plan((A, B, C), machine(2, 2, servers=1), shards)


def halves(table: Table, *devices: str) -> list[Shard]:
    return [in_hbm(table.name, (n, 10, 2), (0, 4), device) for n, device in enumerate(devices)]


@pytest.mark.parametrize(("shards", "words"), [
    ([whole(A), whole(B)], []),
    ([in_hbm("A", (0, 3, 1), (0, 4)), in_dram("A", (3, 10, 1), (0, 4)), whole(B)], []),
    ([whole(A), whole(B, "gpu:1")], ["served by several: 'A' by gpu:0, 'B' by gpu:1"]),
    ([*halves(A, "gpu:0", "gpu:0"), whole(B)], ["'A' is sharded into 2 row slices, but has to be"]),
    ([*halves(A, "gpu:0", "gpu:1"), whole(B)],
     ["'A' is sharded into 2 row slices", "'A' by gpu:0, gpu:1, 'B' by gpu:0"]),
    ([whole(A), in_hbm("B", (0, 10, 1), (0, 1)), in_hbm("B", (0, 10, 1), (1, 4))],
     ["'B' is sharded into 2 column slices, but has to be whole, together with A"]),
    ([whole(A, "gpu:0", "gpu:1"), whole(B, "gpu:0", "gpu:1")],
     ["'A' has rows on 2 devices", "'B' has rows on 2 devices", "by gpu:0, gpu:1"]),
])  # fmt: skip
def test_tables_that_belong_together(shards: list[Shard], words: list[str]) -> None:
    found = unmet(of_three(*shards, whole(C, "gpu:3")), Constraints.of(together=[["A", "B"]]))
    assert len(found) == len(words)
    for violation, part in zip(found, words, strict=True):
        assert violation.rule == "constraint"
        assert part in violation.message


def test_rows_that_hosts_serve() -> None:
    pooled = Shard("A", (0, 10, 1), (0, 4), ("host:2",), "dram", "host")
    plan = of_three(pooled, whole(B), whole(C))
    assert unmet(plan, Constraints.of({"A": rule("host:2", tier="dram")})) == []
    (violation,) = unmet(plan, Constraints.of({"A": rule("gpu:0")}))
    assert violation.message == "table 'A' is served by host:2, but pinned to gpu:0"


def test_a_table_without_rows_is_in_every_tier() -> None:
    empty = Table("A", 0, 4)
    plan = plan_of(empty, in_dram("A", (0, 0, 1), (0, 4), "gpu:1"))
    assert unmet(plan, Constraints.of({"A": rule(tier="hbm", forbid=KINDS)})) == []
    assert len(unmet(plan, Constraints.of({"A": rule("gpu:0")}))) == 1


def test_constraints_of_another_model() -> None:
    plan = of_three(whole(A), whole(B), whole(C))
    with pytest.raises(ProblemError, match="no table is called 'D'; there are A, B, C"):
        unmet(plan, Constraints.of({"D": rule(tier="hbm")}))
    with pytest.raises(ProblemError, match="lacks; it has gpu:0"):
        unmet(plan, Constraints.of({"A": rule("gpu:9")}))


# The command line


def test_verify_with_constraints(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    of_three(whole(A), *halves(B, "gpu:0", "gpu:1"), whole(C, "gpu:2")).save(path)
    met = write(tmp_path, "tables: {A: {devices: [host:0]}, C: {tier: hbm}}")
    done = succeed("verify", path, "--constraints", met)
    assert f"it meets {met}" in done.stdout.replace("\n", "")
    assert done.stderr == ""

    broken = write(tmp_path, "tables: {'*': {forbid: [row-wise]}, C: {devices: [gpu:3]}}")
    result = invoke("verify", path, "--constraints", broken)
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "constraint: table 'B' is sharded into 2 row slices, but row-wise is forbidden",
        "constraint: table 'C' is served by gpu:2, but pinned to gpu:3",
    ]
    result = invoke("verify", path, "--constraints", broken, "--format", "json")
    shown = json.loads(result.stdout)
    assert not shown["sound"]
    assert [v["where"] for v in shown["violations"]] == ["B", "C"]

    reserving = write(tmp_path, "reserve: {gpu: 1GiB}")
    assert "reserve is not checked" in succeed("verify", path, "--constraints", reserving).stderr
    unknown = write(tmp_path, "tables: {D: {tier: hbm}}")
    assert "no table is called 'D'" in fail("verify", path, "--constraints", unknown)


def test_verify_of_a_plan_that_is_unsound_too(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    rules = write(tmp_path, "tables: {A: {devices: [gpu:1]}}")
    of_three(whole(A), whole(B)).save(path)
    result = invoke("verify", path, "--constraints", rules)
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == ["coverage", "constraint"]
    of_three(whole(A), replace(whole(B), devices=("gpu:9",)), whole(C)).save(path)
    result = invoke("verify", path, "--constraints", rules)
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == ["shard"]


def test_a_plan_records_what_a_reserve_left(tmp_path: Path) -> None:
    rules = write(tmp_path, "reserve: {gpu: 128MiB, 'gpu:1': 256MiB, host: 1GiB}")
    asked = ("--workload", "random-3@1", "--topology", "2xt4", "--hbm", "1GiB", "--dram", "64GiB",
             "--batch-size", "16", "--solver", "greedy-size")  # fmt: skip
    succeed("plan", *asked, "--constraints", rules, "-o", tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert [gpu.memory_bytes for gpu in plan.topology.gpus] == [896 << 20, 768 << 20]
    assert [host.memory_bytes for host in plan.topology.hosts] == [63 * GIB]


@pytest.mark.parametrize("command", ["compare", "fleet"])
def test_machines_without_a_pinned_gpu_have_rows_that_say_so(tmp_path: Path, command: str) -> None:
    rules = write(tmp_path, "tables: {t1: {devices: ['gpu:1']}}")
    solver = "--solver" if command == "fleet" else "--solvers"
    asked = (command, "--workload", "random-3@1", "--batch-size", "16", solver, "greedy-size",
             "--constraints", rules, "--format", "json", "--topology")  # fmt: skip
    shown = json.loads(succeed(*asked, "1xt4,2xt4").stdout)
    lacking, there = shown["comparison" if command == "compare" else "fleet"]
    assert (lacking["status"], lacking["step_time_s"]) == ("infeasible", None)
    assert "'t1' is pinned to 'gpu:1', which the topology '1xt4' lacks" in lacking["detail"]
    assert there["step_time_s"] > 0


def test_machines_with_less_memory_than_a_budget_have_rows_that_say_so() -> None:
    asked = ("--workload", "random-3@1", "--solvers", "greedy-size", "--format", "json",
             "--topology", "1xt4,1xa100-40", "--hbm", "1GiB,20GiB")  # fmt: skip
    small, refused, *larger = json.loads(succeed("compare", *asked).stdout)["comparison"]
    assert small["step_time_s"] > 0
    assert (refused["topology"], refused["hbm_budget_bytes"]) == ("1xt4", 20 << 30)
    assert (refused["status"], refused["step_time_s"]) == ("infeasible", None)
    assert "its card, 't4', has 15 GiB" in refused["detail"]
    assert all(row["step_time_s"] > 0 for row in larger)


def test_compare_ends_with_an_error_if_no_machine_has_a_pinned_gpu(tmp_path: Path) -> None:
    rules = write(tmp_path, "tables: {t1: {devices: ['gpu:5']}}")
    line = fail("compare", "--workload", "random-3@1", "--topology", "1xt4,2xt4",
                "--constraints", rules)  # fmt: skip
    assert "'t1' is pinned to 'gpu:5', which the topology '1xt4' lacks" in line
