"""Flags whose defaults can come from elsewhere, such as a YAML file or the settings of a checkpoint."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sdm_jax.cli._errors import CommandError


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
        self._actions: dict[str, argparse.Action] = {}
        self.defaults: dict[str, Any] = {}

    def group(self, title: str) -> None:
        """Puts the flags that follow under a title."""
        self._group = self._parser.add_argument_group(title)

    def add(self, name: str, default: Any, help: str, **settings: Any) -> None:
        """Adds a flag as `add_argument` does."""
        if default is not None and default is not False:
            help = f"{help} (default: {default!s})"
        action = self._group.add_argument(name, default=argparse.SUPPRESS, help=help, **settings)
        self._actions[action.dest] = action
        self.defaults[action.dest] = default

    def given(self, arguments: argparse.Namespace) -> dict[str, Any]:
        """The flags given on the command line, over those of the YAML file that `--config` names."""
        given = {name: value for name, value in vars(arguments).items() if name in self.defaults}
        return {**(self._read_yaml(given["config"]) if "config" in given else {}), **given}

    def _read_yaml(self, path: str) -> dict[str, Any]:
        import yaml

        try:
            content = yaml.safe_load(Path(path).read_text())
        except OSError as error:
            raise CommandError(f"--config {path}: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise CommandError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(content, dict | None):
            raise CommandError(f"--config {path} must map the names of flags to values")
        values = {}
        for key, value in (content or {}).items():
            name = str(key).replace("-", "_")
            if name not in self._actions or name == "config":
                raise CommandError(f"--config {path}: there is no flag --{str(key).replace('_', '-')}")
            try:
                values[name] = self._convert(self._actions[name], value)
            except (ValueError, argparse.ArgumentTypeError) as error:
                raise CommandError(f"--config {path}: {key}: {error}") from None
        return values

    def _convert(self, action: argparse.Action, value: Any) -> Any:
        """A value of a YAML file as the command line would have given it."""
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise ValueError(f"must be true or false, got {value!r}")
            return value
        if value is None:
            return self.defaults[action.dest]
        if isinstance(value, list):
            value = ",".join(map(str, value))
        if isinstance(value, dict | bool):
            raise ValueError(f"must be a value or a list, got {value!r}")
        convert: Any = action.type or str
        value = convert(str(value))
        if action.choices is not None and value not in action.choices:
            raise ValueError(f"must be one of {', '.join(map(repr, action.choices))}, got {value!r}")
        return value


def positive_integer(text: str) -> int:
    """An integer of at least 1."""
    return _integer(text, 1)


def natural(text: str) -> int:
    """An integer of at least 0."""
    return _integer(text, 0)


def seed(text: str) -> int:
    """An integer that fits an int32, of at least 0."""
    value = natural(text)
    if value > 2**31 - 1:
        raise argparse.ArgumentTypeError(f"must be below 2^31, got {text}")
    return value


def integers(text: str) -> list[int]:
    """Integers of at least 1 with commas between them."""
    try:
        return [positive_integer(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"must be integers of at least 1 with commas between them, got {text!r}"
        ) from None


def path(text: str) -> str:
    """A path."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def number(text: str) -> float:
    """A finite number."""
    return _finite(text)


def positive(text: str) -> float:
    """A finite number above 0."""
    return _finite(text, " above 0", lambda value: value > 0)


def nonnegative(text: str) -> float:
    """A finite number of at least 0."""
    return _finite(text, " of at least 0", lambda value: value >= 0)


def _integer(text: str, low: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if value < low:
        raise argparse.ArgumentTypeError(f"must be an integer of at least {low}, got {text!r}")
    return value


def _finite(text: str, which: str = "", fits: Callable[[float], bool] = lambda value: True) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and fits(value)):
        raise argparse.ArgumentTypeError(f"must be a finite number{which}, got {text!r}")
    return value
