"""Metrics of a run, step by step, in a CSV file or a tensorboard folder."""

from __future__ import annotations

import csv
import importlib.util
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

    Nothing is written before the first `write`.

    Raises:
        CommandError: the kind is not installed, or what an earlier run wrote cannot be read.
    """

    def __init__(self, kind: str, folder: Path, step: int):
        self._kind, self._folder, self._step = kind, folder, step
        self._file: Any = None
        self._writer: Any = None
        if kind == "csv":
            self._kept = _rows(folder / "metrics.csv", step) if step else []
        elif kind == "tensorboard" and importlib.util.find_spec("tensorboardX") is None:
            raise CommandError("--metrics tensorboard needs tensorboardX: pip install 'sdm_jax[tensorboard]'")

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()
        elif self._writer is not None:
            self._writer.close()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values of a step, named by `COLUMNS`."""
        if self._writer is None:
            self._open()
        if self._file is not None:
            self._writer.writerow({"step": step, **{name: f"{value:.7g}" for name, value in values.items()}})
            self._file.flush()
        elif self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def _open(self) -> None:
        if self._kind == "csv":
            path = self._folder / "metrics.csv"
            try:
                self._file = path.open("w", newline="")
            except OSError as error:
                raise CommandError(f"{path}: {error.strerror}") from None
            self._writer = csv.DictWriter(self._file, COLUMNS)
            self._writer.writeheader()
            self._writer.writerows(self._kept)
        elif self._kind == "tensorboard":
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(self._folder / "tensorboard"), purge_step=self._step + 1)


def _rows(path: Path, step: int) -> list[dict[str, str]]:
    """The rows of an earlier run up to a step."""
    if not path.exists():
        return []
    try:
        with path.open(newline="") as file:
            rows = [{name: row.get(name) or "" for name in COLUMNS} for row in csv.DictReader(file)]
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise CommandError(f"{path} is not a CSV file ({error}): move it away, or give --metrics none") from None
    return [row for row in rows if row["step"].isdigit() and int(row["step"]) <= step]
