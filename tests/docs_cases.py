"""The code blocks of the pages, and how each kind of them is run.

docs/testing.md says how a page marks its blocks.
"""

import io
import json
import multiprocessing
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md")))
LANGUAGES = ("bash", "console", "json", "python", "sql", "text", "toml", "yaml")

_BLOCK = re.compile(
    r"^```(?P<language>\w*)(?: +(?P<info>[^\n]*))?\n(?P<text>.*?)^```$"
    r"|^<!-- set-up: (?P<hidden>\w+)\n(?P<before>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)
_INFO = re.compile(r'(?:title="(?P<title>[^"]+)" *)?(?:no-run: (?P<reason>.+))?')


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, or a hidden one that prepares what the next ones need."""

    page: str
    line: int
    language: str
    text: str
    title: str | None  # The file that it is.
    reason: str | None  # Why it is not run.
    is_hidden: bool

    def __str__(self) -> str:
        return f"{self.page}, line {self.line}"


def blocks_of(page: str) -> list[Block]:
    """All blocks of a page, in order."""
    return list(_blocks(page, (REPOSITORY / page).read_text(encoding="utf-8")))


def _blocks(page: str, text: str) -> Iterator[Block]:
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        if found["hidden"]:
            yield Block(page, line, found["hidden"], found["before"], None, None, True)
            continue
        info = _INFO.fullmatch(found["info"] or "")
        assert info is not None, f"{page}, line {line}: '{found['info']}' is not understood"
        yield Block(
            page, line, found["language"], found["text"], info["title"], info["reason"], False
        )


def in_no_time(text: str) -> str:
    """Return a block whose searches end after half a second, whatever limit the page gives."""
    return re.sub(r"(--time-limit |time_limit_s=)[\d.]+(?!\w)", r"\g<1>0.5", text)


@dataclass
class Shell:
    """Runs the blocks of one page, one after the other, in the working folder."""

    known: dict[str, object] = field(default_factory=lambda: {"__name__": "page"})

    def run(self, block: Block) -> None:
        """Run what can be run, read what can be read, and write what names a file."""
        if block.reason is None:
            getattr(self, f"_{block.language}")(block)
        if block.title is not None:
            Path(block.title).write_text(block.text, encoding="utf-8")

    def _python(self, block: Block) -> None:
        code = "\n" * block.line + in_no_time(block.text)  # Errors name the line of the page.
        exec(compile(code, block.page, "exec"), self.known)

    def _bash(self, block: Block) -> None:
        for command in in_no_time(block.text.replace("\\\n", " ")).splitlines():
            _command(command)

    def _console(self, block: Block) -> None:
        for session in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, shown = session.replace("\\\n", " ").partition("\n")
            printed = [" ".join(line.split()) for line in _command(command).splitlines()]
            rest = iter(printed)
            for line in shown.splitlines():
                words = " ".join(line.split())
                # Headings and sentences are printed, in this order. Figures are of searches
                # that have longer than a test's, so that lines with digits are not compared.
                skipped = words in ("", "...") or re.search(r"\d", words) is not None
                found = skipped or any(_equal(words, one) for one in rest)
                assert found, f"{block}: '{words}' is not in\n" + "\n".join(printed)

    def _json(self, block: Block) -> None:
        json.loads(block.text)

    def _toml(self, block: Block) -> None:
        tomllib.loads(block.text)

    def _yaml(self, block: Block) -> None:
        yaml.safe_load(io.StringIO(block.text))

    def _sql(self, block: Block) -> None:
        pytest.importorskip("duckdb", reason="duckdb is not installed").execute(block.text)

    def _text(self, block: Block) -> None:
        """A tree of files, messages: there is nothing to run."""


def _equal(shown: str, printed: str) -> bool:
    return shown == printed or (shown.endswith(" ...") and printed.startswith(shown[:-4]))


def _command(line: str) -> str:
    """Run a command; its standard output."""
    words = shlex.split(line, comments=True)
    if not words:
        return ""
    if words[0] == "placer":
        from cli_cases import succeed  # Ranks of a page need none of it.

        return succeed(*words[1:]).stdout
    if words[:3] == ["python", "-m", "torch.distributed.run"]:
        _run_ranks(words[3:])
        return ""
    programs = {"python": [sys.executable], "pip": [sys.executable, "-m", "pip"]}
    assert words[0] in programs, f"{line}: only placer and python are run"
    done = subprocess.run(
        [*programs[words[0]], *words[1:]],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def _run_ranks(words: list[str]) -> None:
    """Run a script as torchrun does, on ranks that are forked from a process that has torch.

    A rank that torchrun starts takes seconds to import it.
    """
    from torch.distributed.run import parse_args

    asked = parse_args(words)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    world = int(asked.nproc_per_node)
    context, ranks = multiprocessing.get_context("forkserver"), []
    for rank in map(str, range(world)):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(world)}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        arguments = (asked.training_script, str(Path.cwd()), variables)
        ranks.append(context.Process(target=_run_rank, args=arguments))
        ranks[-1].start()
    for one in ranks:
        one.join(300)
    assert [one.exitcode for one in ranks] == [0] * world, shlex.join(words)


def _run_rank(script: str, folder: str, variables: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(variables)
    runpy.run_path(script, run_name="__main__")
