"""Product-key top-k in plain JAX (section 6 of the specification)."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax


def select(scores, *, factors, k, platform):
    """Values and ids of the best `k` slots, as `sdm_jax.product_key_topk` documents."""
    dtype = scores.dtype
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    parts = jnp.split(scores.astype(jnp.float32), np.cumsum(factors)[:-1], axis=-1)
    best, ids = _rank_columns(parts[0], k, platform)
    for part, n in zip(parts[1:], factors[1:], strict=True):
        next_best, columns = _rank_columns(part, k, platform)
        i, j = _pairs(best.shape[-1], next_best.shape[-1], k)
        sums = _add(best[..., i], next_best[..., j], dtype)
        best, position = top(sums, min(k, len(i)), platform)
        ids = _take(ids[..., i] * n + columns[..., j], position)
    ids = lax.sort(ids)
    # Summing again from the columns costs less than carrying the values through the sort.
    columns = _columns(ids, factors)
    acc = jnp.float64 if dtype == jnp.float64 else jnp.float32
    values = _take(scores, columns[0]).astype(acc)
    for column in columns[1:]:
        values = _add(values, _take(scores, column).astype(acc), dtype)
    return [values.astype(dtype), ids]


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


def _rank_columns(part, k, platform):
    """Scores and columns of the best `min(k, n)` of a factor, best first, the larger column first on ties."""
    n = part.shape[-1]
    best, position = top(part[..., ::-1], min(k, n), platform)
    return best, n - 1 - position


def top(x, count, platform):
    """`lax.top_k` of float32 without NaN: the first of equals first, -0 below +0, on every platform."""
    if platform == "cpu":
        # It has a fast top-k for float32 alone, which orders zeros by their signs.
        return lax.top_k(x, count)
    return _top_by_bits(x, count)


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


def select_backward(d_values, ids, *, factors, k, platform):
    """The cotangents of the values, added to the columns of their slots in the order of the slots."""
    del k
    # Scatters in XLA's CPU backend run in the order of their updates. Elsewhere they may be atomic
    # additions in any order, so there each column sums its own updates.
    return [(scatter_columns if platform == "cpu" else sum_columns)(d_values, ids, factors=factors)]


def scatter_columns(d_values, ids, *, factors):
    acc = jnp.promote_types(d_values.dtype, jnp.float32)
    *lead, k = ids.shape
    num_rows = math.prod(lead)
    rows = jnp.arange(num_rows)[:, None]
    updates = d_values.reshape(num_rows, k).astype(acc)
    sums = jnp.zeros((num_rows, sum(factors)), acc)
    for column in _columns(ids.reshape(num_rows, k), factors):
        sums = sums.at[rows, column].add(updates, mode="promise_in_bounds")
    return sums.reshape(*lead, sum(factors)).astype(d_values.dtype)


def sum_columns(d_values, ids, *, factors):
    acc = jnp.promote_types(d_values.dtype, jnp.float32)
    wide = d_values.astype(acc)[..., :, None]
    sums = []
    start = 0
    for n, column in zip(factors, _columns(ids, factors), strict=True):
        hit = column[..., :, None] == lax.broadcasted_iota(jnp.int32, (*ids.shape, n), ids.ndim) + start
        sums.append(jnp.where(hit, wide, 0).sum(-2))
        start += n
    return jnp.concatenate(sums, axis=-1).astype(d_values.dtype)
