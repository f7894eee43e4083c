"""`placer estimate-memory`: what tables take, by the width of rows and by optimizer."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from placer.report import section as form
from placer.report.section import Column, Report, Section
from placer.tables import DTYPE_BYTES, OPTIMIZERS, DType, OptimizerName, Table


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
        as_asked = [
            replace(one, dtype=cast(DType, dtype), optimizer=cast(OptimizerName, optimizer))
            for one in tables
        ]
        weights = sum(one.rows * one.weight_bytes_per_row() for one in as_asked)
        state = sum(one.rows * one.state_bytes_per_row() for one in as_asked)
        rows.append(
            {
                "dtype": dtype,
                "optimizer": optimizer,
                "weight_bytes": weights,
                "state_bytes": state,
                "total_bytes": weights + state,
            }
        )
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
            Section(
                "memory",
                "All tables, with their optimizer state",
                (
                    Column("dtype", "dtype"),
                    Column("optimizer", "optimizer"),
                    Column("weight_bytes", "weights", form.size),
                    Column("state_bytes", "state", form.size),
                    Column("total_bytes", "together", form.size),
                ),
                tuple(rows),
            ),
        ),
    )
