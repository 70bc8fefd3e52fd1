"""The operation `decode_step`: `write_read` for one token a stream."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from sdm_jax import _calls, checks, reference
from sdm_jax._layout import accumulate_dtype
from sdm_jax.write_read import as_operands, write_read


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
    implementation: str | None = None,
) -> tuple[Any, Any]:
    """One token a stream: `sdm_jax.write_read` without the axis `T` (sections 1 and 2 of the specification).

    **Arguments:** those of `write_read`: `bank [*B, S, D]`, `k_idx`, `k_val [*B, W]`, `v [*B, D]`,
    `beta [*B, 1]`, `g [*B, 1]` or `[*B, W]`, `q_idx`, `q_val [*B, R]`. Differentiable like `write_read`.

    **Returns:** `(y [*B, D], new_bank)`.

    **Raises:** as `write_read`.
    """
    operands = [bank, k_idx, k_val, v, beta, g, q_idx, q_val]
    settings = checks.settings(
        getattr(bank, "dtype", jnp.float32), shared_bank=shared_bank, implementation=implementation
    )
    sizes = checks.arguments(
        *operands, chunk_size=settings.chunk_size, shared_bank=settings.shared_bank, token_axis=False
    )
    operands = as_operands(*operands)
    if settings.implementation == "reference":
        return reference.decode_step(*operands, shared_bank=settings.shared_bank)
    if sizes.num_streams == 0:
        return jnp.zeros(v.shape, bank.dtype), operands[0]
    return _decode(settings, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _decode(settings: checks.Settings, bank, k_idx, k_val, v, beta, g, q_idx, q_val):
    acc = accumulate_dtype(bank.dtype)
    k_val, v, q_val = (x.astype(bank.dtype) for x in (k_val, v, q_val))
    beta, g = beta.astype(acc), g.astype(acc)
    y, new_bank = _calls.decode(bank, k_idx, k_val, v, beta, g, q_idx, q_val, implementation=settings.implementation)
    return y, new_bank


def _decode_fwd(settings: checks.Settings, bank, *tokens):
    # A differentiated step is a stream of one token.
    def step(bank, *tokens):
        y, new_bank = write_read(
            bank,
            *(x[..., None, :] for x in tokens),
            shared_bank=settings.shared_bank,
            implementation=settings.implementation,
        )
        return y[..., 0, :], new_bank

    return jax.vjp(step, bank, *tokens)


def _decode_bwd(settings: checks.Settings, vjp, cotangents):
    d_bank, _, dk_val, dv, dbeta, dg, _, dq_val = vjp(cotangents)
    return d_bank, None, dk_val, dv, dbeta, dg, None, dq_val


_decode.defvjp(_decode_fwd, _decode_bwd)
