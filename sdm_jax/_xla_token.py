"""The token form of a `write_read` call in plain JAX: section 1 of the specification, and its reverse.

One scan step a token, in which only the rows that the token names are touched. On a CPU, where a step costs
little, this beats the chunked form. The backward walks the tokens in reverse with the formulas of section 4
for chunks of one token, putting the rows that a token wrote back from a snapshot that holds one row for
every write entry; the entry's position in its chunk is that of its row among the chunk's snapshot rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sdm_jax import snapshot
from sdm_jax._layout import Saved, Sizes, accumulate_dtype, saved_struct
from sdm_jax._xla_phase1 import Repeats, in_range
from sdm_jax._xla_rows import add_rows, gather_rows, scatter_rows


class _Writes(NamedTuple):
    """Write entries `[*B, T, W]`, all in the accumulation dtype."""

    ids: Any  # the bank's size for dropped entries
    target: Any  # `ids` at the first entry of a slot in its token, the bank's size elsewhere
    total: Any  # summed weight of the slot at first entries, 0 elsewhere
    factor: Any  # decay of the entry's slot

    @staticmethod
    def of(k_idx: Any, k_val: Any, g: Any, num_slots: int) -> tuple[_Writes, Repeats]:
        valid = in_range(k_idx, num_slots)
        repeats = Repeats.of(k_idx, valid)
        writes = _Writes(
            ids=jnp.where(valid, k_idx, num_slots),
            target=jnp.where(repeats.first, k_idx, num_slots),
            total=repeats.total(k_val.astype(g.dtype)),
            factor=jnp.exp(repeats.of_first(jnp.broadcast_to(g, k_idx.shape))),
        )
        return writes, repeats


def _tokens_first(tree: Any, axis: int) -> Any:
    return jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), tree)


def _tokens_back(tree: Any, axis: int) -> Any:
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis), tree)


def _snapshot_start(t: Any, sizes: Sizes, ndim: int) -> list[Any]:
    """Where the rows of token `t` start in a snapshot array of `ndim` axes."""
    zero = jnp.zeros_like(t)
    start = [zero] * len(sizes.lead) + [t // sizes.chunk, t % sizes.chunk * sizes.num_writes, zero]
    return start[:ndim]


def _store(all_rows: Any, rows: Any, t: Any, sizes: Sizes) -> Any:
    rows = jnp.expand_dims(rows, len(sizes.lead))
    return lax.dynamic_update_slice(all_rows, rows, _snapshot_start(t, sizes, all_rows.ndim))


def _load(all_rows: Any, t: Any, sizes: Sizes) -> Any:
    axis = len(sizes.lead)
    shape = (*sizes.lead, 1, sizes.num_writes, *all_rows.shape[axis + 2 :])
    rows = lax.dynamic_slice(all_rows, _snapshot_start(t, sizes, all_rows.ndim), shape)
    return jnp.squeeze(rows, axis)


def _weighted_sum(weights: Any, rows: Any) -> Any:
    return jnp.sum(weights[..., None] * rows, axis=-2)


def _dot(rows: Any, value: Any) -> Any:
    return jnp.sum(rows * value[..., None, :], axis=-1)


def forward(
    bank: Any, k_idx: Any, k_val: Any, v: Any, beta: Any, g: Any, q_idx: Any, q_val: Any,
    *, sizes: Sizes, mode: str, save: bool,
) -> tuple[Any, Any, Saved | None]:  # fmt: skip
    """All tokens: `(y, new_bank, saved)`; of `saved.chunks` only `writes` is filled in."""
    axis = len(sizes.lead)
    writes, _ = _Writes.of(k_idx, k_val, g, sizes.num_slots)
    counts = jnp.sum(in_range(k_idx, sizes.num_slots), axis=-1, dtype=jnp.int32)
    written = counts[..., None] > 0
    v = jnp.where(written, v, 0)
    beta = jnp.where(written, beta, 0)
    q_weight = jnp.where(in_range(q_idx, sizes.num_slots), q_val, 0)

    def step(state, xs):
        bank, kept = state
        t, writes, v, beta, q_idx, q_weight = xs
        rows = gather_rows(bank, writes.ids)
        if save:
            taken = snapshot.quantize(rows, mode)
            kept = tuple(_store(x, new, t, sizes) for x, new in zip(kept, taken, strict=False))
        rows = writes.factor[..., None] * rows
        error = v - _weighted_sum(writes.total, rows)
        delta = beta * error
        bank = scatter_rows(bank, writes.target, rows + writes.total[..., None] * delta[..., None, :])
        y = _weighted_sum(q_weight, gather_rows(bank, q_idx))
        return (bank, kept), (y, error, delta) if save else (y,)

    kept: tuple[Any, ...] = ()
    if save:
        struct = saved_struct(sizes, bank.dtype, mode)
        arrays = (struct.snapshot, struct.scale) if struct.scale.size else (struct.snapshot,)
        kept = tuple(jnp.zeros(s.shape, s.dtype) for s in arrays)
    index = jnp.arange(sizes.num_tokens, dtype=jnp.int32)
    xs = (index, *_tokens_first((writes, v, beta, q_idx, q_weight), axis))
    (bank, kept), ys = lax.scan(step, (bank, kept), xs)
    y, *rest = _tokens_back(ys, axis)
    if not save:
        return y, bank, None
    saved = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), struct)
    named = dict(zip(("error", "delta", "snapshot", "scale"), (*rest, *kept), strict=False))
    return y, bank, saved._replace(chunks=saved.chunks._replace(writes=counts), **named)


def backward(
    bank: Any, d_bank: Any, dy: Any, k_idx: Any, k_val: Any, beta: Any, g: Any, q_idx: Any, q_val: Any,
    saved: Saved, *, sizes: Sizes, mode: str,
) -> tuple[Any, ...]:  # fmt: skip
    """The reverse of `forward`: `(restored_bank, d_bank, dk_val, dv, dbeta, dg, dq_val)`."""
    axis = len(sizes.lead)
    acc = accumulate_dtype(bank.dtype)
    writes, repeats = _Writes.of(k_idx, k_val, g, sizes.num_slots)
    beta = jnp.where(saved.chunks.writes[..., None] > 0, beta, 0)
    reads = Repeats.of(q_idx, in_range(q_idx, sizes.num_slots))
    q_target = jnp.where(reads.first, q_idx, sizes.num_slots)
    q_total = reads.total(q_val)

    # A token's rows are put back when the step of the token before it begins. Within a step the reader of the
    # bank then comes after the only writer; otherwise nothing would order them and XLA would copy the bank.
    def step(state, xs):
        bank, d_bank, restored = state
        bank = scatter_rows(bank, *restored)
        t, writes, beta, q_idx, q_target, q_total, dy, error, delta = xs
        dq = _dot(gather_rows(bank, q_idx), dy)
        d_bank = add_rows(d_bank, q_target, q_total[..., None] * dy[..., None, :])
        scale = _load(saved.scale, t, sizes) if saved.scale.size else None
        rows = snapshot.dequantize(_load(saved.snapshot, t, sizes), scale, mode, acc, sizes.width)
        restored = (writes.target, rows)
        rows = writes.factor[..., None] * rows
        d_rows = gather_rows(d_bank, writes.ids)
        d_delta = _weighted_sum(writes.total, d_rows)
        dv = beta * d_delta
        dk = _dot(d_rows, delta) - _dot(rows, dv)
        d_rows = d_rows - writes.total[..., None] * dv[..., None, :]
        d_gate = jnp.sum(d_rows * rows, axis=-1)
        d_bank = scatter_rows(d_bank, writes.target, writes.factor[..., None] * d_rows)
        return (bank, d_bank, restored), (
            dk,
            dv,
            jnp.sum(error * d_delta, axis=-1, keepdims=True),
            d_gate,
            dq,
        )

    index = jnp.arange(sizes.num_tokens, dtype=jnp.int32)
    tokens = (writes, beta, q_idx, q_target, q_total, dy, saved.error, saved.delta)
    xs = (index, *_tokens_first(tokens, axis))
    none = jnp.full((*sizes.lead, sizes.num_writes), sizes.num_slots, jnp.int32)
    restored = (none, jnp.zeros((*none.shape, sizes.width), acc))
    (bank, d_bank, restored), ys = lax.scan(step, (bank, d_bank, restored), xs, reverse=True)
    bank = scatter_rows(bank, *restored)
    dk, dv, dbeta, d_gate, dq = _tokens_back(ys, axis)
    written = saved.chunks.writes[..., None] > 0
    # An erased row depends on its gate no longer.
    d_gate = jnp.where(repeats.first & (writes.factor != 0), d_gate, 0)
    if sizes.gates == 1:
        d_gate = jnp.sum(d_gate, axis=-1, keepdims=True)
    dk = jnp.where(in_range(k_idx, sizes.num_slots), dk, 0)
    dq = jnp.where(in_range(q_idx, sizes.num_slots), dq, 0)
    return bank, d_bank, dk, dv, jnp.where(written, dbeta, 0), d_gate, dq
