"""The tables of a model class, without the memory that they take."""

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from placer.adapters.pytorch.models import model_tables
from placer.adapters.pytorch.profiling import dtype_of
from placer.errors import PlacerError
from placer.tables import Table


def tables_of_class(name: str, arguments: Sequence[str] = ()) -> tuple[list[Table], int]:
    """Make a model on the meta device; return its tables and the number of its other parameters.

    `name` is ``package.module:Class``, or a function that makes the model; the module is imported
    from the working folder too. `arguments` are ``NAME=VALUE``, the value as in Python; a plain
    word is text.

    >>> tables, dense = tables_of_class(
    ...     "torch.nn:EmbeddingBag", ["num_embeddings=1000", "embedding_dim=8"]
    ... )
    >>> [(table.rows, table.dim) for table in tables], dense
    ([(1000, 8)], 0)
    """
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        make: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlacerError(f"cannot import {name!r}: {error}; write package.module:Class") from error
    options = {}
    for argument in arguments:
        key, _, text = argument.partition("=")
        try:
            options[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[key] = text
    try:
        with torch.device("meta"):
            model = make(**options)
    except Exception as error:  # Whatever the user's own class raises.
        raise PlacerError(
            f"{name} cannot be made with {options or 'no arguments'}: "
            f"{type(error).__name__}: {error}; give arguments as --set NAME=VALUE"
        ) from error
    found = model_tables(model) if isinstance(model, nn.Module) else ()
    if not found:
        raise PlacerError(f"{name} makes no model with nn.Embedding or nn.EmbeddingBag in it")
    tables = []
    for one in found:
        rows, dim = one.weight.shape
        path = one.path or "weight"
        tables.append(Table(path, rows, dim, dtype_of(one.weight.dtype, path)))
    embedded = {id(one.weight) for one in found}
    dense = sum(one.numel() for one in model.parameters() if id(one) not in embedded)
    return tables, dense
