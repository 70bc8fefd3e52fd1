"""The steps of `write_read` one by one, as sections 3 and 4 of the specification name them.

Each function is one custom call (plain JAX where no kernel serves), works alone under `jit` and `vmap`, and is
what the whole operation is made of:

    chunks = phase1(k_idx, k_val, g, q_idx, q_val, chunk_size=64, num_slots=S)
    x, qx = solve(chunks.a, chunks.qk, beta, chunks.writes)
    # chunk after chunk, with the arrays of that chunk:
    retrieved, inter = gather(bank, k_idx, k_eff, q_idx, q_eff)
    error, delta, y = dual_matmul(x, qx, beta, writes, v, retrieved, inter)
    bank = mover(bank, slots, starts, order, k_carry, decay, delta)

`*B` are any leading axes (streams), `[*A, S, D]` is the bank with `*A` the first of `*B` (all of them, unless the
bank is shared); `acc` is float32, or float64 for a float64 bank; `C` tokens a chunk, `N` chunks, `U` (`V`) the most
distinct slots that a chunk writes (reads). Steps of one chunk take any number of tokens `c <= C`. Ids and
positions out of range are left out and never touch memory. No step has a derivative of its own; the backward's
steps are here too. Every function takes `implementation` like `write_read`, and raises TypeError or ValueError
for arrays that do not fit each other.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from sdm_jax import _calls, checks
from sdm_jax._layout import BANK_DTYPES, SNAPSHOT_MODES, Chunks, accumulate_dtype, snapshot_row

__all__ = [
    "Chunks",
    "du_matmul",
    "dual_matmul",
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


class _Operands:
    """Checks arrays against each other: the first to name a size fixes it.

    A shape is written as its axes after the leading ones: names, or sizes.
    """

    def __init__(self, implementation: Any, **known: int):
        self.implementation = checks.choice("implementation", implementation, ("cpu", "cuda", "xla"), optional=True)
        self.known = dict(known)
        self.lead: tuple[int, ...] | None = None

    def take(self, name: str, value: Any, dtype: Any, *axes: str | int) -> Any:
        """An array over the tokens' leading axes."""
        value = self._array(name, value, dtype, axes)
        lead = tuple(value.shape[: value.ndim - len(axes)])
        if self.lead is None:
            self.lead = lead
        if lead != self.lead:
            raise ValueError(f"{name} has leading axes {list(lead)}, but the arrays before it have {list(self.lead)}.")
        return value

    def bank(self, name: str, value: Any, dtype: Any, lead_of: Any) -> Any:
        """A bank or its gradient; `lead_of` leading axes are the tokens'."""
        value = self._array(name, value, dtype, ("S", "D"))
        lead = tuple(value.shape[:-2])
        if lead != tuple(lead_of)[: len(lead)]:
            raise ValueError(f"{name} has leading axes {list(lead)}, which are not the first of {list(lead_of)}.")
        return value

    def _array(self, name: str, value: Any, dtype: Any, axes: tuple[str | int, ...]) -> Any:
        if not checks.is_array(value):
            raise TypeError(f"{name} must be an array, got {type(value).__name__}.")
        value = jnp.asarray(value)
        if value.dtype != jnp.dtype(dtype):
            raise TypeError(f"{name} must be {jnp.dtype(dtype).name}, got {value.dtype.name}.")
        if value.ndim < len(axes):
            raise ValueError(f"{name} must have shape [..., {', '.join(map(str, axes))}], got {list(value.shape)}.")
        for axis, got in zip(axes, value.shape[value.ndim - len(axes) :], strict=True):
            need = axis if isinstance(axis, int) else self.known.setdefault(axis, got)
            if got != need:
                raise ValueError(
                    f"{name} has {got} on its axis {axis}, but needs {need}; its shape is {list(value.shape)}."
                )
        return value


def _bank_dtype(name: str, value: Any) -> Any:
    if not checks.is_array(value):
        raise TypeError(f"{name} must be an array, got {type(value).__name__}.")
    if jnp.dtype(value.dtype).name not in BANK_DTYPES:
        raise TypeError(f"{name} must be one of {', '.join(BANK_DTYPES)}; got {jnp.dtype(value.dtype).name}.")
    return jnp.dtype(value.dtype)


def _lead(name: str, value: Any, tail: int) -> tuple[int, ...]:
    if not checks.is_array(value):
        raise TypeError(f"{name} must be an array, got {type(value).__name__}.")
    if value.ndim < tail:
        raise ValueError(f"{name} needs at least {tail} axes, got shape {list(value.shape)}.")
    return tuple(value.shape[:-tail])


def _take_inputs(operands: _Operands, k_idx, k_val, g, q_idx, q_val):
    dtype = _bank_dtype("k_val", k_val)
    acc = accumulate_dtype(dtype)
    k_idx = operands.take("k_idx", k_idx, jnp.int32, "T", "W")
    k_val = operands.take("k_val", k_val, dtype, "T", "W")
    gates = 1 if checks.is_array(g) and g.shape[-1:] == (1,) else "W"
    g = operands.take("g", g, acc, "T", gates)
    q_idx = operands.take("q_idx", q_idx, jnp.int32, "T", "R")
    q_val = operands.take("q_val", q_val, dtype, "T", "R")
    return k_idx, k_val, g, q_idx, q_val


def phase1(k_idx, k_val, g, q_idx, q_val, *, chunk_size: int = 64, num_slots: int, implementation=None) -> Chunks:
    """What ids, weights and gates say about each chunk without the bank (section 3).

    **Arguments:** `k_idx [*B, T, W]` int32, `k_val` alike in the bank's dtype, `g [*B, T, 1 or W]` acc, `q_idx`,
    `q_val [*B, T, R]`; `chunk_size` 1 to 256; `num_slots`, the bank's S. T and the leading axes are not 0.

    **Returns:** `Chunks`, whose fields name their shapes.
    """
    operands = _Operands(implementation)
    inputs = _take_inputs(operands, k_idx, k_val, g, q_idx, q_val)
    chunk = checks.integer("chunk_size", chunk_size, 1, checks.CHUNK_SIZES[1])
    num_slots = checks.integer("num_slots", num_slots, 1, checks.MAX_ROWS - 1)
    results = _calls.phase1(
        *inputs,
        chunk=min(chunk, max(1, operands.known["T"])),
        num_slots=num_slots,
        implementation=operands.implementation,
    )
    return Chunks(*results)


def solve(a, qk, beta, writes, *, implementation=None):
    """`x = (I + diag(beta) tril(a, -1))^-1` and `qx = qk x`, each `[*B, N, C, C]` acc (section 3).

    **Arguments:** `a`, `qk [*B, N, C, C]`, `beta [*B, T, 1]`, all acc, `writes [*B, T]` int32 as `Chunks` has them; the
    beta of a token with no write is taken as 0.
    """
    operands = _Operands(implementation)
    acc = accumulate_dtype(_bank_dtype("a", a))
    a = operands.take("a", a, acc, "N", "C", "C")
    qk = operands.take("qk", qk, acc, "N", "C", "C")
    beta = operands.take("beta", beta, acc, "T", 1)
    writes = operands.take("writes", writes, jnp.int32, "T")
    n, c, t = (operands.known[axis] for axis in ("N", "C", "T"))
    if c < 1 or n != -(-t // c):
        raise ValueError(f"a has {n} chunks of {c} tokens, which do not hold the {t} tokens of beta.")
    return _calls.solve(a, qk, beta, writes, implementation=operands.implementation)


def gather(bank, k_idx, k_eff, q_idx, q_eff, *, implementation=None):
    """Weighted sums of the bank rows that one chunk's tokens name (section 3).

    **Arguments:** `bank [*A, S, D]`, `k_idx [*B, C, W]` int32, `k_eff` alike acc, `q_idx`, `q_eff [*B, C, R]`.

    **Returns:** `retrieved`, `inter`, each `[*B, C, D]` acc: the sums of the write and of the read entries.
    """
    operands = _Operands(implementation)
    dtype = _bank_dtype("bank", bank)
    acc = accumulate_dtype(dtype)
    bank = operands.bank("bank", bank, dtype, _lead("k_idx", k_idx, 2))
    k_idx = operands.take("k_idx", k_idx, jnp.int32, "C", "W")
    k_eff = operands.take("k_eff", k_eff, acc, "C", "W")
    q_idx = operands.take("q_idx", q_idx, jnp.int32, "C", "R")
    q_eff = operands.take("q_eff", q_eff, acc, "C", "R")
    return _calls.gather(bank, k_idx, k_eff, q_idx, q_eff, implementation=operands.implementation)


def take_snapshot(bank, slots, *, snapshot_quant: str = "none", implementation=None):
    """The rows of one chunk's slots as a snapshot keeps them (section 5).

    **Arguments:** `bank [*A, S, D]`, `slots [*B, U]` int32, `-1` after the last.

    **Returns:** rows `[*B, U, row]` (unspecified beyond the last slot) and float32 scales `[*B, U]`, or `[*B, 0]` in
    modes without.
    """
    operands = _Operands(implementation)
    dtype = _bank_dtype("bank", bank)
    mode = checks.choice("snapshot_quant", snapshot_quant, SNAPSHOT_MODES)
    bank = operands.bank("bank", bank, dtype, _lead("slots", slots, 1))
    slots = operands.take("slots", slots, jnp.int32, "U")
    return _calls.take_snapshot(bank, slots, snapshot_quant=mode, implementation=operands.implementation)


def dual_matmul(x, qx, beta, writes, v, retrieved, inter, *, implementation=None):
    """`error = v - retrieved`, `delta = x (beta error)`, `y = inter + qx (beta error)` of one chunk (section 3).

    **Arguments:** `x`, `qx [*B, C, C]`, `beta [*B, C, 1]`, `retrieved`, `inter [*B, C, D]` acc, `writes [*B, C]` int32,
    `v [*B, C, D]` in the bank's dtype. A token with no write has error 0, whatever its `v` and `beta`.

    **Returns:** `error`, `delta` `[*B, C, D]` acc, and `y` in the dtype of `v`.
    """
    operands = _Operands(implementation)
    dtype = _bank_dtype("v", v)
    acc = accumulate_dtype(dtype)
    x = operands.take("x", x, acc, "C", "C")
    qx = operands.take("qx", qx, acc, "C", "C")
    beta = operands.take("beta", beta, acc, "C", 1)
    writes = operands.take("writes", writes, jnp.int32, "C")
    v = operands.take("v", v, dtype, "C", "D")
    retrieved = operands.take("retrieved", retrieved, acc, "C", "D")
    inter = operands.take("inter", inter, acc, "C", "D")
    return _calls.dual_matmul(x, qx, beta, writes, v, retrieved, inter, implementation=operands.implementation)


def _take_slots(operands: _Operands, slots, starts, order, names: tuple[str, str, str], most: int, entries: int):
    slots = operands.take(names[0], slots, jnp.int32, most)
    starts = operands.take(names[1], starts, jnp.int32, most + 1)
    order = operands.take(names[2], order, jnp.int32, entries)
    return slots, starts, order


def mover(bank, slots, starts, order, k_carry, decay, delta, *, implementation=None):
    """Decays and writes the slots of one chunk: the new bank, in place of a donated one (section 3).

    **Arguments:** `bank [*A, S, D]`; one chunk of `Chunks`: `slots`, `decay [*B, U]`, `starts [*B, U + 1]`,
    `order [*B, C * W]`, `k_carry [*B, C, W]`, with `U = min(C W, S)`; `delta [*B, C, D]` acc.
    """
    operands = _Operands(implementation)
    dtype = _bank_dtype("bank", bank)
    acc = accumulate_dtype(dtype)
    bank = operands.bank("bank", bank, dtype, _lead("k_carry", k_carry, 2))
    k_carry = operands.take("k_carry", k_carry, acc, "C", "W")
    entries = operands.known["C"] * operands.known["W"]
    most = min(entries, operands.known["S"])
    slots, starts, order = _take_slots(operands, slots, starts, order, ("slots", "starts", "order"), most, entries)
    decay = operands.take("decay", decay, acc, most)
    delta = operands.take("delta", delta, acc, "C", "D")
    implementation = operands.implementation
    return _calls.mover(bank, slots, starts, order, k_carry, decay, delta, implementation=implementation)[0]


def gather_gradient(d_bank, k_idx, k_carry, *, implementation=None):
    """`sum of k_carry dM[slot]` over each token's writes, `[*B, C, D]` acc (section 4).

    **Arguments:** `d_bank [*A, S, D]`, the gradient of the bank after the chunk; `k_idx [*B, C, W]` int32, `k_carry`
    alike acc.
    """
    operands = _Operands(implementation)
    dtype = _bank_dtype("d_bank", d_bank)
    d_bank = operands.bank("d_bank", d_bank, dtype, _lead("k_idx", k_idx, 2))
    k_idx = operands.take("k_idx", k_idx, jnp.int32, "C", "W")
    k_carry = operands.take("k_carry", k_carry, accumulate_dtype(dtype), "C", "W")
    return _calls.gather_gradient(d_bank, k_idx, k_carry, implementation=operands.implementation)[0]


def du_matmul(a, qk, x, beta, writes, dy, carried, error, delta, *, implementation=None):
    """The backward of the dual matmul of one chunk (section 4).

    **Arguments:** `a`, `qk`, `x [*B, C, C]`, `beta [*B, C, 1]`, `carried` (of `gather_gradient`), `error`,
    `delta [*B, C, D]` acc; `writes [*B, C]` int32; `dy [*B, C, D]` in the bank's dtype.

    **Returns:** `dv [*B, C, D]` (the gradient of `retrieved` is `-dv`), `dbeta [*B, C, 1]`, `da`, `dqk [*B, C, C]`,
    all acc.
    """
    operands = _Operands(implementation)
    dtype = _bank_dtype("dy", dy)
    acc = accumulate_dtype(dtype)
    a = operands.take("a", a, acc, "C", "C")
    qk = operands.take("qk", qk, acc, "C", "C")
    x = operands.take("x", x, acc, "C", "C")
    beta = operands.take("beta", beta, acc, "C", 1)
    writes = operands.take("writes", writes, jnp.int32, "C")
    dy = operands.take("dy", dy, dtype, "C", "D")
    carried = operands.take("carried", carried, acc, "C", "D")
    error = operands.take("error", error, acc, "C", "D")
    delta = operands.take("delta", delta, acc, "C", "D")
    implementation = operands.implementation
    return _calls.du_matmul(a, qk, x, beta, writes, dy, carried, error, delta, implementation=implementation)


def _take_d_bank(operands: _Operands, d_bank: Any, dtype: Any, lead: tuple[int, ...]) -> Any:
    grad = _bank_dtype("d_bank", d_bank)
    if grad != dtype and not (dtype == jnp.bfloat16 and grad == jnp.float32):
        raise TypeError(
            f"d_bank must have the bank's dtype {dtype.name}, or float32 for a bfloat16 bank; got {grad.name}."
        )
    return operands.bank("d_bank", d_bank, grad, lead)


def write_mover_backward(
    bank,
    d_bank,
    slots,
    starts,
    order,
    decay,
    k_eff,
    snapshot,
    scale,
    delta,
    dv,
    *,
    snapshot_quant="none",
    implementation=None,
):
    """Restores the rows that one chunk wrote and takes their gradients back through it (section 4).

    **Arguments:** `bank [*A, S, D]` after the chunk, `d_bank` its gradient (bank dtype, or float32 for a bfloat16
    bank); one chunk of `Chunks`: `slots`, `starts`, `order`, `decay`, `k_eff`; `snapshot`, `scale` of `take_snapshot`;
    `delta` of `dual_matmul` and `dv` of `du_matmul`.

    **Returns:** the restored bank, the gradient of the bank but for the reads, `dk_eff`, `dk_carry [*B, C, W]` and
    `ddecay [*B, U]` (the gradient of the logarithm of `decay`), all acc.
    """
    operands = _Operands(implementation)
    dtype = _bank_dtype("bank", bank)
    acc = accumulate_dtype(dtype)
    mode = checks.choice("snapshot_quant", snapshot_quant, SNAPSHOT_MODES)
    lead = _lead("k_eff", k_eff, 2)
    bank = operands.bank("bank", bank, dtype, lead)
    d_bank = _take_d_bank(operands, d_bank, dtype, lead)
    k_eff = operands.take("k_eff", k_eff, acc, "C", "W")
    entries = operands.known["C"] * operands.known["W"]
    most = min(entries, operands.known["S"])
    slots, starts, order = _take_slots(operands, slots, starts, order, ("slots", "starts", "order"), most, entries)
    decay = operands.take("decay", decay, acc, most)
    row, row_dtype, scaled = snapshot_row(mode, dtype, operands.known["D"])
    snapshot = operands.take("snapshot", snapshot, row_dtype, most, row)
    scale = operands.take("scale", scale, jnp.float32, most if scaled else 0)
    delta = operands.take("delta", delta, acc, "C", "D")
    dv = operands.take("dv", dv, acc, "C", "D")
    return _calls.write_mover_backward(
        bank,
        d_bank,
        slots,
        starts,
        order,
        decay,
        k_eff,
        snapshot,
        scale,
        delta,
        dv,
        snapshot_quant=mode,
        implementation=operands.implementation,
    )


def read_mover_backward(bank, d_bank, read_slots, read_starts, read_order, q_eff, dy, *, implementation=None):
    """Takes the gradients of one chunk's reads back (section 4), after `write_mover_backward`.

    **Arguments:** the restored `bank [*A, S, D]` and `d_bank`; one chunk of `Chunks`: `read_slots`, `read_starts`,
    `read_order`, `q_eff`; `dy [*B, C, D]` in the bank's dtype.

    **Returns:** the gradient of the bank before the chunk, and `dq_eff [*B, C, R]` acc.
    """
    operands = _Operands(implementation)
    dtype = _bank_dtype("bank", bank)
    acc = accumulate_dtype(dtype)
    lead = _lead("q_eff", q_eff, 2)
    bank = operands.bank("bank", bank, dtype, lead)
    d_bank = _take_d_bank(operands, d_bank, dtype, lead)
    q_eff = operands.take("q_eff", q_eff, acc, "C", "R")
    entries = operands.known["C"] * operands.known["R"]
    lists = _take_slots(
        operands,
        read_slots,
        read_starts,
        read_order,
        ("read_slots", "read_starts", "read_order"),
        min(entries, operands.known["S"]),
        entries,
    )
    dy = operands.take("dy", dy, dtype, "C", "D")
    return _calls.read_mover_backward(bank, d_bank, *lists, q_eff, dy, implementation=operands.implementation)


def phase1_backward(
    k_idx,
    k_val,
    g,
    q_idx,
    q_val,
    chunks: Chunks,
    da,
    dqk,
    dk_eff,
    dk_carry,
    dq_eff,
    ddecay,
    *,
    num_slots: int,
    implementation=None,
):
    """The backward of `phase1` (section 4).

    **Arguments:** those of `phase1` and its result; gradients of `a`, `qk [*B, N, C, C]`, `k_eff`,
    `k_carry [*B, T, W]`, `q_eff [*B, T, R]`, and of the logarithm of `decay [*B, N, U]`, all acc.

    **Returns:** gradients of `k_val`, `g` and `q_val`, acc; exactly 0 for dropped entries.
    """
    operands = _Operands(implementation)
    inputs = _take_inputs(operands, k_idx, k_val, g, q_idx, q_val)
    num_slots = checks.integer("num_slots", num_slots, 1, checks.MAX_ROWS - 1)
    if not isinstance(chunks, Chunks):
        raise TypeError(f"chunks must be the Chunks that phase1 returns, got {type(chunks).__name__}.")
    acc = inputs[2].dtype
    chunk = jnp.shape(chunks.a)[-1] if jnp.ndim(chunks.a) else 0
    expected = _calls.phase1_results(*inputs, chunk=max(1, chunk), num_slots=num_slots)
    chunks = Chunks(*map(jnp.asarray, chunks))
    for name, value, need in zip(Chunks._fields, chunks, expected, strict=True):
        if value.shape != need.shape or value.dtype != need.dtype:
            raise ValueError(
                f"chunks.{name} must be {need.dtype.name}{list(need.shape)}, got {value.dtype.name}{list(value.shape)}."
            )
    da = operands.take("da", da, acc, *chunks.a.shape[-3:])
    dqk = operands.take("dqk", dqk, acc, *chunks.a.shape[-3:])
    dk_eff = operands.take("dk_eff", dk_eff, acc, "T", "W")
    dk_carry = operands.take("dk_carry", dk_carry, acc, "T", "W")
    dq_eff = operands.take("dq_eff", dq_eff, acc, "T", "R")
    ddecay = operands.take("ddecay", ddecay, acc, *chunks.decay.shape[-2:])
    return _calls.phase1_backward(
        *inputs,
        *chunks,
        da,
        dqk,
        dk_eff,
        dk_carry,
        dq_eff,
        ddecay,
        chunk=chunk,
        num_slots=num_slots,
        implementation=operands.implementation,
    )
