"""Gather and scatter of whole rows in plain JAX, for banks of one stream or shared by several."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from sdm_jax._xla_phase1 import batched, in_range


def pack(x: Any) -> Any:
    """A bank or rows as the scatters here take them: bfloat16 as its bits, other dtypes as they are.

    For a scatter of bfloat16 a CPU widens the whole bank and narrows it again; bits it leaves in place. A loop
    that carries a bank should carry it packed: all functions here take either.
    """
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def unpack(x: Any) -> Any:
    """The inverse of `pack`."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def row_dtype(bank: Any) -> jnp.dtype:
    """The dtype of the rows of a bank, packed or not."""
    return jnp.dtype(jnp.bfloat16) if bank.dtype == jnp.uint16 else bank.dtype


def _on_banks(fn: Callable, bank: Any, ids: Any, *rows: Any) -> Any:
    """`fn(bank, ids, *rows)` of every bank. The streams that share one are merged into one list of ids."""
    num_axes = bank.ndim - 2
    lead, shared = ids.shape[:num_axes], ids.shape[num_axes:]
    # Dropped entries point just past the bank, since negative ones would count from its end.
    ids = jnp.where(in_range(ids, bank.shape[-2]), ids, bank.shape[-2])
    merged = (*lead, math.prod(shared))
    merged_rows = (x.reshape(*merged, x.shape[-1]) for x in rows)
    return batched(fn, num_axes)(bank, ids.reshape(merged), *merged_rows)


def gather_rows(bank: Any, ids: Any) -> Any:
    """Rows `ids [*B, ...]` of `bank [*A, S, D]` as `[*B, ..., D]`; an id outside the bank gives zeros."""
    rows = _on_banks(lambda bank, ids: bank.at[ids].get(mode="fill", fill_value=0), bank, ids)
    return unpack(rows).reshape(*ids.shape, bank.shape[-1])


def scatter_rows(bank: Any, ids: Any, rows: Any) -> Any:
    """`bank` with `rows` in place of its rows `ids`, all distinct; an id outside the bank writes nothing."""

    def one(bank, ids, rows):
        return bank.at[ids].set(rows, mode="drop", unique_indices=True)

    moved = _on_banks(one, pack(bank), ids, pack(rows.astype(row_dtype(bank))))
    return moved if bank.dtype == moved.dtype else unpack(moved)


def add_rows(bank: Any, ids: Any, rows: Any) -> Any:
    """`bank` (not packed) with `rows` added to its rows `ids`, all distinct; an id outside it adds nothing."""

    def one(bank, ids, rows):
        return bank.at[ids].add(rows, mode="drop", unique_indices=True)

    return _on_banks(one, bank, ids, rows)
