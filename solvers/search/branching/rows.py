"""Rows of a sparse linear program, block by block."""

import contextlib
from functools import cached_property
from typing import Any

import numpy as np

from solvers.model.knapsack import Bool, Float, Int


class Rows:
    """Rows of a sparse program, collected block by block."""

    def __init__(self) -> None:
        self.count = 0
        self._entries: list[tuple[Any, ...]] = []
        self._limits: list[tuple[Float, Float]] = []

    def block(self, count: int, low: Any, high: Any) -> int:
        """Add rows with these limits; return the first one's number."""
        first = self.count
        self._limits.append((np.broadcast_to(low, count), np.broadcast_to(high, count)))
        self.count += count
        return first

    def add(self, rows: Any, columns: Any, values: Any) -> None:
        """Add entries; the arguments are broadcast."""
        self._entries.append(tuple(np.broadcast_arrays(rows, columns, values)))

    @property
    def limits(self) -> tuple[Any, Any]:
        """Lower and upper limits, shapes (rows,)."""
        low, high = (np.concatenate(each) for each in zip(*self._limits, strict=True))
        return low.astype(np.float64), high.astype(np.float64)

    @cached_property
    def entries(self) -> tuple[Int, Int, Float]:
        """Row, column and value of all entries, shapes (entries,). Add none after reading it."""
        rows, columns, values = (
            np.concatenate([np.ravel(entry[number]) for entry in self._entries])
            for number in range(3)
        )
        return rows, columns, values.astype(np.float64)

    def priced(self, prices: Float, columns: int) -> Float:
        """Return the sum of each column's entries times prices of rows, shape (columns,)."""
        rows, at, values = self.entries
        return np.bincount(at, values * prices[rows], columns).astype(np.float64)


def linear_model(rows: Rows, aim: Float, least: Float, most: Float, kept: tuple[Bool, Bool]) -> Any:
    """Return OR-Tools' model of some rows and columns of a program that minimises its aim.

    With scipy it is filled by one sparse matrix; without, entry by entry, which takes a few times
    as long.

    `aim`, `least`, `most`, shape (columns,). `kept`, tuple of arrays of bool, shapes (rows,) and
    (columns,): rows and columns that the model has.
    """
    from ortools.linear_solver.python import model_builder_helper as linear

    model: Any = linear.ModelBuilderHelper()
    of_rows, of_columns = kept
    low, high = (limit[of_rows] for limit in rows.limits)
    aim, least, most = (each[of_columns] for each in (aim, least, most))
    row, column, values = rows.entries
    mine = of_rows[row] & of_columns[column]
    row = (np.cumsum(of_rows) - 1)[row[mine]]
    column, values = (np.cumsum(of_columns) - 1)[column[mine]], values[mine]
    with contextlib.suppress(ImportError):
        from scipy import sparse

        matrix = sparse.csr_matrix((values, (row, column)), (low.size, aim.size))
        model.fill_model_from_sparse_data(least, most, aim, low, high, matrix)
        return model
    model.add_var_array_with_bounds(least, most, np.zeros(aim.size, dtype=bool), "")
    model.set_objective_coefficients(list(range(aim.size)), aim.tolist())
    for number, (lower, upper) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        model.add_linear_constraint()
        model.set_constraint_lower_bound(number, lower)
        model.set_constraint_upper_bound(number, upper)
    for entry in zip(row.tolist(), column.tolist(), values.tolist(), strict=True):
        model.add_term_to_constraint(*entry)
    return model


def solution(model: Any, time_limit_s: float) -> tuple[Float, Float] | None:
    """Return a linear program's values of columns and prices of rows; None if it is not solved."""
    from ortools.linear_solver.python import model_builder_helper as linear

    solver = linear.ModelSolverHelper("GLOP")
    # Presolve finds little to remove and takes a sixth of the time.
    solver.set_solver_specific_parameters("use_preprocessing: false")
    solver.set_time_limit_in_seconds(max(0.01, time_limit_s))
    solver.solve(model)
    if solver.status() != linear.SolveStatus.OPTIMAL:
        return None
    return np.asarray(solver.variable_values()), np.asarray(solver.dual_values())
