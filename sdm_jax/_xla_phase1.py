"""Phase 1 in plain JAX: everything of a chunk that needs no bank, and its backward.

The two triangular matrices of section 3 of the specification are what the recurrence itself would read from
a bank that starts at zero and is given the one-hot vector of each token as its value, with nothing retrieved.
So a chunk is run as a short token loop over such a bank, `[slots written, C + 1]`: column `t` holds the
weight that token `t` left in a slot, decayed so far, and the last column the decay since the chunk's start.
Every decay is then a product of the gates in between and of nothing else, and every derivative of a gate is
a sum over the pairs that straddle it, which is what keeps both accurate at any gate.

The functions with a leading underscore see one chunk of one stream; `vmap` supplies the other axes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sdm_jax._layout import SLAB_TOKENS, Chunks


def batched(fn: Callable, num_axes: int) -> Callable:
    """`fn` over `num_axes` leading axes, none of them folded, so that each keeps its sharding."""
    for _ in range(num_axes):
        fn = jax.vmap(fn)
    return fn


def split_chunks(x: Any, chunk: int, fill: Any = 0) -> Any:
    """`[*B, T, K]` (or `[*B, T]` if `x` is a count) to `[N, *B, C, K]`, the last chunk padded with `fill`."""
    axis = x.ndim - 2
    pad = -x.shape[axis] % chunk
    if pad:
        x = jnp.pad(x, [(0, pad if i == axis else 0) for i in range(x.ndim)], constant_values=fill)
    x = x.reshape(*x.shape[:axis], x.shape[axis] // chunk, chunk, x.shape[-1])
    return jnp.moveaxis(x, axis, 0)


def join_chunks(x: Any, num_tokens: int) -> Any:
    """The inverse of `split_chunks`."""
    axis = x.ndim - 3
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], x.shape[-1])
    return lax.slice_in_dim(x, 0, num_tokens, axis=axis)


class Repeats(NamedTuple):
    """Which entries of a token name the same row; the first of them acts for all."""

    same: Any  # [..., K, K] bool, symmetric; all False for a dropped entry
    first: Any  # [..., K] bool

    @staticmethod
    def of(ids: Any, valid: Any) -> Repeats:
        """**Arguments:** `ids` `[..., K]`, and whether an entry counts at all."""
        same = (ids[..., :, None] == ids[..., None, :]) & valid[..., :, None] & valid[..., None, :]
        position = jnp.arange(ids.shape[-1], dtype=jnp.int32)
        earlier = lax.expand_dims(position[:, None] > position[None, :], range(ids.ndim - 1))
        return Repeats(same, valid & ~jnp.any(same & earlier, axis=-1))

    def total(self, x: Any) -> Any:
        """At first entries the sum of `x` over the entries of their row, elsewhere 0."""
        return jnp.where(self.first, jnp.sum(jnp.where(self.same, x[..., None, :], 0), axis=-1), 0)

    def of_first(self, x: Any) -> Any:
        """At every entry the `x` of the first entry of its row; 0 for a dropped entry."""
        return jnp.sum(jnp.where(self.same & self.first[..., None, :], x[..., None, :], 0), axis=-1)


def in_range(ids: Any, num_slots: int) -> Any:
    """Whether an id names a slot; the others are dropped entries."""
    return (ids >= 0) & (ids < num_slots)


def _sort_entries(ids: Any, num_slots: int, size: int) -> tuple[Any, Any, Any]:
    """Entries `[C, K]` by slot: the `slots`, `starts` and `order` of `Chunks`, `size` slots at most."""
    ids = ids.reshape(-1)
    key = jnp.where(in_range(ids, num_slots), ids, num_slots)
    position = jnp.arange(key.size, dtype=jnp.int32)
    key, order = lax.sort((key, position), num_keys=1, is_stable=True)
    valid = key < num_slots
    count = jnp.sum(valid, dtype=jnp.int32)
    new = valid & jnp.concatenate([jnp.ones(1, bool), key[1:] != key[:-1]])
    rank = jnp.where(new, jnp.cumsum(new, dtype=jnp.int32) - 1, size + 1)
    slots = jnp.full(size, -1, jnp.int32).at[rank].set(key, mode="drop", unique_indices=True)
    starts = jnp.full(size + 1, count, jnp.int32).at[rank].set(position, mode="drop", unique_indices=True)
    return slots, starts, jnp.where(valid, order, -1)


def entry_ranks(starts: Any, order: Any, shape: tuple[int, int]) -> Any:
    """For every entry of one chunk the index of its slot among the chunk's slots; their number if dropped."""
    size = starts.shape[0] - 1
    num_entries = order.shape[0]
    begins = jnp.zeros(num_entries, jnp.int32).at[starts[:size]].set(1, mode="drop")
    rank = jnp.where(order >= 0, jnp.cumsum(begins, dtype=jnp.int32) - 1, size)
    target = jnp.where(order >= 0, order, num_entries)
    ranks = jnp.full(num_entries, size, jnp.int32).at[target].set(rank, mode="drop", unique_indices=True)
    return ranks.reshape(shape)


class _Entries(NamedTuple):
    """The entries of one chunk, by the rows of the bank of the token loop. A row past its end is dropped."""

    rank: Any  # [C, W]
    target: Any  # [C, W]: `rank` at first entries, past the end elsewhere
    weight: Any  # [C, W]
    total: Any  # [C, W]: summed weight of the slot at first entries, 0 elsewhere
    factor: Any  # [C, W]: decay of the entry's slot at this token
    read_rank: Any  # [C, R]
    read_weight: Any  # [C, R]


def _entries(k_idx, k_val, g, q_idx, q_val, slots, starts, order, num_slots) -> tuple[_Entries, Repeats]:
    size, acc = slots.shape[0], g.dtype
    rank = entry_ranks(starts, order, k_idx.shape)
    valid = rank < size
    repeats = Repeats.of(rank, valid)
    weight = jnp.where(valid, k_val.astype(acc), 0)
    # `slots` ends in -1; as a key past every id it keeps the array sorted.
    keys = jnp.where(slots < 0, num_slots, slots)
    found = jnp.searchsorted(keys, q_idx, method="scan").astype(jnp.int32)
    written = in_range(q_idx, num_slots) & (keys.at[found].get(mode="fill", fill_value=num_slots) == q_idx)
    entries = _Entries(
        rank=rank,
        target=jnp.where(repeats.first, rank, size),
        weight=weight,
        total=repeats.total(weight),
        factor=jnp.exp(repeats.of_first(jnp.broadcast_to(g, k_idx.shape))),
        read_rank=jnp.where(written, found, size),
        read_weight=jnp.where(in_range(q_idx, num_slots), q_val.astype(acc), 0),
    )
    return entries, repeats


def _rows(bank: Any, ids: Any) -> Any:
    return bank.at[ids].get(mode="fill", fill_value=0)


def _start(size: int, chunk: int, acc: Any) -> Any:
    """The token loop's bank before the first token: nothing written, and no decay yet."""
    return jnp.zeros((size, chunk + 1), acc).at[:, chunk].set(1)


def _write(bank: Any, token: Any, entries: _Entries) -> tuple[Any, Any]:
    """One token of the loop: the bank after it, and the rows of its entries after decay, before the write."""
    rows = _rows(bank, entries.rank) * entries.factor[:, None]
    here = jnp.arange(bank.shape[1], dtype=jnp.int32) == token
    written = rows + jnp.where(here[None, :], entries.total[:, None], 0)
    return bank.at[entries.target].set(written, mode="drop", unique_indices=True), rows


def _decay_until_end(entries: _Entries, size: int) -> Any:
    """Decay of every entry's slot between its token and the chunk's end: `[C, W]`."""

    def token(tail, entries):
        return tail.at[entries.target].multiply(entries.factor, mode="drop", unique_indices=True), _rows(
            tail, entries.rank
        )

    return lax.scan(token, jnp.ones(size, entries.factor.dtype), entries, reverse=True)[1]


def _phase1(k_idx, k_val, g, q_idx, q_val, *, num_slots: int) -> Chunks:
    (chunk, num_writes), num_reads = k_idx.shape, q_idx.shape[1]
    size, acc = min(chunk * num_writes, num_slots), g.dtype
    slots, starts, order = _sort_entries(k_idx, num_slots, size)
    read_slots, read_starts, read_order = _sort_entries(q_idx, num_slots, min(chunk * num_reads, num_slots))
    entries, _ = _entries(k_idx, k_val, g, q_idx, q_val, slots, starts, order, num_slots)

    def token(bank, xs):
        t, entries = xs
        bank, rows = _write(bank, t, entries)
        reads = _rows(bank, entries.read_rank)
        a = jnp.sum(entries.total[:, None] * rows[:, :chunk], axis=0)
        qk = jnp.sum(entries.read_weight[:, None] * reads[:, :chunk], axis=0)
        # A slot that the chunk has not written has not decayed either.
        q_decay = jnp.where(entries.read_rank < size, reads[:, chunk], 1)
        return bank, (a, qk, rows[:, chunk], q_decay)

    xs = (jnp.arange(chunk, dtype=jnp.int32), entries)
    bank, (a, qk, k_decay, q_decay) = lax.scan(token, _start(size, chunk, acc), xs)
    return Chunks(
        # A NaN gate would leave NaN times zero above the diagonal.
        a=jnp.tril(a, -1),
        qk=jnp.tril(qk),
        k_eff=entries.weight * k_decay,
        k_carry=entries.weight * _decay_until_end(entries, size),
        q_eff=entries.read_weight * q_decay,
        slots=slots,
        starts=starts,
        order=order,
        decay=bank[:, chunk],
        read_slots=read_slots,
        read_starts=read_starts,
        read_order=read_order,
        writes=jnp.sum(entries.rank < size, axis=-1, dtype=jnp.int32),
    )


def _phase1_backward(
    k_idx, k_val, g, q_idx, q_val, slots, starts, order, k_carry, da, dqk, dk_eff, dk_carry, dq_eff, ddecay,
    *, num_slots: int,
):  # fmt: skip
    chunk, size, acc = k_idx.shape[0], slots.shape[0], g.dtype
    entries, repeats = _entries(k_idx, k_val, g, q_idx, q_val, slots, starts, order, num_slots)
    valid = entries.rank < size
    dk_eff, dk_carry = jnp.where(valid, dk_eff, 0), jnp.where(valid, dk_carry, 0)
    dq_eff = jnp.where(in_range(q_idx, num_slots), dq_eff, 0)
    da, dqk = jnp.tril(da, -1), jnp.tril(dqk)
    carried = repeats.total(k_carry * dk_carry)

    # Forward again: every entry as the later one of its pairs, and the earlier writes that each gate carries.
    def forward(state, xs):
        bank, sums = state
        t, entries, da, dqk, dk_eff, dq_eff, carried = xs
        bank, rows = _write(bank, t, entries)
        reads = _rows(bank, entries.read_rank)
        q_decay = jnp.where(entries.read_rank < size, reads[:, chunk], 1)
        dk = jnp.sum(rows[:, :chunk] * da[None, :], axis=1) + rows[:, chunk] * dk_eff
        dq = jnp.sum(reads[:, :chunk] * dqk[None, :], axis=1) + q_decay * dq_eff
        before = _rows(sums, entries.rank)
        sums = sums.at[entries.target].add(carried, mode="drop", unique_indices=True)
        return (bank, sums), (rows, before, dk, dq)

    index = jnp.arange(chunk, dtype=jnp.int32)
    state = (_start(size, chunk, acc), jnp.zeros(size, acc))
    forward_xs = (index, entries, da, dqk, dk_eff, dq_eff, carried)
    _, (rows, before, dk, dq) = lax.scan(forward, state, forward_xs)

    # In reverse: the gradient of the loop's bank, of which every entry as the earlier one of its pairs takes
    # its column, and every gate its row.
    reads = Repeats.of(entries.read_rank, entries.read_rank < size)
    read_target = jnp.where(reads.first, entries.read_rank, size)

    def with_start(matrix, weight, start):  # the gradient that one token's entries give to their rows
        return jnp.concatenate([weight[..., None] * matrix[:, None, :], start[..., None]], axis=-1)

    read_rows = with_start(dqk, reads.total(entries.read_weight), reads.total(entries.read_weight * dq_eff))
    write_rows = with_start(da, entries.total, repeats.total(entries.weight * dk_eff))

    def backward(dbank, xs):
        t, entries, read_target, read_rows, write_rows, rows = xs
        dbank = dbank.at[read_target].add(read_rows, mode="drop", unique_indices=True)
        drows = _rows(dbank, entries.rank)
        dk = lax.dynamic_index_in_dim(drows, t, axis=1, keepdims=False)
        drows = drows + write_rows
        dgate = jnp.sum(drows * rows, axis=1)
        drows = drows * entries.factor[:, None]
        return dbank.at[entries.target].set(drows, mode="drop", unique_indices=True), (dk, dgate)

    backward_xs = (index, entries, read_target, read_rows, write_rows, rows)
    dbank = jnp.zeros((size, chunk + 1), acc)
    _, (dk_later, dgate) = lax.scan(backward, dbank, backward_xs, reverse=True)

    dk_val = dk + dk_later + _decay_until_end(entries, size) * dk_carry
    dgate = dgate + before + _rows(ddecay, entries.rank)
    # An erased row depends on its gate no longer.
    dgate = jnp.where(repeats.first & (entries.factor != 0), dgate, 0)
    if g.shape[-1] == 1:
        dgate = jnp.sum(dgate, axis=-1, keepdims=True)
    return jnp.where(valid, dk_val, 0), dgate, jnp.where(in_range(q_idx, num_slots), dq, 0)


def _over_chunks(fn: Callable, xs: Any, num_axes: int, chunk: int) -> Any:
    """`fn` of one chunk of one stream over arrays `[N, *B, ...]`, a slab of chunks at a time."""
    fn = batched(fn, num_axes)
    slab = max(1, SLAB_TOKENS // chunk)
    if jax.tree.leaves(xs)[0].shape[0] <= slab:
        return jax.vmap(fn)(xs)
    return lax.map(fn, xs, batch_size=slab)


def _split_inputs(k_idx, k_val, g, q_idx, q_val, chunk: int) -> tuple:
    fills = (-1, 0, 0, -1, 0)
    return tuple(split_chunks(x, chunk, fill) for x, fill in zip((k_idx, k_val, g, q_idx, q_val), fills, strict=True))


def phase1(k_idx: Any, k_val: Any, g: Any, q_idx: Any, q_val: Any, *, chunk: int, num_slots: int) -> Chunks:
    """Phase 1 of every chunk: section 3 of the specification.

    **Arguments:** `k_idx`, `k_val` `[*B, T, W]`, `g` `[*B, T, 1 or W]` in the accumulation dtype, `q_idx`,
    `q_val` `[*B, T, R]`.
    """
    num_tokens, num_axes = k_idx.shape[-2], k_idx.ndim - 2
    xs = _split_inputs(k_idx, k_val, g, q_idx, q_val, chunk)
    one = functools.partial(_phase1, num_slots=num_slots)
    out = _over_chunks(lambda xs: one(*xs), xs, num_axes, chunk)
    joined = {name: join_chunks(getattr(out, name), num_tokens) for name in ("k_eff", "k_carry", "q_eff")}
    joined["writes"] = join_chunks(out.writes[..., None], num_tokens)[..., 0]
    per_chunk = {name: jnp.moveaxis(x, 0, num_axes) for name, x in out._asdict().items() if name not in joined}
    return Chunks(**joined, **per_chunk)


def solve(a: Any, qk: Any, beta: Any, writes: Any) -> tuple[Any, Any]:
    """`x = (I + diag(beta) tril(A, -1))^-1` and `qx = qk x` of every chunk: section 3 of the specification.

    **Arguments:** `a`, `qk` `[*B, N, C, C]`, `beta` `[*B, T, 1]`, `writes` `[*B, T]`.
    """
    chunk = a.shape[-1]
    num_axes = a.ndim - 3
    beta = split_chunks(jnp.where(writes[..., None] > 0, beta, 0), chunk)  # [N, *B, C, 1]
    lower = jnp.moveaxis(beta, 0, num_axes) * jnp.tril(a, -1)

    # Row after row. The rows of `x` still to come are those of the identity, and meet zeros in `lower`.
    def row(x, xs):
        t, lower = xs
        solved = lax.dynamic_index_in_dim(x, t, axis=-2, keepdims=False)
        solved = solved - jnp.sum(lower[..., None] * x, axis=-2)
        return lax.dynamic_update_index_in_dim(x, solved, t, axis=x.ndim - 2), None

    identity = jnp.broadcast_to(lax.expand_dims(jnp.eye(chunk, dtype=a.dtype), range(a.ndim - 2)), a.shape)
    xs = (jnp.arange(chunk, dtype=jnp.int32), jnp.moveaxis(lower, -2, 0))
    x, _ = lax.scan(row, identity, xs)
    return x, jnp.matmul(qk, x, precision=lax.Precision.HIGHEST)


def phase1_backward(
    k_idx: Any,
    k_val: Any,
    g: Any,
    q_idx: Any,
    q_val: Any,
    chunks: Chunks,
    da: Any,
    dqk: Any,
    dk_eff: Any,
    dk_carry: Any,
    dq_eff: Any,
    ddecay: Any,
    *,
    chunk: int,
    num_slots: int,
) -> tuple[Any, Any, Any]:
    """The backward of `phase1`: the last formulas of section 4 of the specification.

    **Arguments:** those of `phase1`, its results, their gradients; `ddecay` is that of the log of `decay`.

    **Returns:** the gradients of `k_val`, `g` and `q_val` in the accumulation dtype; 0 for dropped entries.
    """
    num_tokens, num_axes = k_idx.shape[-2], k_idx.ndim - 2
    per_chunk = (chunks.slots, chunks.starts, chunks.order)
    slots, starts, order, da, dqk, ddecay = (jnp.moveaxis(x, num_axes, 0) for x in (*per_chunk, da, dqk, ddecay))
    k_carry, dk_eff, dk_carry, dq_eff = (split_chunks(x, chunk) for x in (chunks.k_carry, dk_eff, dk_carry, dq_eff))
    xs = _split_inputs(k_idx, k_val, g, q_idx, q_val, chunk)
    xs = (*xs, slots, starts, order, k_carry, da, dqk, dk_eff, dk_carry, dq_eff, ddecay)
    one = functools.partial(_phase1_backward, num_slots=num_slots)
    out = _over_chunks(lambda xs: one(*xs), xs, num_axes, chunk)
    return tuple(join_chunks(x, num_tokens) for x in out)
