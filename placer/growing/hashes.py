"""Hashes of keys: the part of a table that has a key, and the digest of a step."""

from typing import Any

import numpy as np

from placer.errors import BackendError
from placer.growing.options import Int


def parts_of(keys: Int, parts: int) -> Int:
    """Return the part of each key, by a hash: the number of the key map that has the key.

    >>> parts_of(np.array([8, 16, 24, -1]), 4)
    array([2, 3, 3, 1])
    """
    found = np.empty(keys.size, np.int64)
    compiled().parts_of(np.ascontiguousarray(keys), found, parts)
    return found


def digest_of(keys: Int) -> int:
    """Return the sum of the hashes of a step's keys, which does not depend on their order."""
    return int(compiled().digest_of(np.ascontiguousarray(keys)))


def compiled() -> Any:
    """Return the compiled kernels; raise BackendError if Numba is not installed."""
    try:
        from placer.growing import kernels
    except ImportError as error:
        raise BackendError(
            "tables that grow need Numba: pip install 'embedding-placer[cpu]'"
        ) from error
    return kernels
