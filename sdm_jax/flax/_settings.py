"""Checks of a module's settings: an error names the field, what it got, and the nearest valid value."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sdm_jax.checks import is_array


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as a Python int in `low..high`.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is out of range.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        hint = ""
        if isinstance(value, float) and math.isfinite(value):
            within = max(low, round(value))
            hint = f"; the nearest valid value is {within if high is None else min(within, high)}"
        raise TypeError(f"{name} must be an integer, got {value!r}{hint}") from None
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


def square(name: str, value: Any, high: int) -> int:
    """The root of `value`, which must be a square number of at most `high`; raises as `integer` does."""
    number = integer(name, value, 1, high)
    root = math.isqrt(number)
    if root * root != number:
        nearest = min((n * n for n in (root, root + 1) if n * n <= high), key=lambda n: abs(n - number))
        raise ValueError(f"{name} must be a square number, got {number}; the nearest valid value is {nearest}")
    return root


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
        dtype = None if value is None else jnp.dtype(value)  # jnp.dtype(None) is float64
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in names:
        got = repr(value) if dtype is None else dtype.name
        raise TypeError(f"{name} must be {', '.join(names)}, got {got}; the nearest valid value is {names[0]}")
    if dtype == jnp.float64 and not jax.config.read("jax_enable_x64"):
        raise ValueError(f"{name} float64 needs jax_enable_x64; the nearest valid value is float32")
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
    """`value`, a bool of Python or NumPy, as a bool of Python; a TypeError otherwise."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def initializer(name: str, value: Any) -> Any:
    """`value` if it can be called; a TypeError otherwise."""
    if not callable(value):
        raise TypeError(f"{name} must be a function of (key, shape, dtype) that gives an array, got {value!r}")
    return value


def initialized(name: str, variable: nnx.Variable, shape: tuple[int, ...]) -> None:
    """Checks that the initializer `name` has given a parameter its shape; a ValueError otherwise."""
    got = getattr(variable.get_value(), "shape", None)
    if got != shape:
        raise ValueError(f"{name} must give an array of the shape asked for, {shape}, got shape {got}")


def metadata(name: str, value: Any) -> dict[str, Any]:
    """`value`, None or a mapping from names, as a dict; a TypeError otherwise."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"{name} must be a mapping from names to values, got {value!r}")
    return dict(value)


def random_streams(name: str, value: Any) -> nnx.Rngs:
    """`value` if it is `nnx.Rngs` with a stream for parameters.

    Raises:
        TypeError: it is something else.
        ValueError: it has no such stream.
    """
    if not isinstance(value, nnx.Rngs):
        raise TypeError(f"{name} must be flax.nnx.Rngs, such as nnx.Rngs(0), got {value!r}")
    if "params" not in value and "default" not in value:
        raise ValueError(f"{name} must have a stream params, such as nnx.Rngs(0) or nnx.Rngs(params=0), got {value!r}")
    return value


def known_tokens(name: str, value: Any, vocab_size: int) -> None:
    """Checks that all of a concrete array of integers are in `0..vocab_size - 1`; a ValueError otherwise."""
    if not value.size:
        return
    low, high = int(value.min()), int(value.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{name} has ids of {low}..{high}, but the model knows those below {vocab_size}")


def features(name: str, value: Any, dim: int) -> None:
    """Checks that a call's argument is `[batch, tokens, dim]` of a floating-point dtype.

    Raises:
        TypeError: it is no array, or of another kind of dtype.
        ValueError: it has another shape.
    """
    if not is_array(value):
        raise TypeError(f"{name} must be an array [batch, tokens, {dim}], got {type(value).__name__}")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"{name} must have a floating-point dtype, got {value.dtype}")
    if value.ndim != 3 or value.shape[-1] != dim:
        raise ValueError(f"{name} must be [batch, tokens, {dim}], got shape {value.shape}")
