"""Flags whose defaults can come from elsewhere, such as the settings of a checkpoint."""

from __future__ import annotations

import argparse
import math
from typing import Any


class Flags:
    """Adds flags to a parser and keeps their defaults apart.

    What is parsed holds the given flags alone, so that a flag given at its default's value can be told from
    one not given.

    Attributes:
        defaults: the default of every flag, by its name in the parsed arguments.
    """

    def __init__(self, parser: argparse.ArgumentParser):
        self._parser = parser
        self._group: Any = parser
        self.defaults: dict[str, Any] = {}

    def group(self, title: str) -> None:
        """Puts the flags that follow under a title."""
        self._group = self._parser.add_argument_group(title)

    def add(self, name: str, default: Any, help: str, **settings: Any) -> None:
        """Adds a flag as `add_argument` does."""
        if default is not None and default is not False:
            help = f"{help} (default: {default!s})"
        action = self._group.add_argument(name, default=argparse.SUPPRESS, help=help, **settings)
        self.defaults[action.dest] = default


def positive_integer(text: str) -> int:
    """An integer of at least 1."""
    return _bounded(int(text), 1)


def natural(text: str) -> int:
    """An integer of at least 0."""
    return _bounded(int(text), 0)


def seed(text: str) -> int:
    """An integer that fits an int32, of at least 0."""
    if int(text) > 2**31 - 1:
        raise argparse.ArgumentTypeError(f"must be below 2^31, got {text}")
    return natural(text)


def positive(text: str) -> float:
    """A finite number above 0."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text}")
    return float(text)


def nonnegative(text: str) -> float:
    """A finite number of at least 0."""
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number of at least 0, got {text}")
    return float(text)


def _bounded(value: int, low: int) -> int:
    if value < low:
        raise argparse.ArgumentTypeError(f"must be at least {low}, got {value}")
    return value
