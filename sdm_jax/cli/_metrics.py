"""Metrics of a run, step by step, in a CSV file or a tensorboard folder."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdm_jax.cli._errors import CommandError

KINDS = ("csv", "tensorboard", "none")
COLUMNS = (
    "step",
    "loss",
    "learning_rate",
    "gradient_norm",
    "tokens_per_second",
    "validation_loss",
    "validation_bits_per_byte",
)


class Metrics:
    """Where the metrics of a run go; a context manager.

    Arguments:
        kind: one of `KINDS`.
        folder: the run's folder, of which this is `metrics.csv`, or the folder `tensorboard`.
        step: the steps done; what an earlier run wrote of later ones is dropped.
    """

    def __init__(self, kind: str, folder: Path, step: int):
        self._file: Any = None
        self._writer: Any = None
        if kind == "csv":
            path = folder / "metrics.csv"
            kept = _rows(path, step) if step else []
            self._file = path.open("w", newline="")
            self._writer = csv.DictWriter(self._file, COLUMNS)
            self._writer.writeheader()
            self._writer.writerows(kept)
        elif kind == "tensorboard":
            try:
                from tensorboardX import SummaryWriter
            except ImportError:
                raise CommandError(
                    "--metrics tensorboard needs tensorboardX: pip install 'sdm_jax[tensorboard]'"
                ) from None
            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()
        elif self._writer is not None:
            self._writer.close()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values of a step, named by `COLUMNS`."""
        if self._file is not None:
            self._writer.writerow({"step": step, **{name: f"{value:.7g}" for name, value in values.items()}})
            self._file.flush()
        elif self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)


def _rows(path: Path, step: int) -> list[dict[str, str]]:
    """The rows of an earlier run up to a step."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = [{name: row.get(name) or "" for name in COLUMNS} for row in csv.DictReader(file)]
    return [row for row in rows if row["step"].isdigit() and int(row["step"]) <= step]
