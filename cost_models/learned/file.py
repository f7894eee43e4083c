"""Files of learned cost models: the networks' parameters, and the calibration they start from.

safetensors: parameters by name, and under the key ``placer`` of the header's metadata a JSON
object with everything else. Nothing in such a file is ever run.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import load, save

from cost_models.calibrated.calibration import Calibration
from cost_models.learned.features import FREE_FEATURES, MONOTONE_FEATURES
from cost_models.learned.network import NOT_NEGATIVE, Networks, shapes
from cost_models.learned.parts import PARTS
from placer.errors import PlacerError
from placer.files import replacing, sha256_json
from placer.read_files import read_limited

FORMAT = "placer-learned-cost-model"
VERSION = 2

_KEY = "placer"
_MOST_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, eq=False)
class LearnedFile:
    """All that a learned cost model is made of.

    Attributes
    ----------
    networks : Networks
    calibration : Calibration
        Unit costs before factors.
    residual, relative_error : float
        Root mean square of log(predicted / measured), and mean relative error, of step times of
        workloads that were held out of training.
    facts : dict
        Where it comes from: setting and machine of the data set, measurements, errors.
    """

    networks: Networks
    calibration: Calibration
    residual: float
    relative_error: float
    facts: dict[str, Any] = field(default_factory=dict)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, atomically.

        Raises
        ------
        PlacerError
            If that fails.
        """
        about = self._about() | {"sha256": self.identity()}
        content = save(self.networks.arrays, metadata={_KEY: json.dumps(about)})
        with replacing(path) as temporary:
            temporary.write_bytes(content)

    def identity(self) -> str:
        """The hash of parameters and all else, as the file has it."""
        return _sha256(self.networks.arrays, self._about())

    def _about(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "features": [*FREE_FEATURES, *MONOTONE_FEATURES],
            "parts": PARTS,
            "residual": self.residual,
            "relative_error": self.relative_error,
            "facts": self.facts,
            "calibration": self.calibration.to_json(),
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "LearnedFile":
        """Read what `save` wrote.

        Raises
        ------
        PlacerError
            If the file is missing, damaged, something else, or made for other features than
            this version of placer has.
        """
        try:
            content = read_limited(Path(path), _MOST_BYTES)
            arrays = load(content)
            about = json.loads(_metadata(content)[_KEY])
            kind, version = about["format"], about["version"]
        except OSError as error:
            raise PlacerError(
                f"cannot read the learned cost model {path}: {error.strerror or error}"
            ) from error
        except (
            safetensors.SafetensorError,
            KeyError,
            TypeError,
            ValueError,
            RecursionError,
        ) as error:
            raise PlacerError(
                f"{path} is no learned cost model, or damaged ({error!r}); "
                "`placer calibrate --learn` writes them"
            ) from error
        if (kind, version) != (FORMAT, VERSION):
            raise PlacerError(
                f"{path} is {kind!r} of version {version}; this placer reads {FORMAT!r} of "
                f"version {VERSION}: train it again by `placer calibrate --learn-only DATASET`"
            )
        names = [*FREE_FEATURES, *MONOTONE_FEATURES]
        if about.get("features") != names or about.get("parts") != list(PARTS):
            raise PlacerError(
                f"{path} was trained on other features than this placer has; train it again by "
                "`placer calibrate --learn-only DATASET`"
            )
        try:
            made = cls(
                _networks(arrays, path),
                Calibration.from_json(about["calibration"], path),
                float(about["residual"]),
                float(about["relative_error"]),
                dict(about["facts"]),
            )
            if not (math.isfinite(made.residual) and math.isfinite(made.relative_error)):
                raise ValueError("its errors are no numbers")
        except (KeyError, TypeError, ValueError) as error:
            raise PlacerError(f"{path} is damaged: {error!r}; train it again") from error
        if about.get("sha256", "") not in ("", _sha256(arrays, about)):
            raise PlacerError(
                f"{path} was altered since it was written: restore it, or train it again by "
                "`placer calibrate --learn-only DATASET`"
            )
        return made


def _sha256(arrays: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """Hash of the parameters, by name, and of all else that is said of them."""
    parameters = {
        name: [str(array.dtype), list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]
        for name, array in arrays.items()
    }
    return sha256_json([parameters, {key: about[key] for key in about if key != "sha256"}])


def _metadata(content: bytes) -> dict[str, str]:
    """The metadata of a safetensors header that was read without complaint."""
    size = int.from_bytes(content[:8], "little")
    metadata: dict[str, str] = json.loads(content[8 : 8 + size])["__metadata__"]
    return metadata


def _networks(arrays: dict[str, Any], path: str | os.PathLike[str]) -> Networks:
    members = len(arrays["level"])
    for name, shape in shapes(members, len(PARTS)).items():
        array = arrays.get(name)
        if array is None or array.shape != shape or array.dtype != np.float32:
            actual = "missing" if array is None else f"{array.dtype} of shape {array.shape}"
            raise PlacerError(f"{path}: {name} is {actual}, not float32 of shape {shape}")
        if not np.isfinite(array).all() or (name in NOT_NEGATIVE and (array < 0).any()):
            raise PlacerError(f"{path} is damaged: {name} has values that no network has")
    if not (arrays["scale"] > 0).all():
        raise PlacerError(f"{path} is damaged: the scales of features must be positive")
    return Networks(**{name: arrays[name] for name in shapes(members, len(PARTS))})
