"""The recurrence of section 1 of the specification, one token after another: the oracle of the tests.

Nothing here is hand-differentiated: gradients come from JAX's own automatic differentiation of the token
loop, so that agreement with it says something about the formulas of the other implementations.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sdm_jax._layout import accumulate_dtype


class _Tokens(NamedTuple):
    """Per-token inputs of the streams of one bank, `n` streams side by side."""

    k_idx: Any  # [..., n, W]
    k_val: Any
    v: Any  # [..., n, D]
    beta: Any  # [..., n, 1]
    g: Any  # [..., n, 1 or W]
    q_idx: Any  # [..., n, R]
    q_val: Any


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _round_to(x: Any, dtype: Any, acc: Any) -> Any:
    """`x` rounded to `dtype`, as `acc`; its derivative passes straight through, unrounded."""
    # A pair of casts would not do: XLA may remove it as excess precision.
    target = jnp.finfo(dtype)
    return lax.reduce_precision(x, target.nexp, target.nmant).astype(acc)


@_round_to.defjvp
def _round_to_jvp(dtype, acc, primals, tangents):
    return _round_to(*primals, dtype, acc), tangents[0].astype(acc)


def _exp(gate: Any) -> Any:
    """exp, with an exactly zero derivative at -inf whatever the cotangent is."""
    erase = gate == -jnp.inf
    return jnp.where(erase, 0, jnp.exp(jnp.where(erase, 0, gate)))


def _token(bank: Any, token: _Tokens) -> tuple[Any, Any]:
    """One token of the `n` streams that share `bank [S, D]`; returns the bank and the readings `[n, D]`."""
    num_slots = bank.shape[0]
    num_writes = token.k_idx.shape[-1]
    # Dropped entries point just past the bank, where gathers give zero and scatters write nothing.
    # Masking both before and after a product keeps NaN out of the values and of the derivatives.
    valid = (token.k_idx >= 0) & (token.k_idx < num_slots)
    ids = jnp.where(valid, token.k_idx, num_slots)
    weights = jnp.where(valid, token.k_val, 0)
    writes = valid.any(axis=-1, keepdims=True)
    v = jnp.where(writes, token.v, 0)
    beta = jnp.where(writes, token.beta, 0)

    # Entries of one slot act as one: its row decays by the gate of the first, by their summed weight it
    # is read and written.
    same = (ids[:, :, None] == ids[:, None, :]) & valid[:, :, None]
    earlier = jnp.tril(jnp.ones((num_writes, num_writes), bool), -1)
    first = valid & ~(same & earlier[None]).any(axis=-1)
    gate = jnp.where(first, jnp.broadcast_to(token.g, ids.shape), 0)
    weight = jnp.where(first, jnp.where(same, weights[:, None, :], 0).sum(axis=-1), 0)

    rows = bank.at[ids].get(mode="fill", fill_value=0) * _exp(gate)[:, :, None]
    retrieved = (weight[:, :, None] * rows).sum(axis=1)
    delta = beta * (v - retrieved)
    rows = rows + weight[:, :, None] * delta[:, None, :]
    target = jnp.where(first, ids, num_slots + jnp.arange(ids.size, dtype=ids.dtype).reshape(ids.shape))
    bank = bank.at[target].set(rows, mode="drop", unique_indices=True)

    valid = (token.q_idx >= 0) & (token.q_idx < num_slots)
    rows = bank.at[jnp.where(valid, token.q_idx, num_slots)].get(mode="fill", fill_value=0)
    return bank, (jnp.where(valid, token.q_val, 0)[:, :, None] * rows).sum(axis=1)


def _one_bank(bank: Any, tokens: _Tokens, chunk_size: int, bank_dtype: Any) -> tuple[Any, Any]:
    """All tokens of the streams of one bank, `bank [S, D]` and `tokens [n, T, ...]`, in the accumulation dtype."""
    num_streams, num_tokens, _ = tokens.k_idx.shape
    num_chunks = -(-num_tokens // chunk_size)

    def split(x, fill):  # [n, T, ...] -> [chunks, chunk_size, n, ...]; padding tokens touch nothing
        padding = ((0, 0), (0, num_chunks * chunk_size - num_tokens), (0, 0))
        x = jnp.pad(x, padding, constant_values=fill)
        return jnp.moveaxis(x, 0, 1).reshape(num_chunks, chunk_size, num_streams, x.shape[-1])

    def chunk(bank, tokens):
        bank, y = lax.scan(_token, bank, tokens)
        return _round_to(bank, bank_dtype, bank.dtype), y

    fills = _Tokens(k_idx=-1, k_val=0, v=0, beta=0, g=0, q_idx=-1, q_val=0)
    bank, y = lax.scan(chunk, bank, jax.tree.map(split, tokens, fills))
    y = y.reshape(num_chunks * chunk_size, num_streams, bank.shape[-1])
    return bank, jnp.moveaxis(y[:num_tokens], 0, 1)


def write_read(
    bank: Any,
    k_idx: Any,
    k_val: Any,
    v: Any,
    beta: Any,
    g: Any,
    q_idx: Any,
    q_val: Any,
    *,
    chunk_size: int = 64,
    snapshot_quant: str = "none",
    grad_bank_dtype: Any = None,
    shared_bank: bool = False,
) -> tuple[Any, Any]:
    """Write and read a stream of tokens: section 1 of the specification, with the precision of section 2.

    **Arguments:** those of `sdm_jax.write_read`. The bank is carried in float32 (float64 for a float64
    bank) and rounded to its dtype every `chunk_size` tokens. `snapshot_quant` and `grad_bank_dtype` change
    nothing: no snapshot is taken, and the gradient of the bank is never rounded on its way.

    **Returns:** `(y [..., T, D], new_bank)`, both in the bank's dtype.
    """
    del snapshot_quant, grad_bank_dtype
    dtype, acc = bank.dtype, accumulate_dtype(bank.dtype)
    *bank_lead, num_slots, width = bank.shape
    lead = k_idx.shape[:-2]
    streams = math.prod(lead[len(bank_lead) :]) if shared_bank else 1
    banks = math.prod(bank_lead)

    inputs = _Tokens(
        k_idx=k_idx,
        k_val=_round_to(k_val, dtype, acc),
        v=_round_to(v, dtype, acc),
        beta=beta.astype(acc),
        g=g.astype(acc),
        q_idx=q_idx,
        q_val=_round_to(q_val, dtype, acc),
    )
    inputs = jax.tree.map(lambda x: x.reshape(banks, streams, *x.shape[-2:]), inputs)
    one_bank = functools.partial(_one_bank, chunk_size=chunk_size, bank_dtype=dtype)
    new_bank, y = jax.vmap(one_bank)(bank.astype(acc).reshape(banks, num_slots, width), inputs)
    return y.reshape(*lead, *y.shape[-2:]).astype(dtype), new_bank.reshape(bank.shape).astype(dtype)


def decode_step(
    bank: Any,
    k_idx: Any,
    k_val: Any,
    v: Any,
    beta: Any,
    g: Any,
    q_idx: Any,
    q_val: Any,
    *,
    shared_bank: bool = False,
) -> tuple[Any, Any]:
    """One token of every stream: `write_read` of a single token, without the axis `T`."""
    token = (x[..., None, :] for x in (k_idx, k_val, v, beta, g, q_idx, q_val))
    y, new_bank = write_read(bank, *token, chunk_size=1, shared_bank=shared_bank)
    return y[..., 0, :], new_bank
