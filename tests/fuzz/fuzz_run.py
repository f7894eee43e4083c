"""Reads changed files for as long as it is given, and keeps those that are not handled.

python tests/fuzz/fuzz_run.py --seconds 3600 [--inputs 50000] [--seed 1] [--format plan]
"""

import argparse
import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
from more_cases import FORMATS, SLOW, Format
from mutations import mutated
from value_changes import change_values, resealed

from placer.errors import PlacerError

CORPUS = Path(__file__).resolve().parent / "corpus"
MOST_S = 10.0
"""Processor time that reading a file may take."""
MOST_BYTES = 1 << 30
"""Memory that reading a file may take beyond what the process has."""
SLOW_EVERY = 8
"""One of so many batches reads the formats whose readers take tenths of a second."""


BATCH = 100
"""Files that a process reads."""


class TooLongError(Exception):
    """A file was read for `MOST_S` of processor time."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise where a reader takes too long or too much."""

    def stop(*_: object) -> None:
        raise TooLongError

    before = resource.getrlimit(resource.RLIMIT_DATA)
    # The first number of statm is the address space, the sixth data and stack, in pages.
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    most = pages * resource.getpagesize() + MOST_BYTES
    handler = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_S)
    resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        resource.setrlimit(resource.RLIMIT_DATA, before)


def outcome(format_: Format, path: Path) -> str:
    """Whether a file is ``read``, ``refused`` or neither; then what happened instead."""
    started = time.process_time()
    try:
        with limited(), contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            format_.read(path)
        result = "read"
    except PlacerError as error:
        result = "refused" if str(error) else "refused without a word"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        result = f"{type(error).__name__} in {Path(where.filename).name}:{where.lineno}: {error}"
    seconds = time.process_time() - started
    return result if seconds < MOST_S else f"{seconds:.0f} s of processor time, then: {result}"


def files_of(path: Path) -> list[Path]:
    """The file, or those of the folder, and what lies beside."""
    inside = path.rglob("*") if path.is_dir() else path.parent.iterdir()
    return sorted(file for file in inside if file.is_file())


def change(format_: Format, folder: Path, choose: random.Random) -> None:
    """Change the bytes of a file in a folder, or its values."""
    if format_.change is not None:
        format_.change(folder, choose)
        return
    path = folder / format_.name
    file = choose.choice([*files_of(path), *([path] if path.is_file() else [])])
    sound = file.read_bytes()
    if choose.random() < 0.5:
        # What no library can write stays as it is, as an object that cannot be pickled.
        with contextlib.suppress(Exception):
            change_values(file, choose)
        if file.read_bytes() != sound and choose.random() < 0.9:
            resealed(folder)
    else:
        file.write_bytes(mutated(sound, choose))


def keep(name: str, sound: Path, changed: Path) -> None:
    """Keep the files that were changed, in the corpus."""
    kept = CORPUS / name
    kept.mkdir(parents=True, exist_ok=True)
    for file in changed.rglob("*"):
        before = sound / file.relative_to(changed)
        known = before.is_file() and before.read_bytes() == file.read_bytes()
        if file.is_file() and before.exists() and not known:
            shutil.copy(file, kept / os.path.relpath(file, changed).replace("/", "%"))


def run(seconds: float, seed: int, names: list[str], inputs: int) -> dict[str, Counter[str]]:
    """Read changed files of each format in turn; what is not handled is kept in the corpus.

    A process of its own reads a batch of them, for a reader may end it.
    """
    counts: dict[str, Counter[str]] = {name: Counter() for name in names}
    with tempfile.TemporaryDirectory() as folder:
        sound, work = Path(folder, "sound"), Path(folder, "work")
        for name in names:
            (sound / name).mkdir(parents=True)
            FORMATS[name].write(sound / name)
        until, done, batch = time.monotonic() + seconds, 0, 0
        while time.monotonic() < until and done < inputs:
            batch += 1
            quick = [name for name in names if name not in SLOW]
            turns = names if batch % SLOW_EVERY == 0 else quick or names
            order = [*turns * (BATCH // len(turns)), *turns[: BATCH % len(turns)]]
            results = _batch_in_a_process(sound, work, order, f"{seed}-{batch}")
            for name, result in results:
                done += 1
                handled = result in ("read", "refused")
                counts[name][result if handled else "not handled"] += 1
                if not handled:
                    print(f"{name}: {result[:300]}", flush=True)
    return counts


def _batch_in_a_process(
    sound: Path, work: Path, order: Sequence[str], seed: str
) -> list[tuple[str, str]]:
    """What became of a changed file of each format of a list."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    results = work / "results"
    results.touch()
    child = os.fork()
    if not child:
        code = 1
        try:
            _batch(sound, work, order, seed, results)
            code = 0
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found = [tuple(json.loads(line)) for line in results.read_text().splitlines()]
    if status:
        name = order[len(found)]
        keep(f"{name}.{seed}-{len(found)}", sound / name, work / "before")
        found.append((name, f"{seed}-{len(found)}: the process ended with {status}"))
    return found


def _batch(sound: Path, work: Path, order: Sequence[str], seed: str, results: Path) -> None:
    choose = random.Random(seed)
    with results.open("a", buffering=1) as file:
        for number, name in enumerate(order):
            changed, before = work / "changed", work / "before"
            for folder in (changed, before):
                shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(sound / name, changed)
            change(FORMATS[name], changed, choose)
            shutil.copytree(changed, before)
            result = outcome(FORMATS[name], changed / FORMATS[name].name)
            if result not in ("read", "refused"):
                entry = f"{name}.{seed}-{number}"
                keep(entry, sound / name, before)
                result = f"{entry}: {result}"
            file.write(json.dumps([name, result]) + "\n")


def main() -> None:
    """Parse, run, print; ends with 1 if a file was not handled."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=3600)
    options.add_argument("--inputs", type=int, default=1 << 60)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--format", action="append", choices=list(FORMATS))
    chosen = options.parse_args()
    counts = run(chosen.seconds, chosen.seed, chosen.format or list(FORMATS), chosen.inputs)
    for name, each in counts.items():
        print(f"{name:18} {dict(each)}")
    print(f"{sum(sum(each.values()) for each in counts.values())} inputs")
    sys.exit(any(each["not handled"] for each in counts.values()))


if __name__ == "__main__":
    main()
