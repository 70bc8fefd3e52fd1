"""Exact product-key top-k: the best `k` slots of a product of small factors (section 6 of the specification).

A slot of a product key is one column of every factor, and its score is the sum of those columns'
scores. The best `k` sums are found without forming the product: the factors are ranked one by one,
and a pair of ranks `(i, j)` can only be among the best `k` if `(i + 1) (j + 1) <= k`, because each
of the pairs below it on both axes is at least as good.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdm_jax._layout import BANK_DTYPES
from sdm_jax.checks import MAX_ENTRIES


def product_key_topk(scores: jax.Array, factors: Sequence[int], k: int) -> tuple[jax.Array, jax.Array]:
    """Selects the `k` slots with the largest sums of factor scores, exactly (section 6 of the specification).

    Slot `(..(c_0 n_1 + c_1)..) n_m + c_m` names column `c_i` of factor `n_i`; its score is the sum of
    the scores of these columns, taken in float32 from the first factor to the last. A bfloat16
    input rounds every partial sum to bfloat16.

    Scores are compared as float32, with -0 below +0 and NaN as -inf. Each factor is ranked by value,
    the larger column first on ties. Of the ranks `i` (of the factors so far) and `j` (of the next
    factor) only pairs with `(i + 1) (j + 1) <= k` take part; equal sums go to the larger `i + j`, then
    to the larger `i`.

    The gradient flows to the columns of the selected slots only, summed in float32 (float64 for
    float64 scores) in ascending order of the slots, and is bitwise reproducible.

    Arguments:
        scores: `[..., sum(factors)]`, float32, bfloat16 or float64: the scores of the columns of the
            first factor, then of the second, and so on.
        factors: the sizes of the factors, one or more; their product is the number of slots.
        k: how many slots to select, `1 <= k <= min(256, number of slots)`.

    Returns:
        `(values, ids)`: the scores of the selected slots, `[..., k]` in the dtype of `scores` (-inf
        where a selected score is NaN), and the slots, `[..., k]` int32 in ascending order. The values of
        float64 scores are summed in float64; their order is that of float32.

    Raises:
        TypeError: `scores` are of another dtype, or `factors` or `k` are not integers.
        ValueError: the factors do not fit the last axis of `scores`, or `k` is out of range.
    """
    scores = jnp.asarray(scores)
    if scores.dtype.name not in BANK_DTYPES:
        raise TypeError(f"scores must be {', '.join(BANK_DTYPES)}, got {scores.dtype.name}")
    factors = check_factors(factors)
    k = check_count("k", k, math.prod(factors))
    if scores.ndim == 0:
        raise ValueError("scores must have at least one axis, got a scalar")
    if scores.shape[-1] != sum(factors):
        raise ValueError(
            f"the last axis of scores has {scores.shape[-1]} columns, but factors {factors} need {sum(factors)}"
        )
    return _topk(scores, factors, k)


def check_factors(factors: Sequence[int], name: str = "factors") -> tuple[int, ...]:
    """The factors as a tuple of Python ints; raises what `product_key_topk` documents, naming them `name`."""
    try:
        checked = tuple(operator.index(n) for n in factors)
    except TypeError:
        raise TypeError(f"{name} must be a sequence of integers, got {factors!r}") from None
    if not checked or min(checked) < 1:
        raise ValueError(f"{name} must be one or more integers of at least 1, got {checked}")
    if math.prod(checked) >= 2**31:
        raise ValueError(f"{name} {checked} have {math.prod(checked)} slots; ids are int32, so at most 2^31 - 1")
    return checked


def check_count(name: str, count: int, num_slots: int) -> int:
    """The number of slots to select as a Python int; raises if it is not in `1..min(256, num_slots)`."""
    try:
        checked = operator.index(count)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {count!r}") from None
    most = min(MAX_ENTRIES, num_slots)
    if not 1 <= checked <= most:
        reason = f"there are {num_slots} slots" if most == num_slots else f"the limit is {MAX_ENTRIES}"
        raise ValueError(
            f"{name} must be in 1..{most} ({reason}), got {checked}"
            f"; the nearest valid value is {min(max(checked, 1), most)}"
        )
    return checked


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _topk(scores, factors, k):
    return _select(scores, factors, k)


def _topk_fwd(scores, factors, k):
    values, ids = _select(scores, factors, k)
    return (values, ids), ids


def _topk_bwd(factors, k, ids, cotangents):
    d_values, _ = cotangents
    # Scatters in XLA's CPU backend run in the order of their updates. Elsewhere they may be atomic
    # additions in any order, so there each column sums its own updates.
    return (
        lax.platform_dependent(
            d_values,
            ids,
            cpu=functools.partial(_scatter_columns, factors=factors),
            default=functools.partial(_sum_columns, factors=factors),
        ),
    )


_topk.defvjp(_topk_fwd, _topk_bwd)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _select(scores, factors, k):
    dtype = scores.dtype
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    parts = jnp.split(scores.astype(jnp.float32), np.cumsum(factors)[:-1], axis=-1)
    best, ids = _rank_columns(parts[0], k)
    for part, n in zip(parts[1:], factors[1:], strict=True):
        next_best, columns = _rank_columns(part, k)
        i, j = _pairs(best.shape[-1], next_best.shape[-1], k)
        sums = _add(best[..., i], next_best[..., j], dtype)
        best, position = _top(sums, min(k, len(i)))
        ids = _take(ids[..., i] * n + columns[..., j], position)
    ids = lax.sort(ids)
    # Summing again from the columns costs less than carrying the values through the sort.
    columns = _columns(ids, factors)
    acc = jnp.float64 if dtype == jnp.float64 else jnp.float32
    values = _take(scores, columns[0]).astype(acc)
    for column in columns[1:]:
        values = _add(values, _take(scores, column).astype(acc), dtype)
    return values.astype(dtype), ids


def _add(a, b, dtype):
    """Sum of partial scores, rounded to the dtype of the scores; inf - inf is a NaN, so -inf."""
    total = a + b
    total = jnp.where(jnp.isnan(total), -jnp.inf, total)
    if dtype == jnp.bfloat16:
        # XLA may drop a pair of conversions as excess precision, but not this.
        total = lax.reduce_precision(total, exponent_bits=8, mantissa_bits=7)
    return total


@functools.cache
def _pairs(num_i: int, num_j: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of ranks that can win, in the order in which they win on equal sums."""
    pairs = [(i, j) for i in range(num_i) for j in range(min(num_j, k // (i + 1)))]
    pairs.sort(key=lambda pair: (pair[0] + pair[1], pair[0]), reverse=True)
    i, j = np.asarray(pairs, np.int32).T
    return i, j


def _rank_columns(part, k):
    """Scores and columns of the best `min(k, n)` of a factor, best first, the larger column first on ties."""
    n = part.shape[-1]
    best, position = _top(part[..., ::-1], min(k, n))
    return best, n - 1 - position


def _top(x, count):
    """`lax.top_k` of float32 without NaN: the first of equals first, -0 below +0, on every platform."""
    return lax.platform_dependent(
        x,
        # The CPU backend has a fast top-k for float32 alone, and it orders zeros by their signs.
        cpu=lambda x: tuple(lax.top_k(x, count)),
        default=functools.partial(_top_by_bits, count=count),
    )


def _top_by_bits(x, count):
    bits = lax.bitcast_convert_type(x, jnp.int32)
    keys = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
    _, position = lax.top_k(keys, count)
    return _take(x, position), position


def _take(x, index):
    return jnp.take_along_axis(x, index, axis=-1, mode="promise_in_bounds")


def _columns(ids, factors):
    """Of every factor, the columns of `scores` that the slots name."""
    columns = []
    end = sum(factors)
    for n in reversed(factors):
        end -= n
        columns.append(ids % n + end)
        ids = ids // n
    return columns[::-1]


def _scatter_columns(d_values, ids, *, factors):
    acc = jnp.promote_types(d_values.dtype, jnp.float32)
    *lead, k = ids.shape
    num_rows = math.prod(lead)
    rows = jnp.arange(num_rows)[:, None]
    updates = d_values.reshape(num_rows, k).astype(acc)
    sums = jnp.zeros((num_rows, sum(factors)), acc)
    for column in _columns(ids.reshape(num_rows, k), factors):
        sums = sums.at[rows, column].add(updates, mode="promise_in_bounds")
    return sums.reshape(*lead, sum(factors)).astype(d_values.dtype)


def _sum_columns(d_values, ids, *, factors):
    acc = jnp.promote_types(d_values.dtype, jnp.float32)
    wide = d_values.astype(acc)[..., :, None]
    sums = []
    start = 0
    for n, column in zip(factors, _columns(ids, factors), strict=True):
        hit = column[..., :, None] == lax.broadcasted_iota(jnp.int32, (*ids.shape, n), ids.ndim) + start
        sums.append(jnp.where(hit, wide, 0).sum(-2))
        start += n
    return jnp.concatenate(sums, axis=-1).astype(d_values.dtype)
