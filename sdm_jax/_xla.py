"""The steps of a `write_read` call in vectorised plain JAX, and the whole call made of them.

Runs wherever JAX runs. Arrays have any leading axes; those of a bank `[*A, S, D]` are a prefix of those of
the tokens `[*B, ...]`, and shorter where several streams share a bank. `Chunks` and `Saved` of
`sdm_jax._layout` name the arrays; the symbols are those of sections 3 and 4 of the specification.

No scatter meets one row twice and no sum has a free order, so results are reproducible on every platform.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sdm_jax import _xla_token, snapshot
from sdm_jax._layout import Saved, Sizes, accumulate_dtype, saved_struct
from sdm_jax._xla_phase1 import (
    Repeats,
    batched,
    entry_ranks,
    join_chunks,
    phase1,
    phase1_backward,
    solve,
    split_chunks,
)
from sdm_jax._xla_rows import gather_rows, pack, row_dtype, scatter_rows, unpack

__all__ = [
    "backward",
    "du_matmul",
    "dual_matmul",
    "forward",
    "gather",
    "gather_gradient",
    "mover",
    "phase1",
    "phase1_backward",
    "read_mover_backward",
    "solve",
    "take_snapshot",
    "write_mover_backward",
]

_matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def _transpose(x: Any) -> Any:
    return jnp.swapaxes(x, -1, -2)


def _weighted_rows(bank: Any, ids: Any, weights: Any) -> Any:
    """Sum of the rows `ids [*B, C, K]` by `weights`: `[*B, C, D]`. Dropped entries are not looked at."""
    weights = jnp.where((ids >= 0) & (ids < bank.shape[-2]), weights, 0)
    rows = gather_rows(bank, ids).astype(weights.dtype)
    return jnp.sum(weights[..., None] * rows, axis=-2)


def _dot_rows(bank: Any, ids: Any, values: Any) -> Any:
    """Dots of the rows `ids [*B, C, K]` with the token's `values [*B, C, D]`: `[*B, C, K]`, 0 if dropped."""
    rows = gather_rows(bank, ids).astype(values.dtype)
    dots = jnp.sum(rows * values[..., None, :], axis=-1)
    return jnp.where((ids >= 0) & (ids < bank.shape[-2]), dots, 0)


def _entry_ranks(starts: Any, order: Any, shape: tuple[int, int]) -> Any:
    """For every entry the index of its slot among the chunk's: `[*B, C, K]`; past the end if dropped."""
    # `order` may be that of a longer chunk; its valid entries come first, and are no more than there are here.
    order = order[..., : math.prod(shape)]
    return batched(lambda starts, order: entry_ranks(starts, order, shape), starts.ndim - 1)(starts, order)


def _sum_by_slot(ranks: Any, weights: Any, values: Any, size: int) -> Any:
    """Sum of `weights [*B, C, K]` times the token's `values [*B, C, D]` over the entries of every slot."""

    def one(ranks, weights, values):
        # As a matrix product: adding entry by entry would add to one row in no fixed order on a GPU.
        chunk = ranks.shape[0]
        repeats = Repeats.of(ranks, ranks < size)
        token = jnp.broadcast_to(jnp.arange(chunk, dtype=jnp.int32)[:, None], ranks.shape)
        target = jnp.where(repeats.first, ranks, size)
        matrix = jnp.zeros((size, chunk), weights.dtype)
        matrix = matrix.at[target, token].set(repeats.total(weights), mode="drop", unique_indices=True)
        return _matmul(matrix, values)

    return batched(one, ranks.ndim - 2)(ranks, weights, values)


def gather(bank: Any, k_idx: Any, k_eff: Any, q_idx: Any, q_eff: Any) -> tuple[Any, Any]:
    """What a chunk gets from the bank before it: `ret` and `inter` of section 3, `[*B, C, D]`."""
    return _weighted_rows(bank, k_idx, k_eff), _weighted_rows(bank, q_idx, q_eff)


def take_snapshot(bank: Any, slots: Any, *, mode: str) -> tuple[Any, Any]:
    """The rows `slots [*B, U]` as section 5 of the specification stores them, and their scales."""
    rows, scale = snapshot.quantize(gather_rows(bank, slots), mode)
    if scale is None:
        scale = jnp.zeros((*slots.shape[:-1], 0), jnp.float32)
    return rows, scale


def dual_matmul(x: Any, qx: Any, beta: Any, writes: Any, v: Any, retrieved: Any, inter: Any) -> tuple[Any, Any, Any]:
    """`error = v - ret`, `delta = X u` and `y = inter + QX u` with `u = beta error`: section 3."""
    written = writes[..., None] > 0
    error = jnp.where(written, v.astype(retrieved.dtype) - retrieved, 0)
    u = jnp.where(written, beta, 0) * error
    return error, _matmul(x, u), (inter + _matmul(qx, u)).astype(v.dtype)


def _moved_rows(bank, slots, starts, order, k_carry, decay, delta) -> Any:
    """The rows `slots` of a bank after a chunk."""
    ranks = _entry_ranks(starts, order, k_carry.shape[-2:])
    rows = decay[..., None] * gather_rows(bank, slots).astype(delta.dtype)
    return (rows + _sum_by_slot(ranks, k_carry, delta, slots.shape[-1])).astype(row_dtype(bank))


def mover(bank: Any, slots: Any, starts: Any, order: Any, k_carry: Any, decay: Any, delta: Any) -> Any:
    """Decay and write of a chunk: section 3. Each written row is rounded once."""
    return scatter_rows(bank, slots, _moved_rows(bank, slots, starts, order, k_carry, decay, delta))


def gather_gradient(d_bank: Any, k_idx: Any, k_carry: Any) -> Any:
    """What the gradient of the bank after a chunk gives to its deltas: `sum_e w_e dM[s_e]` of section 4."""
    return _weighted_rows(d_bank, k_idx, k_carry)


def du_matmul(
    a: Any, qk: Any, x: Any, beta: Any, writes: Any, dy: Any, carried: Any, error: Any, delta: Any
) -> tuple[Any, Any, Any, Any]:
    """Gradients of `v`, `beta`, `A` and `QK` of a chunk: section 4. `dret` is minus the first."""
    written = writes[..., None] > 0
    beta = jnp.where(written, beta, 0)
    dy = dy.astype(carried.dtype)
    du = _matmul(_transpose(x), _matmul(_transpose(qk), dy) + carried)
    dlower = -jnp.tril(_matmul(du, _transpose(delta)), -1)
    dbeta = jnp.sum(error * du, axis=-1, keepdims=True) + jnp.sum(a * dlower, axis=-1, keepdims=True)
    dqk = jnp.tril(_matmul(dy, _transpose(delta)))
    return beta * du, jnp.where(written, dbeta, 0), beta * dlower, dqk


def write_mover_backward(
    bank: Any,
    d_bank: Any,
    slots: Any,
    starts: Any,
    order: Any,
    decay: Any,
    k_eff: Any,
    stored: Any,
    scale: Any,
    delta: Any,
    dv: Any,
    *,
    mode: str,
) -> tuple[Any, Any, Any, Any, Any]:
    """Restores the rows that a chunk wrote, and takes their gradient back through it: section 4.

    **Returns:** `(bank, d_bank, dk_eff, dk_carry, ddecay)`; `ddecay` is the gradient of the log of `decay`.
    """
    acc = delta.dtype
    ranks = _entry_ranks(starts, order, k_eff.shape[-2:])
    rows = snapshot.dequantize(stored, scale, mode, row_dtype(bank), bank.shape[-1])
    bank = scatter_rows(bank, slots, rows)
    rows = rows.astype(acc)
    d_rows = gather_rows(d_bank, slots).astype(acc)
    dk_eff = -_dot_rows(rows, ranks, dv)
    dk_carry = _dot_rows(d_rows, ranks, delta)
    d_rows = decay[..., None] * d_rows
    ddecay = jnp.where(slots >= 0, jnp.sum(d_rows * rows, axis=-1), 0)
    d_rows = d_rows - _sum_by_slot(ranks, k_eff, dv, slots.shape[-1])
    return bank, scatter_rows(d_bank, slots, d_rows), dk_eff, dk_carry, ddecay


def read_mover_backward(
    bank: Any,
    d_bank: Any,
    read_slots: Any,
    read_starts: Any,
    read_order: Any,
    q_eff: Any,
    dy: Any,
) -> tuple[Any, Any]:
    """Gradient of a chunk's reads from the bank before it: section 4. Returns `(d_bank, dq_eff)`."""
    acc = q_eff.dtype
    dy = dy.astype(acc)
    ranks = _entry_ranks(read_starts, read_order, q_eff.shape[-2:])
    dq_eff = _dot_rows(gather_rows(bank, read_slots), ranks, dy)
    d_rows = gather_rows(d_bank, read_slots).astype(acc)
    d_rows = d_rows + _sum_by_slot(ranks, q_eff, dy, read_slots.shape[-1])
    return scatter_rows(d_bank, read_slots, d_rows), dq_eff


def _chunked_forward(bank, k_idx, k_val, v, beta, g, q_idx, q_val, *, chunk, mode, save) -> tuple:
    """The chunked form, with a packed bank; returns `(y, bank, Saved or None)`."""
    num_tokens, num_axes = k_idx.shape[-2], k_idx.ndim - 2
    chunks = phase1(k_idx, k_val, g, q_idx, q_val, chunk=chunk, num_slots=bank.shape[-2])
    x, qx = solve(chunks.a, chunks.qk, beta, chunks.writes)

    # A chunk's rows go into the bank when the next chunk begins. Within a step every reader of the bank then
    # comes after the only writer; otherwise nothing would order `inter` and XLA would copy the bank for it.
    def step(state, xs):
        bank, moved, kept = state
        bank = scatter_rows(bank, *moved)
        i, k_idx, k_eff, k_carry, q_idx, q_eff, v, beta, writes, x, qx, slots, starts, order, decay = xs
        writes = writes[..., 0]
        retrieved, inter = gather(bank, k_idx, k_eff, q_idx, q_eff)
        if save:
            taken = take_snapshot(bank, slots, mode=mode)
            kept = tuple(
                lax.dynamic_update_index_in_dim(all_rows, rows, i, num_axes)
                for all_rows, rows in zip(kept, taken, strict=True)
            )
        error, delta, y = dual_matmul(x, qx, beta, writes, v, retrieved, inter)
        moved = (slots, _moved_rows(bank, slots, starts, order, k_carry, decay, delta))
        return (bank, moved, kept), (y, error, delta) if save else (y,)

    # Padding tokens write nothing.
    per_token = (
        split_chunks(k_idx, chunk, -1),
        split_chunks(chunks.k_eff, chunk),
        split_chunks(chunks.k_carry, chunk),
        split_chunks(q_idx, chunk, -1),
        *(split_chunks(x, chunk) for x in (chunks.q_eff, v, beta, chunks.writes[..., None])),
    )
    of_chunks = (x, qx, chunks.slots, chunks.starts, chunks.order, chunks.decay)
    per_chunk = tuple(jnp.moveaxis(x, num_axes, 0) for x in of_chunks)
    index = jnp.arange(per_chunk[0].shape[0], dtype=jnp.int32)
    # The snapshot is carried, not stacked: it is large, and stacking would put chunks before streams.
    kept: tuple[Any, ...] = ()
    if save:
        sizes = Sizes.of(bank, k_idx, g, q_idx, chunk)
        struct = saved_struct(sizes, v.dtype, mode)
        kept = tuple(jnp.zeros(s.shape, s.dtype) for s in (struct.snapshot, struct.scale))
    none = jnp.full_like(per_chunk[2][0], -1)
    moved = (none, jnp.zeros((*none.shape, bank.shape[-1]), v.dtype))
    (bank, moved, kept), ys = lax.scan(step, (bank, moved, kept), (index, *per_token, *per_chunk))
    bank = scatter_rows(bank, *moved)
    y, *rest = (join_chunks(y, num_tokens) for y in ys)
    return y, bank, Saved(chunks, x, *rest, *kept) if save else None


def _slabs_forward(forward: Callable, bank, *tokens, sizes: Sizes) -> tuple[Any, Any]:
    """`forward(bank, *tokens) -> (y, bank)` over slabs of chunks: its working memory does not grow with `T`."""
    axis = len(sizes.lead)
    slab = sizes.slab_chunks * sizes.chunk
    num_slabs = sizes.num_tokens // slab

    def step(state, i):
        bank, y = state
        part = (lax.dynamic_slice_in_dim(x, i * slab, slab, axis) for x in tokens)
        y_part, bank = forward(bank, *part)
        return (bank, lax.dynamic_update_slice_in_dim(y, y_part, i * slab, axis)), None

    y = jnp.zeros((*sizes.lead, sizes.num_tokens, sizes.width), tokens[2].dtype)
    if num_slabs:
        (bank, y), _ = lax.scan(step, (bank, y), jnp.arange(num_slabs, dtype=jnp.int32))
    done = num_slabs * slab
    if done < sizes.num_tokens:
        part = (lax.slice_in_dim(x, done, sizes.num_tokens, axis=axis) for x in tokens)
        y_part, bank = forward(bank, *part)
        y = lax.dynamic_update_slice_in_dim(y, y_part, done, axis)
    return y, bank


def _chunked_backward(bank, d_bank, dy, k_idx, k_val, beta, g, q_idx, q_val, saved: Saved, *, chunk, mode) -> tuple:
    num_tokens, num_axes = k_idx.shape[-2], k_idx.ndim - 2
    chunks = saved.chunks

    def step(state, xs):
        bank, d_bank = state
        i, k_idx, k_eff, k_carry, q_eff, dy, beta, writes, error, delta, chunk = xs
        stored, scale = (
            lax.dynamic_index_in_dim(x, i, num_axes, keepdims=False) for x in (saved.snapshot, saved.scale)
        )
        carried = gather_gradient(d_bank, k_idx, k_carry)
        dv, dbeta, da, dqk = du_matmul(
            chunk["a"], chunk["qk"], chunk["x"], beta, writes[..., 0], dy, carried, error, delta
        )
        slots, starts, order, decay = (chunk[name] for name in ("slots", "starts", "order", "decay"))
        bank, d_bank, dk_eff, dk_carry, ddecay = write_mover_backward(
            bank, d_bank, slots, starts, order, decay, k_eff, stored, scale, delta, dv, mode=mode
        )
        read_slots, read_starts, read_order = (chunk[f"read_{name}"] for name in ("slots", "starts", "order"))
        d_bank, dq_eff = read_mover_backward(bank, d_bank, read_slots, read_starts, read_order, q_eff, dy)
        return (bank, d_bank), (dv, dbeta, da, dqk, dk_eff, dk_carry, dq_eff, ddecay)

    tokens = (
        chunks.k_eff,
        chunks.k_carry,
        chunks.q_eff,
        dy,
        beta,
        chunks.writes[..., None],
        saved.error,
        saved.delta,
    )
    per_token = (split_chunks(k_idx, chunk, -1), *(split_chunks(x, chunk) for x in tokens))
    names = ("a", "qk", "slots", "starts", "order", "decay", "read_slots", "read_starts", "read_order")
    per_chunk = {name: jnp.moveaxis(getattr(chunks, name), num_axes, 0) for name in names}
    per_chunk["x"] = jnp.moveaxis(saved.x, num_axes, 0)
    index = jnp.arange(per_chunk["x"].shape[0], dtype=jnp.int32)
    (bank, d_bank), ys = lax.scan(step, (pack(bank), pack(d_bank)), (index, *per_token, per_chunk), reverse=True)
    dv, dbeta, da, dqk, dk_eff, dk_carry, dq_eff, ddecay = ys
    dv, dbeta, dk_eff, dk_carry, dq_eff = (join_chunks(x, num_tokens) for x in (dv, dbeta, dk_eff, dk_carry, dq_eff))
    da, dqk, ddecay = (jnp.moveaxis(x, 0, num_axes) for x in (da, dqk, ddecay))
    dk_val, dg, dq_val = phase1_backward(
        k_idx, k_val, g, q_idx, q_val, chunks, da, dqk, dk_eff, dk_carry, dq_eff, ddecay,
        chunk=chunk, num_slots=bank.shape[-2],
    )  # fmt: skip
    return unpack(bank), unpack(d_bank), dk_val, dv, dbeta, dg, dq_val


def _by_token(form: str, bank: Any, sizes: Sizes) -> bool:
    """Whether a call is served by the token form, which differentiated and plain calls must agree on."""
    # Its rows go back to the bank after every token, so only a bank of the accumulation dtype is rounded
    # as it should be; and a chunk's snapshot rows, one a write entry, must fit the common layout.
    wide = bank.dtype == accumulate_dtype(bank.dtype)
    return form == "token" and wide and sizes.chunk_writes <= sizes.num_slots


def forward(
    bank: Any,
    k_idx: Any,
    k_val: Any,
    v: Any,
    beta: Any,
    g: Any,
    q_idx: Any,
    q_val: Any,
    *,
    chunk: int,
    snapshot_quant: str,
    save: bool,
    form: str = "chunked",
) -> list[Any]:
    """The whole of `write_read`: `[y, new_bank]`, then the leaves of `Saved` if `save`.

    **Arguments:** `k_val`, `v`, `q_val` in the bank's dtype, `beta` and `g` in the accumulation dtype.
    `form` is `"chunked"` (sections 3 and 4 of the specification) or `"token"` (one token after another, the
    better one on a CPU); where the token form cannot serve, the chunked one does.
    """
    sizes = Sizes.of(bank, k_idx, g, q_idx, chunk)
    tokens = (k_idx, k_val, v, beta, g, q_idx, q_val)
    if math.prod((*sizes.lead, sizes.num_tokens)) == 0:
        y = jnp.zeros((*sizes.lead, sizes.num_tokens, sizes.width), bank.dtype)
        struct = saved_struct(sizes, bank.dtype, snapshot_quant)
        saved = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), struct)
        return [y, bank, *(jax.tree.leaves(saved) if save else ())]
    by_token = _by_token(form, bank, sizes)
    bank = bank if by_token else pack(bank)

    def run(bank, *tokens, save=False):
        if by_token:
            part = dataclasses.replace(sizes, num_tokens=tokens[0].shape[-2])
            return _xla_token.forward(bank, *tokens, sizes=part, mode=snapshot_quant, save=save)
        return _chunked_forward(bank, *tokens, chunk=sizes.chunk, mode=snapshot_quant, save=save)

    if save:
        y, new_bank, saved = run(bank, *tokens, save=True)
    else:
        y, new_bank = _slabs_forward(lambda *x: run(*x)[:2], bank, *tokens, sizes=sizes)
        saved = None
    return [y, new_bank if by_token else unpack(new_bank), *jax.tree.leaves(saved)]


def backward(
    new_bank: Any,
    d_new_bank: Any,
    dy: Any,
    k_idx: Any,
    k_val: Any,
    beta: Any,
    g: Any,
    q_idx: Any,
    q_val: Any,
    saved: Saved,
    *,
    chunk: int,
    snapshot_quant: str,
    form: str = "chunked",
) -> tuple[Any, ...]:
    """The backward of `forward` with the same settings: section 4 of the specification.

    **Returns:** `(restored_bank, d_bank, dk_val, dv, dbeta, dg, dq_val)`: `d_bank` in the dtype of
    `d_new_bank`, in which it is carried, the others in the accumulation dtype.
    """
    sizes = Sizes.of(new_bank, k_idx, g, q_idx, chunk)
    tokens = (k_idx, k_val, beta, g, q_idx, q_val)
    if math.prod((*sizes.lead, sizes.num_tokens)) == 0:
        acc = accumulate_dtype(new_bank.dtype)
        dk_val, dbeta, dg, dq_val = (jnp.zeros(x.shape, acc) for x in (k_val, beta, g, q_val))
        return new_bank, d_new_bank, dk_val, jnp.zeros(dy.shape, acc), dbeta, dg, dq_val
    if _by_token(form, new_bank, sizes):
        return _xla_token.backward(new_bank, d_new_bank, dy, *tokens, saved, sizes=sizes, mode=snapshot_quant)
    return _chunked_backward(new_bank, d_new_bank, dy, *tokens, saved, chunk=sizes.chunk, mode=snapshot_quant)
