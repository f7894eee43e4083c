"""`placer estimate-memory`: what tables take, by the width of rows and by optimizer."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from placer.report.section import Column, Report, table_of
from placer.tables import DTYPE_BYTES, OPTIMIZERS, Table


def estimate_report(source: str, tables: Sequence[Table], dense_parameters: int = 0) -> Report:
    """Return the bytes of weights and optimizer state for each dtype and optimizer.

    Parameters
    ----------
    source : str
        What the tables are of, for people.
    tables : sequence of Table
    dense_parameters : int
        Parameters beside the tables; in float32 with Adam each takes 16 bytes in training.
    """
    rows = []
    for dtype, optimizer in itertools.product(DTYPE_BYTES, OPTIMIZERS):
        kind: Any = {"dtype": dtype, "optimizer": optimizer}
        as_asked = [replace(one, **kind) for one in tables]
        weights = sum(one.rows * one.weight_bytes_per_row() for one in as_asked)
        state = sum(one.rows * one.state_bytes_per_row() for one in as_asked)
        rows.append((dtype, optimizer, weights, state, weights + state))
    dense = f"; beside them {dense_parameters:,} dense parameters" if dense_parameters else ""
    return Report(
        title=f"Memory of {source}",
        facts={
            "source": source,
            "tables": len(tables),
            "rows": sum(one.rows for one in tables),
            "dense_parameters": dense_parameters,
        },
        headline=(
            f"{len(tables):,} table{'s' * (len(tables) != 1)}, "
            f"{sum(one.rows for one in tables):,} rows{dense}",
        ),
        sections=(
            table_of(
                rows,
                "memory",
                "All tables, with their optimizer state",
                Column("dtype", "dtype", of=itemgetter(0)),
                Column("optimizer", "optimizer", of=itemgetter(1)),
                Column("weight_bytes", "weights", of=itemgetter(2)),
                Column("state_bytes", "state", of=itemgetter(3)),
                Column("total_bytes", "together", of=itemgetter(4)),
            ),
        ),
    )
