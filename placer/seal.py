"""Hashes that plans, profiles, manifests and calibrations carry, so that changes show.

The hash is of the JSON of all other keys, written by `json.dumps` with sorted keys and no other
option. A plan or calibration without one was written by hand or by an earlier version, and is
read as it is.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from placer.errors import PlanError
from placer.files import sha256_json

SEAL = "sha256"


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Add the hash of its content to a document, as its last key.

    >>> sealed({"schema_version": 1})["sha256"][:8]
    '04212149'
    """
    content = {name: value for name, value in document.items() if name != SEAL}
    return content | {SEAL: sha256_json(content)}


def check_seal(document: Mapping[str, Any], source: Path) -> None:
    """Check that a plan was not altered since it was written."""
    if document.get(SEAL) and document[SEAL] != sealed(document)[SEAL]:
        raise PlanError(
            f"{source} was altered since it was written: restore it; if you edited it by hand, "
            "`placer verify --seal` takes it as it is now"
        )
