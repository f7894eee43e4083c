"""Reads changed files for as long as it is given, and keeps those that are not handled.

python tests/fuzz/fuzz_run.py --seconds 3600 [--seed 1] [--format plan]
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from fuzz_cases import FORMATS, Format
from mutations import mutated

from placer.errors import PlacerError

CORPUS = Path(__file__).resolve().parent / "corpus"
MOST_S = 10.0
"""Processor time that reading a file may take."""


def outcome(format_: Format, path: Path) -> str:
    """Whether a file is ``read``, ``refused`` or neither; then what happened instead."""
    started = time.process_time()
    try:
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


def run(seconds: float, seed: int, names: list[str]) -> dict[str, Counter[str]]:
    """Read changed files of each format in turn; what is not handled is kept in the corpus."""
    choose = random.Random(seed)
    counts: dict[str, Counter[str]] = {name: Counter() for name in names}
    with tempfile.TemporaryDirectory() as folder:
        sound, changed = Path(folder, "sound"), Path(folder, "changed")
        for name in names:
            (sound / name).mkdir(parents=True)
            FORMATS[name].write(sound / name)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for name in names:
                shutil.rmtree(changed, ignore_errors=True)
                shutil.copytree(sound / name, changed)
                path = changed / FORMATS[name].name
                file = choose.choice([*files_of(path), path if path.is_file() else changed])
                if not file.is_file():
                    file = choose.choice(files_of(path))
                file.write_bytes(mutated(file.read_bytes(), choose))
                result = outcome(FORMATS[name], path)
                if result in ("read", "refused"):
                    counts[name][result] += 1
                    continue
                counts[name]["not handled"] += 1
                kept = CORPUS / f"{name}.{seed}-{sum(counts[name].values())}"
                kept.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, kept / os.path.relpath(file, changed).replace("/", "%"))
                print(f"{kept.name}: {result}", flush=True)
    return counts


def main() -> None:
    """Parse, run, print; ends with 1 if a file was not handled."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=3600)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--format", action="append", choices=list(FORMATS))
    chosen = options.parse_args()
    counts = run(chosen.seconds, chosen.seed, chosen.format or list(FORMATS))
    for name, each in counts.items():
        print(f"{name:18} {dict(each)}")
    sys.exit(any(each["not handled"] for each in counts.values()))


if __name__ == "__main__":
    main()
