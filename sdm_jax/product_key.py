"""Exact product-key top-k: the best `k` slots of a product of small factors (section 6 of the specification).

A slot of a product key is one column of every factor, and its score is the sum of those columns'
scores. The best `k` sums are found without forming the product: the factors are ranked one by one,
and a pair of ranks `(i, j)` can only be among the best `k` if `(i + 1) (j + 1) <= k`, because each
of the pairs below it on both axes is at least as good.

The selection is a custom call on the CPU (ffi/cpu/product_key.h) and plain JAX elsewhere
(_xla_product_key.py), with the same bits.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sdm_jax import _calls
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


def _integer(value) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def check_factors(factors: Sequence[int], name: str = "factors") -> tuple[int, ...]:
    """The factors as a tuple of Python ints; raises what `product_key_topk` documents, naming them `name`."""
    try:
        checked = tuple(_integer(n) for n in factors)
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
        checked = _integer(count)
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
    return tuple(_calls.product_key_topk(scores, factors=factors, k=k))


def _topk_fwd(scores, factors, k):
    values, ids = _topk(scores, factors, k)
    return (values, ids), ids


def _topk_bwd(factors, k, ids, cotangents):
    d_values, _ = cotangents
    return tuple(_calls.product_key_topk_backward(d_values, ids, factors=factors, k=k))


_topk.defvjp(_topk_fwd, _topk_bwd)
