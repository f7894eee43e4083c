"""Generate a click log in Criteo's format, for demos and tests.

The log is GENERATED: nobody clicked any of it. It resembles the Criteo Display Advertising log in
what matters for placement: the same 13 integer and 26 categorical columns, the published
cardinalities (scaled down), and each column's skew and share of missing values. It differs in two
ways: columns are independent (but some are missing together), and popularity does not drift.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from placer.data.vocabulary import mixed_bits
from placer.errors import DataError
from placer.files.atomic import replacing
from placer.profile.cdf import ZipfMandelbrot

SyntheticFormat = Literal["criteo", "parquet"]


@dataclass(frozen=True, slots=True)
class CategoricalColumn:
    """A categorical column of the Criteo log."""

    rows: int  # Distinct values in the full log.
    # Parameters of the Zipf–Mandelbrot law of its values.
    exponent: float
    shift: float
    group: str  # Columns of one group are missing in the same samples.


@dataclass(frozen=True, slots=True)
class IntegerColumn:
    """An integer column: floor(exp(Normal(log_mean, log_sigma)) − 1), at least 0."""

    missing: float
    log_mean: float
    log_sigma: float


# By group, the share of samples without its columns, in the sample named below.
MISSING_SHARE: Mapping[str, float] = {
    "always": 0.0, "C3": 0.0357, "C6": 0.1332, "C19": 0.4496, "C22": 0.8182,
}  # fmt: skip

# Cardinalities: as published for the Criteo Kaggle log (DLRM, arXiv:1906.00091, and its
# repository's preprocessing). Exponents and shifts: `fit_zipf_to_sample` (in tests) with
# these cardinalities on the first 10,000 lines of that log; tests/test_synthetic_log_real.py
# fits them again. The beginning of a log shows too few distinct values, but the right skew.
CATEGORICAL: Mapping[str, CategoricalColumn] = {
    "C1": CategoricalColumn(1460, 2.060, 0.5, "always"),
    "C2": CategoricalColumn(583, 1.430, 4.0, "always"),
    "C3": CategoricalColumn(10131227, 1.029, 0.5, "C3"),
    "C4": CategoricalColumn(2202608, 1.082, 0.5, "C3"),
    "C5": CategoricalColumn(305, 2.685, 0.5, "always"),
    "C6": CategoricalColumn(24, 4.923, 4.0, "C6"),
    "C7": CategoricalColumn(12517, 1.239, 64.0, "always"),
    "C8": CategoricalColumn(633, 2.379, 0.5, "always"),
    "C9": CategoricalColumn(3, 4.446, 0.5, "always"),
    "C10": CategoricalColumn(93145, 1.075, 0.0, "always"),
    "C11": CategoricalColumn(5683, 1.256, 32.0, "always"),
    "C12": CategoricalColumn(8351593, 1.036, 0.5, "C3"),
    "C13": CategoricalColumn(3194, 1.278, 32.0, "always"),
    "C14": CategoricalColumn(27, 4.081, 4.0, "always"),
    "C15": CategoricalColumn(14992, 1.584, 64.0, "always"),
    "C16": CategoricalColumn(5461306, 1.089, 2.0, "C3"),
    "C17": CategoricalColumn(10, 1.215, 0.0, "always"),
    "C18": CategoricalColumn(5652, 1.492, 16.0, "always"),
    "C19": CategoricalColumn(2173, 1.542, 0.0, "C19"),
    "C20": CategoricalColumn(4, 1.269, 1.0, "C19"),
    "C21": CategoricalColumn(7046547, 1.058, 1.0, "C3"),
    "C22": CategoricalColumn(18, 5.805, 4.0, "C22"),
    "C23": CategoricalColumn(15, 2.750, 2.0, "always"),
    "C24": CategoricalColumn(286181, 1.197, 1.0, "C3"),
    "C25": CategoricalColumn(105, 2.989, 4.0, "C19"),
    "C26": CategoricalColumn(142572, 1.143, 2.0, "C19"),
}

# Missing share, and mean and deviation of log(1 + x), in the same lines.
INTEGER: Mapping[str, IntegerColumn] = {
    "I1": IntegerColumn(0.448, 0.80, 0.98),
    "I2": IntegerColumn(0.000, 2.12, 2.13),
    "I3": IntegerColumn(0.204, 2.25, 1.28),
    "I4": IntegerColumn(0.198, 1.73, 0.96),
    "I5": IntegerColumn(0.049, 7.24, 2.90),
    "I6": IntegerColumn(0.251, 3.58, 1.81),
    "I7": IntegerColumn(0.049, 1.54, 1.36),
    "I8": IntegerColumn(0.001, 2.06, 1.18),
    "I9": IntegerColumn(0.049, 3.61, 1.69),
    "I10": IntegerColumn(0.448, 0.38, 0.39),
    "I11": IntegerColumn(0.049, 0.85, 0.74),
    "I12": IntegerColumn(0.773, 0.30, 0.61),
    "I13": IntegerColumn(0.198, 1.88, 1.06),
}

# Deviation of each column's effect on the logit. Together they give about 1.6. Then the true
# probabilities have an AUC of 0.83, which a trained model approaches from below.
_ROW_EFFECT = 0.35
_INTEGER_EFFECTS: Mapping[str, float] = {"I1": 0.25, "I5": -0.30, "I7": 0.25, "I11": 0.20}
_CLICK_SHARE = 0.22  # As in the sample.

_CHUNK_SAMPLES = 65536
_SMALL_ROWS = 1000
_LARGEST_INTEGER = 2**31 - 1


def scaled_rows(scale: float) -> dict[str, int]:
    """Return the rows of each categorical column, scaled from the published cardinalities.

    Columns of up to 1,000 rows keep their rows, and no other column gets fewer than 1,000, because
    real models have many small tables.

    Raises DataError if the scale is not above 0 and at most 1.
    """
    if not 0 < scale <= 1:
        raise DataError(f"scale {scale} must be above 0 and at most 1 (the published size)")
    return {
        name: min(column.rows, max(_SMALL_ROWS, round(column.rows * scale)))
        for name, column in CATEGORICAL.items()
    }


def write_synthetic_log(
    path: str | os.PathLike[str],
    *,
    samples: int,
    scale: float = 0.01,
    seed: int = 0,
    format: SyntheticFormat = "criteo",
    on_samples: Callable[[int], None] | None = None,
) -> None:
    """Generate a click log. The same arguments give the same log.

    Each value of a categorical column shifts the log-odds of a click by its own amount, and four
    integer columns shift them by their logarithm. The label is drawn with the resulting
    probability.

    Raises DataError if `samples` is less than 1, the scale is out of range, or the format is
    unknown. Raises PlacerError if the file cannot be written. Nothing is left of it.

    Parameters
    ----------
    samples : int
        Number of samples: lines of text, or rows of Parquet.
    scale : float
        Share of the published cardinalities; see `scaled_rows`.
    format : {"criteo", "parquet"}
        Tab-separated text as Criteo published it (label, 13 integers, 26 hashed categories of
        8 hexadecimal digits; missing values are empty), or the same columns in Parquet.
    on_samples : callable, optional
        Called with the number of samples written so far.
    """
    rows = scaled_rows(scale)
    if samples < 1:
        raise DataError(f"cannot generate a log of {samples} samples; ask for at least 1")
    if format not in get_args(SyntheticFormat):
        raise DataError(f"format {format!r} is none of {', '.join(get_args(SyntheticFormat))}")
    generator = _Generator(rows, seed)
    written = 0
    with replacing(path) as temporary, _writer(temporary, generator.schema, format) as writer:
        for table in generator.tables(samples):
            writer.write_table(table)
            written += table.num_rows
            if on_samples is not None:
                on_samples(written)


class _Generator:
    def __init__(self, rows: Mapping[str, int], seed: int) -> None:
        self._laws = {
            name: ZipfMandelbrot(rows[name], column.exponent, column.shift)
            for name, column in CATEGORICAL.items()
        }
        self._seed, self._bias = seed, 0.0
        _, logits = self._draw(np.random.default_rng([seed, 0]), _CHUNK_SAMPLES // 4)
        low, high = -20.0, 20.0
        for _ in range(50):  # Find the bias that gives the share of clicks of the real log.
            self._bias = (low + high) / 2
            if np.mean(1 / (1 + np.exp(-(logits + self._bias)))) > _CLICK_SHARE:
                high = self._bias
            else:
                low = self._bias
        self._bias = (low + high) / 2

    @property
    def schema(self) -> pa.Schema:
        return pa.schema(
            [
                ("label", pa.int8()),
                *((name, pa.int32()) for name in INTEGER),
                *((name, pa.string()) for name in CATEGORICAL),
            ]
        )

    def tables(self, samples: int) -> Iterator[pa.Table]:
        """Yield chunks of the log as Arrow tables."""
        for index, start in enumerate(range(0, samples, _CHUNK_SAMPLES)):
            # Each chunk has its own random stream. Stream 0 is for fitting the bias.
            rng = np.random.default_rng([self._seed, index + 1])
            columns, logits = self._draw(rng, min(_CHUNK_SAMPLES, samples - start))
            labels = rng.random(logits.size) < 1 / (1 + np.exp(-logits))
            columns["label"] = pa.array(labels.astype(np.int8))
            yield pa.table([columns[name] for name in self.schema.names], schema=self.schema)

    def _draw(
        self, rng: np.random.Generator, samples: int
    ) -> tuple[dict[str, pa.Array], npt.NDArray[np.float64]]:
        columns: dict[str, pa.Array] = {}
        logits = np.full(samples, self._bias)
        for name, integer in INTEGER.items():
            logs = rng.normal(integer.log_mean, integer.log_sigma, samples)
            values = np.floor(np.expm1(np.maximum(logs, 0.0)))
            missing = rng.random(samples) < integer.missing
            values = np.minimum(values, _LARGEST_INTEGER).astype(np.int32)
            columns[name] = pa.array(values, mask=missing)
            if name in _INTEGER_EFFECTS:
                standard = (np.log1p(values) - integer.log_mean) / integer.log_sigma
                logits += np.where(missing, 0.0, _INTEGER_EFFECTS[name] * standard)
        absent = {group: rng.random(samples) < share for group, share in MISSING_SHARE.items()}
        for position, (name, column) in enumerate(CATEGORICAL.items()):
            ranks = self._laws[name].draw(rng, samples)
            missing = absent[column.group]
            columns[name] = _hashed_ids(ranks, position, missing)
            effects = _ROW_EFFECT * _row_effects(ranks, position, self._seed)
            logits += np.where(missing, 0.0, effects)
        return columns, logits


def _hashed_ids(
    ranks: npt.NDArray[np.int64], position: int, missing: npt.NDArray[np.bool_]
) -> pa.Array:
    """Return ranks as categories of 8 hexadecimal digits, null where missing.

    MurmurHash3's 32-bit finalizer is a bijection. So distinct ranks of a column stay distinct, and
    hot ranks are spread over all ids.
    """
    bits = ranks.astype(np.uint32) + np.uint32((position + 1) * 0x9E3779B9 & 0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
    bits ^= bits >> np.uint32(16)
    digits = bits.astype(">u4").tobytes().hex().encode()
    offsets = np.arange(0, 8 * ranks.size + 1, 8, dtype=np.int32)
    validity = np.packbits(~missing, bitorder="little")
    return pa.StringArray.from_buffers(
        ranks.size, pa.py_buffer(offsets), pa.py_buffer(digits), pa.py_buffer(validity)
    )


def _row_effects(ranks: npt.NDArray[np.int64], position: int, seed: int) -> npt.NDArray[np.float64]:
    """Return each row's effect on the logit, by seed, column and rank: mean 0, variance 1."""
    salt = np.random.SeedSequence([seed, position]).generate_state(1, np.uint64)[0]
    bits = (ranks.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ salt
    uniform = (mixed_bits(bits) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.asarray((uniform - 0.5) * np.sqrt(12.0))


def _writer(path: Path, schema: pa.Schema, format: SyntheticFormat) -> Any:
    if format == "parquet":
        return pa.parquet.ParquetWriter(path, schema, compression="zstd")
    options = pa.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    return pa.csv.CSVWriter(path, schema, write_options=options)
