"""The operation `write_read`: checks, dtypes, and its derivative rule."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sdm_jax import _calls, checks, reference
from sdm_jax._layout import accumulate_dtype, has_scales
from sdm_jax._sharding import vary_alike


class CallSettings(NamedTuple):
    """What the derivative rules have to know beside the arrays; hashable."""

    chunk: int
    snapshot_quant: str
    grad_bank_dtype: str | None
    implementation: str | None
    dtypes: tuple[str, ...]  # of k_val, v, beta, g and q_val, as the caller gave them


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
    implementation: str | None = None,
) -> tuple[Any, Any]:
    """Takes streams of tokens through their banks: each token decays and writes a few slots, then reads a few.

    Sections 1 and 2 of the specification. `*B` are any leading axes (streams); `S` slots, `D` columns, `T`
    tokens, `W` writes and `R` reads a token. Differentiable once in reverse mode with respect to every
    floating-point argument; the new bank is a differentiable output too. The caller's bank never changes; where
    the call is jitted with the bank donated, the new bank takes its buffer without a copy.

    **Arguments:**

    - `bank`: `[*B, S, D]`, float32, bfloat16 or float64. Its dtype is that of the readings.
    - `k_idx`: `[*B, T, W]` integers, the slots written. An id outside `[0, S)` is a dropped entry: it reads,
      writes and decays nothing, and its weight and gate are never looked at. `-1` is the padding value.
    - `k_val`: `[*B, T, W]` floating point, write weights.
    - `v`: `[*B, T, D]`, values.
    - `beta`: `[*B, T, 1]`, write strengths (input gates).
    - `g`: `[*B, T, 1]` or `[*B, T, W]`, natural logarithms of the forget gates, one a token or one a write;
      `-inf` erases a slot exactly. A slot that a token names more than once decays once, by the gate of its first
      entry.
    - `q_idx`, `q_val`: `[*B, T, R]`, the slots read (after the token's write) and their weights.
    - `chunk_size`: tokens of a chunk, 16 to 256. Changes results only by rounding.
    - `snapshot_quant`: how the rows that the backward needs are kept: `"none"` (the bank's dtype), `"bf16"`,
      `"fp8"` or `"int4"` (section 5). The forward is the same bit for bit; gradients of `k_val`, `g` and
      `q_val` become approximate in lossy modes.
    - `grad_bank_dtype`: dtype that the bank's gradient is carried in; None (the bank's) or float32.
    - `shared_bank`: several streams use one bank: `bank [*A, S, D]` with tokens `[*A, *B, T, ...]`. The caller
      asserts that no two streams of `*B` name one slot.
    - `implementation`: None (the best for the platform that the computation is lowered for), `"cpu"`,
      `"cuda"`, `"xla"` (plain JAX) or `"reference"` (the plain token loop).

    **Returns:** `(y, new_bank)`: readings `[*B, T, D]` in the bank's dtype, and the bank after the last token.

    **Raises:** TypeError or ValueError, while tracing, for arguments or settings that do not fit;
    `UnsupportedConfigurationError` where `implementation` cannot serve. `sdm_jax.check_inputs` looks at values.
    """
    operands = [bank, k_idx, k_val, v, beta, g, q_idx, q_val]
    settings = checks.settings(
        getattr(bank, "dtype", jnp.float32),
        chunk_size=chunk_size,
        snapshot_quant=snapshot_quant,
        grad_bank_dtype=grad_bank_dtype,
        shared_bank=shared_bank,
        implementation=implementation,
    )
    sizes = checks.arguments(*operands, chunk_size=settings.chunk_size, shared_bank=settings.shared_bank)
    bank, k_idx, k_val, v, beta, g, q_idx, q_val = operands = as_operands(*operands)
    if settings.implementation == "reference":
        return reference.write_read(*operands, chunk_size=settings.chunk_size, shared_bank=settings.shared_bank)
    if sizes.num_tokens == 0 or sizes.num_streams == 0:
        return jnp.zeros(v.shape, bank.dtype), bank
    call = CallSettings(
        chunk=sizes.chunk,
        snapshot_quant=settings.snapshot_quant,
        grad_bank_dtype=settings.grad_bank_dtype,
        implementation=settings.implementation,
        dtypes=tuple(str(x.dtype) for x in (k_val, v, beta, g, q_val)),
    )
    return _write_read(call, *operands)


def as_operands(bank, k_idx, k_val, v, beta, g, q_idx, q_val) -> list[Any]:
    """Checked arguments as JAX arrays, the ids as int32."""
    num_slots = bank.shape[-2]
    k_idx, q_idx = checks.clean_ids(k_idx, num_slots), checks.clean_ids(q_idx, num_slots)
    return vary_alike([jnp.asarray(x) for x in (bank, k_idx, k_val, v, beta, g, q_idx, q_val)])


def forward_with_residuals(settings: CallSettings, bank, k_idx, k_val, v, beta, g, q_idx, q_val, *, save):
    """The forward, with every operand in the dtype of the computation; also returns those operands."""
    acc = accumulate_dtype(bank.dtype)
    k_val, v, q_val = (x.astype(bank.dtype) for x in (k_val, v, q_val))
    beta, g = beta.astype(acc), g.astype(acc)
    y, new_bank, *saved = _calls.forward(
        bank,
        k_idx,
        k_val,
        v,
        beta,
        g,
        q_idx,
        q_val,
        chunk=settings.chunk,
        snapshot_quant=settings.snapshot_quant,
        save=save,
        note=settings,
        implementation=settings.implementation,
    )
    # An array without elements is made again: XLA cannot carry one out of a `jax.shard_map`.
    saved = [x for x in saved if x.size]
    return (y, new_bank), (new_bank, k_idx, k_val, beta, g, q_idx, q_val, *saved)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _write_read(settings: CallSettings, *operands):
    return forward_with_residuals(settings, *operands, save=False)[0]


def _write_read_fwd(settings: CallSettings, *operands):
    return forward_with_residuals(settings, *operands, save=True)


def backward_with_bank(settings: CallSettings, residuals, cotangents):
    """The initial bank, restored in the buffer of the new one, and the cotangents of `write_read`'s operands."""
    new_bank, k_idx, k_val, beta, g, q_idx, q_val, *saved = residuals
    if not has_scales(settings.snapshot_quant):
        snapshot = saved[-1]
        saved.append(jnp.zeros((*snapshot.shape[:-2], 0), jnp.float32))
    dy, d_new_bank = cotangents
    restored, d_bank, dk_val, dv, dbeta, dg, dq_val = _calls.backward(
        new_bank,
        d_new_bank.astype(settings.grad_bank_dtype or new_bank.dtype),
        dy,
        k_idx,
        k_val,
        beta,
        g,
        q_idx,
        q_val,
        *saved,
        chunk=settings.chunk,
        snapshot_quant=settings.snapshot_quant,
        implementation=settings.implementation,
    )
    dk_val, dv, dbeta, dg, dq_val = (
        x.astype(dtype) for x, dtype in zip((dk_val, dv, dbeta, dg, dq_val), settings.dtypes, strict=True)
    )
    return restored, (d_bank.astype(new_bank.dtype), None, dk_val, dv, dbeta, dg, None, dq_val)


def _write_read_bwd(settings: CallSettings, residuals, cotangents):
    return backward_with_bank(settings, residuals, cotangents)[1]


_write_read.defvjp(_write_read_fwd, _write_read_bwd, optimize_remat=True)
