"""Give tables more or fewer rows: keep the rows of ids that stay, and draw new rows."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from placer.data.encoding import Encoding, Hash, Vocabulary
from placer.errors import PlacerError, PlanMismatchError
from placer.executor.id_order import rows_from, tensors_of
from placer.executor.tensor_names import UPDATES
from placer.files.reading import open_file
from placer.growing.key_map import KeyMap, Resized
from placer.plan.origin import profile_of
from placer.plan.plan import Int, Plan
from placer.plan.verify import verify
from placer.storage.manifest import (
    KEYS,
    STATES,
    WEIGHTS,
    Checkpoint,
    growing_settings,
    table_settings,
)
from placer.storage.table_files import keys_of
from placer.storage.tensor_rows import AnyTensor, TensorRows
from placer.tables import Table
from placer.training import checkpoint as checkpoints

Rows = Int | Resized
_NEW = -1


@dataclass(frozen=True, slots=True)
class Grown:
    """Numbers of a table's kept, new and dropped rows."""

    table: str
    kept_rows: int
    new_rows: int
    dropped_rows: int


def grow_checkpoint(
    plans: tuple[Plan, Plan],
    files: tuple[Path, Path],
    checkpoint: Path,
    folder: Path,
    keep: Iterable[str] = (),
) -> list[Grown]:
    """Write a checkpoint of an older plan again into `folder`, with the tables of a newer plan.

    `plans` are the older and the newer one, and `files` are theirs. Their profiles say how ids map
    to rows. Each of `keep` is ``TABLE=FILE``: a file of the ids that stay, one a line.

    Raises PlanMismatchError if nobody can tell which row an id has in the newer plan.
    """
    old, new = plans
    verify(new)
    if folder.is_dir():
        checkpoints.tidy(folder)  # A killed command may have left parts.
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise PlacerError(f"{folder} is there already; name another folder")
    known = dict(_ids_of(word) for word in keep)
    encodings = _encoding(old, files[0]), _encoding(new, files[1])
    rows: dict[str, Rows] = {**earlier_rows(old, new, encodings, known)}
    opened = checkpoints.open_checkpoint(checkpoint)
    rows |= resized_keys(opened, old, new)
    checkpoints.save(folder, grown(opened, old, new, rows))
    return counts(old, rows)


def resized_keys(checkpoint: Checkpoint, old: Plan, new: Plan) -> dict[str, Resized]:
    """Return the keys of tables that grow, fitted to the newer plan's capacity.

    Raises PlanMismatchError if a table grows in only one of the plans."""
    resized = {}
    for name in new.tables_by_name:
        was, how = old.growing.get(name), new.growing.get(name)
        if how is not None and name not in old.tables_by_name:
            resized[name] = Resized(KeyMap(how), np.full(how.rows, _NEW), 0)
        elif was is not None and how is not None:
            resized[name] = keys_of(checkpoint, name, was).resized(how)
        elif was is not how:
            raise PlanMismatchError(
                f"table {name!r} grows in one of the plans and has fixed rows in the other; let it "
                "grow in both, or in none"
            )
    return resized


def earlier_rows(
    old: Plan,
    new: Plan,
    encodings: tuple[Encoding | None, Encoding | None] = (None, None),
    keep: Mapping[str, Int] | None = None,
) -> dict[str, Int]:
    """Return each row's earlier row, or −1 for a new row, for tables with fixed rows.

    If both plans' profiles have a vocabulary of the table, rows follow its keys. Otherwise, rows
    follow ids. `keep` lists the earlier ids that become rows 0, 1, … of a newer table.
    """
    rows: dict[str, Int] = {}
    unknown = sorted(set(keep or {}) - set(old.tables_by_name))
    if unknown:
        raise PlanMismatchError(f"no table {unknown[0]!r} in the older plan, of which to keep ids")
    for table in new.tables:
        was = old.tables_by_name.get(table.name)
        if was is None:
            rows[table.name] = np.full(table.rows, _NEW)
            continue
        for name in ("dim", "dtype", "optimizer"):
            before, after = getattr(was, name), getattr(table, name)
            if before != after:
                raise PlanMismatchError(
                    f"table {table.name!r} has {name} {before} in the older plan and {after} in "
                    "the newer one; rows can be more or fewer, and nothing else"
                )
        kept = (keep or {}).get(table.name)
        if table.name not in new.growing:
            rows[table.name] = (
                _by_id(was, table, encodings) if kept is None else _kept(was, table, kept)
            )
    return rows


def _by_id(was: Table, table: Table, encodings: tuple[Encoding | None, Encoding | None]) -> Int:
    name = table.name
    before, after = (None if one is None else one.mappings.get(name) for one in encodings)
    if isinstance(before, Vocabulary) and isinstance(after, Vocabulary):
        found = before.map(after.keys)
        # Row 0 is for all keys that are not listed.
        return np.concatenate(([0], np.where(found > 0, found, _NEW)))
    changed = was.rows != table.rows
    hashed = [one for one in (before, after) if isinstance(one, Hash)]
    if (hashed and changed) or (
        before is not None and after is not None and type(before) is not type(after)
    ):
        raise PlanMismatchError(
            f"table {name!r}: ids are hashed to rows or mapped in another way, so that a row is of "
            "other ids in the newer plan; map ids by a vocabulary, whose rows go with them"
        )
    if table.rows < was.rows:
        raise PlanMismatchError(
            f"table {name!r} has {was.rows} rows and would have {table.rows}: say which ids stay, "
            f"with a file of {table.rows} of them (--keep {name}=FILE)"
        )
    ids = np.arange(table.rows)
    return np.where(ids < was.rows, ids, _NEW)


def _kept(was: Table, table: Table, ids: Int) -> Int:
    outside = ids[(ids < 0) | (ids >= was.rows)]
    if outside.size or np.unique(ids).size < ids.size or ids.size > table.rows:
        fault = f"{outside[0]} is no row of {was.rows}" if outside.size else "an id is listed twice"
        if ids.size > table.rows:
            fault = f"{ids.size} ids do not fit its {table.rows} rows"
        raise PlanMismatchError(f"ids to keep of table {table.name!r}: {fault}")
    return np.concatenate((ids, np.full(table.rows - ids.size, _NEW)))


def grown(checkpoint: Checkpoint, old: Plan, new: Plan, rows: Mapping[str, Rows]) -> Checkpoint:
    """Return a checkpoint with the newer plan's tables. Its rows are read when it is written.

    New rows are drawn as in a new table, with the run's seed. Their optimizer state is zero. `rows`
    comes from `earlier_rows` and `resized_keys`.
    """
    keys = {name: own for name, own in rows.items() if isinstance(own, Resized)}
    earlier = {
        name: own if not isinstance(own, Resized) else own.earlier for name, own in rows.items()
    }
    weights, states = dict[str, AnyTensor](), dict[str, AnyTensor]()
    seed = int(checkpoint.settings.get("seed", 0))
    for table in new.tables:
        for tensor in tensors_of(table, table.optimizer):
            group, made = (WEIGHTS, weights) if tensor.name == "weight" else (STATES, states)
            name = f"{table.name}.{tensor.name}"
            source = checkpoint.tensors.get(group, {}).get(name)
            before = None if source is None else TensorRows.of(source)
            was = old.tables_by_name.get(table.name)
            if was is not None and (before is None or before.rows != was.rows):
                raise PlanMismatchError(
                    f"{name} of the checkpoint has {0 if before is None else before.rows} rows and "
                    f"{was.rows} in the older plan; give the plan that it was trained with"
                )
            read = rows_from(
                tensor, None if before is None else before.read, earlier[table.name], seed
            )
            made[name] = TensorRows(tensor.shape, tensor.dtype, read)
    if UPDATES in checkpoint.tensors.get(STATES, {}):
        states[UPDATES] = checkpoint.tensors[STATES][UPDATES]
    settings, data = dict(checkpoint.settings), dict(checkpoint.data)
    if "tables" in settings:
        settings["tables"] = table_settings(new.tables)
    if "ids_sha256" in data:
        # Tables that grow map keys by themselves, without the profile.
        kept = {name: ids for name, ids in data["ids_sha256"].items() if name not in keys}
        data["ids_sha256"] = dict(new.provenance.ids_sha256) or kept
    if keys:
        settings["growing"] = growing_settings(new.growing)
    maps = {
        f"{name}.keys.{what}": torch.from_numpy(values)
        for name, own in keys.items()
        for what, values in own.keys.state().items()
    }
    tensors = {**checkpoint.tensors, WEIGHTS: weights, STATES: states, KEYS: maps}
    return replace(checkpoint, settings=settings, tensors=tensors, data=data)


def counts(old: Plan, rows: Mapping[str, Rows]) -> list[Grown]:
    """Return the numbers of kept, new and dropped rows of each table."""
    result = []
    for name, own in rows.items():
        earlier, dropped = (own.earlier, own.dropped) if isinstance(own, Resized) else (own, None)
        kept = int(np.count_nonzero(earlier >= 0))
        if dropped is None:
            dropped = old.tables_by_name[name].rows - kept if name in old.tables_by_name else 0
        result.append(Grown(name, kept, earlier.size - kept, dropped))
    return result


def _encoding(plan: Plan, file: Path) -> Encoding | None:
    profile = profile_of(plan, file)
    return None if profile is None else profile.encoding


def _ids_of(word: str) -> tuple[str, Int]:
    table, _, file = word.partition("=")
    try:
        with open_file(file) as ids:
            return table, np.array([int(line) for line in ids.read().split()], np.int64)
    except (OSError, ValueError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise PlacerError(f"--keep {word!r}: {why}; give TABLE=FILE with an id a line") from error
