"""Results are written through `placer/files/`: see the crash matrix.

Who changes files otherwise is listed here, with the reason.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CALLS = {
    "chmod", "copyfile", "copyfileobj", "copytree", "ftruncate", "hardlink_to", "makedirs", "mkdir",
    "mkdtemp", "mkstemp", "pwrite", "rename", "renames", "rmdir", "rmtree", "savez", "symlink_to",
    "tofile", "touch", "truncate", "unlink", "write_bytes", "write_text", "save_file",
    "NamedTemporaryFile", "TemporaryDirectory", "TemporaryFile",
}  # fmt: skip
"""Calls that change files, whoever has a method of this name."""
MAY = re.compile(r"\b(?:" + "|".join(CALLS) + r"|fdopen|[a-z]*open|[a-z]+\.replace)\(")
ALLOWED = {
    "placer/files/atomic.py": "all results",
    "placer/files/folders.py": "folders of results",
    "placer/files/locks.py": "the lock of a folder, which is no result",
    "placer/training/checkpoint.py": "sets old checkpoints aside and removes them, by renames",
    "placer/trainers/lightning.py": "removes old checkpoints",
    "placer/executor/drive.py": "rows on a drive, in a file that ends with the process",
    "placer/training/metrics.py": "appends a line; the last one is dropped if it is not whole",
    "placer/measurement/machine.py": "appends a line, drops one that is not whole, begins anew",
    "placer/measurement/measure.py": "a folder of temporary files",
    "placer/data/files/stores.py": "standard input, kept while it is read",
    "placer/data/formats/dlrm.py": "a compressed log, unpacked while it is read",
    "placer/report/failures.py": "the traceback of an error that was not expected",
    "placer/training/trace.py": "compresses into the temporary file of `replacing`",
    "solvers/report/demo.py": "removes the picture of another log",
}
"""Modules that make such calls, and what for."""
TEMPORARY = {"temporary", "target"}
"""Names of what `replacing` yields."""


def changes(tree: ast.AST) -> list[int]:
    """Lines of calls that change files."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        inside = called.value if isinstance(called, ast.Attribute) else None
        if isinstance(inside, ast.Name) and inside.id in TEMPORARY:
            continue
        # Of texts, `replace` has two arguments.
        moves = name == "replace" and inside and len(node.args) == 1 and not node.keywords
        modes = [one.value for one in node.args if isinstance(one, ast.Constant)]
        modes += [one.value.value for one in node.keywords
                  if one.arg == "mode" and isinstance(one.value, ast.Constant)]  # fmt: skip
        opens = name in ("open", "fdopen") and any(
            isinstance(mode, str) and set(mode) & set("wax+") and set(mode) <= set("wax+rbt")
            for mode in modes
        )
        written = name in ("write_bytes", "write_text") and inside is None
        if (name in CALLS and not written) or moves or opens:
            found.append(node.lineno)
    return found


def test_what_changes_files_is_listed() -> None:
    files = [ROOT / "cli.py"]
    for package in ("placer", "solvers", "cost_models"):
        files += sorted((ROOT / package).rglob("*.py"))
    found = {}
    for file in files:
        text = file.read_text()
        lines = changes(ast.parse(text)) if MAY.search(text) else []
        if lines:
            found[file.relative_to(ROOT).as_posix()] = lines
    unknown = {name: lines for name, lines in found.items() if name not in ALLOWED}
    assert not unknown, "write through placer/files/, or say why not"
    assert found.keys() == ALLOWED.keys()


def test_calls_that_change_files_are_found() -> None:
    code = (
        "Path(a).write_text(b)\nos.replace(a)\ntext.replace(a, b)\nopen(a, 'w')\nwrite_text(a, b)\n"
    )
    assert changes(ast.parse(code)) == [1, 2, 4]
