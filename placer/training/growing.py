"""Checkpoints and shards in files, made again with tables of other rows."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from placer.data.encoding import Encoding
from placer.errors import PlacerError
from placer.plan.order import Int
from placer.plan.origin import profile_of
from placer.plan.plan import Plan
from placer.plan.verify import refuse_growing, verify
from placer.read_files import open_file
from placer.storage.growing import Grown, Rows, counts, earlier_rows, grown, resized_keys
from placer.storage.shards.shard_folder import open_shards, refuse_other_plan
from placer.storage.shards.shard_rows import checkpoint_of_shards
from placer.storage.shards.writing import write_shards
from placer.training import checkpoint as checkpoints


def grow_files(
    old_file: Path,
    new_file: Path,
    folder: Path,
    shards: Path | None = None,
    checkpoint: Path | None = None,
    keep: Iterable[str] = (),
    verify_files: bool = True,
) -> list[Grown]:
    """Make a folder of shards, or of a checkpoint, whose tables are those of the newer plan.

    The files are those of the plans; what ids are is known from the profiles that these name.
    Either `shards` or `checkpoint` is given, of the older plan's tables. Each of `keep` is
    ``TABLE=FILE``: a file of the ids that stay, one a line. `verify_files` says whether the SHA-256
    of shards' files is compared.
    """
    old, new = Plan.load(old_file), Plan.load(new_file)
    verify(new)
    if folder.exists():
        raise PlacerError(f"{folder} is there already; name another folder")
    known = dict(_ids_of(word) for word in keep)
    encodings = _encoding(old, old_file), _encoding(new, new_file)
    rows: dict[str, Rows] = {**earlier_rows(old, new, encodings, known)}
    if shards is not None:
        refuse_growing(old, "a folder of shards")
        opened = open_shards(shards, verify=verify_files)
        refuse_other_plan(opened, old)
        write_shards(new, grown(checkpoint_of_shards(opened), old, new, rows), folder)
    else:
        assert checkpoint is not None, "there is one of both"
        opened_checkpoint = checkpoints.open_checkpoint(checkpoint)
        rows |= resized_keys(opened_checkpoint, old, new)
        checkpoints.save(folder, grown(opened_checkpoint, old, new, rows))
    return counts(old, rows)


def _encoding(plan: Plan, file: Path) -> Encoding | None:
    profile = profile_of(plan, file)
    return None if profile is None else profile.encoding


def _ids_of(word: str) -> tuple[str, Int]:
    table, _, file = word.partition("=")
    try:
        with open_file(file) as ids:
            return table, np.array([int(line) for line in ids.read().split()], np.int64)
    except (OSError, ValueError, OverflowError) as error:
        raise PlacerError(f"--keep {word!r}: {error}; give TABLE=FILE with an id a line") from error
