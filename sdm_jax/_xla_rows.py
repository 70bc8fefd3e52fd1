"""Gather and scatter of whole rows in plain JAX, for banks of one stream or shared by several."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from sdm_jax._xla_phase1 import batched, in_range


def _on_banks(fn: Callable, bank: Any, ids: Any, *rows: Any) -> Any:
    """`fn(bank, ids, *rows)` of every bank. The streams that share one are merged into one list of ids."""
    num_axes = bank.ndim - 2
    lead, shared = ids.shape[:num_axes], ids.shape[num_axes:]
    # Dropped entries point just past the bank, since negative ones would count from its end.
    ids = jnp.where(in_range(ids, bank.shape[-2]), ids, bank.shape[-2])
    merged = (*lead, math.prod(shared))
    rows = (x.astype(bank.dtype).reshape(*merged, x.shape[-1]) for x in rows)
    return batched(fn, num_axes)(bank, ids.reshape(merged), *rows)


def gather_rows(bank: Any, ids: Any) -> Any:
    """Rows `ids [*B, ...]` of `bank [*A, S, D]` as `[*B, ..., D]`; an id outside the bank gives zeros."""
    rows = _on_banks(lambda bank, ids: bank.at[ids].get(mode="fill", fill_value=0), bank, ids)
    return rows.reshape(*ids.shape, bank.shape[-1])


def scatter_rows(bank: Any, ids: Any, rows: Any) -> Any:
    """`bank` with `rows` in place of its rows `ids`, all distinct; an id outside the bank writes nothing."""

    def one(bank, ids, rows):
        return bank.at[ids].set(rows, mode="drop", unique_indices=True)

    return _on_banks(one, bank, ids, rows)


def add_rows(bank: Any, ids: Any, rows: Any) -> Any:
    """`bank` with `rows` added to its rows `ids`, all distinct; an id outside the bank writes nothing."""

    def one(bank, ids, rows):
        return bank.at[ids].add(rows, mode="drop", unique_indices=True)

    return _on_banks(one, bank, ids, rows)
