"""Checks of a module's settings: an error names the field, what it got, and the nearest valid value."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as a Python int in `low..high`.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is out of range.
    """
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if number < low or (high is not None and number > high):
        needed = f"at least {low}" if high is None else f"in {low}..{high}"
        nearest = low if number < low else high
        raise ValueError(f"{name} must be {needed}, got {number}; the nearest valid value is {nearest}")
    return number


def divisor(name: str, value: Any, total_name: str, total: int) -> int:
    """`value` as a divisor of `total`; raises as `integer` does."""
    number = integer(name, value, 1, total)
    if total % number:
        nearest = min((n for n in range(1, total + 1) if total % n == 0), key=lambda n: abs(n - number))
        raise ValueError(
            f"{name} must divide {total_name} ({total}), got {number}; the nearest valid value is {nearest}"
        )
    return number


def choice(name: str, value: Any, choices: Iterable[Any]) -> Any:
    """`value` if it is among the choices; a ValueError that suggests the closest name otherwise."""
    choices = tuple(choices)
    if value not in choices:
        close = difflib.get_close_matches(str(value), [str(c) for c in choices], n=1, cutoff=0.0)
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}"
            f"; the nearest valid value is {close[0]!r}"
        )
    return value


def float_dtype(name: str, value: Any, names: Iterable[str]) -> jnp.dtype:
    """`value` as a dtype among `names`; a TypeError otherwise."""
    names = tuple(names)
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in names:
        got = repr(value) if dtype is None else dtype.name
        raise TypeError(f"{name} must be {', '.join(names)}, got {got}; the nearest valid value is {names[0]}")
    return dtype


def number(name: str, value: Any) -> float:
    """`value` as a finite Python float.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not finite.
    """
    if isinstance(value, (bool, str)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        result = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {value!r}") from None
    if not math.isfinite(result):
        raise ValueError(f"{name} must be finite, got {value!r}; the nearest valid value is 1.0")
    return result


def flag(name: str, value: Any) -> bool:
    """`value` if it is a bool; a TypeError otherwise."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}; the nearest valid value is {bool(value)}")
    return value
