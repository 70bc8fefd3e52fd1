"""Storage formats of snapshot rows: section 5 of the specification."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

_LARGEST = {"fp8": 448.0, "int4": 7.0}  # the value that the largest element of a row is scaled to
_SMALLEST_SCALE = 1e-12


def _round_bfloat16(x: Any) -> Any:
    # Not a pair of casts, which XLA may remove as excess precision.
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _row_scale(rows: Any, mode: str) -> Any:
    """float32 scale of every row; NaN for a row with an element that is not finite."""
    amax = jnp.max(jnp.abs(rows), axis=-1)
    # Behind the barrier the divisor is no constant: XLA would multiply by its rounded reciprocal.
    largest = lax.optimization_barrier(jnp.full(amax.shape, _LARGEST[mode], jnp.float32))
    scale = _round_bfloat16(jnp.maximum(amax / largest, _SMALLEST_SCALE))
    # Not by `amax`: the vectorised maximum of a CPU may lose a NaN.
    return jnp.where(jnp.all(jnp.isfinite(rows), axis=-1), scale, jnp.nan)


def quantize(rows: Any, mode: str) -> tuple[Any, Any]:
    """Rows of a bank as the snapshot stores them.

    **Arguments:**

    - `rows`: `[..., D]`, of a bank dtype.
    - `mode`: `"none"`, `"bf16"`, `"fp8"` or `"int4"`.

    **Returns:** `(stored, scale)`. `stored` is `[..., D]`, or `[..., ceil(D / 2)]` uint8 for `"int4"` with
    the even column in the low nibble; `scale` is float32 `[...]` for `"fp8"` and `"int4"`, else None. A row
    with an element that is not finite gets a NaN scale, and so is NaN when it is restored.
    """
    if mode == "none":
        return rows, None
    rows = rows.astype(jnp.float32)
    if mode == "bf16":
        return _round_bfloat16(rows).astype(jnp.bfloat16), None
    scale = _row_scale(rows, mode)
    scaled = rows / scale[..., None]
    if mode == "fp8":
        largest = _LARGEST[mode]
        # The barrier keeps the narrowing cast when the rows are widened again in the same program.
        return lax.optimization_barrier(jnp.clip(scaled, -largest, largest).astype(jnp.float8_e4m3fn)), scale
    scaled = jnp.where(jnp.isnan(scaled), 0, jnp.clip(jnp.round(scaled), -8, 7))
    nibbles = scaled.astype(jnp.int8).astype(jnp.uint8) & 15
    if rows.shape[-1] % 2:
        nibbles = jnp.pad(nibbles, [(0, 0)] * (rows.ndim - 1) + [(0, 1)])
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), scale


def dequantize(stored: Any, scale: Any, mode: str, dtype: Any, width: int) -> Any:
    """Rows `[..., width]` of dtype `dtype` from what `quantize` returned."""
    if mode in ("none", "bf16"):
        return stored.astype(dtype)
    if mode == "fp8":
        rows = stored.astype(jnp.float32)
    else:
        low = (stored << 4).astype(jnp.int8) >> 4  # the shift back extends the sign
        high = stored.astype(jnp.int8) >> 4
        rows = jnp.stack([low, high], axis=-1).reshape(*stored.shape[:-1], 2 * stored.shape[-1])
        rows = rows[..., :width].astype(jnp.float32)
    return (rows * scale[..., None]).astype(dtype)
