"""Causal attention with rotary positions, over a sliding window or over the whole sequence, with a cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sdm_jax._layout import BANK_DTYPES
from sdm_jax.checks import is_array
from sdm_jax.flax import _settings

_ROTARY_BASE = 10_000.0


def attention_heads(value: Any, dim: int, name: str = "num_heads", dim_name: str = "dim") -> int:
    """The number of attention heads: a divisor of `dim` that gives them an even width, as rotary positions need.

    Raises:
        TypeError: it is not an integer.
        ValueError: it gives them no width, or an odd one; the message calls it `name`, and `dim` `dim_name`.
    """
    if dim % 2:
        raise ValueError(
            f"{dim_name} must be even with attention layers, got {dim}; the nearest valid value is {dim + 1}"
        )
    number = _settings.integer(name, value, 1, dim // 2)
    if dim % (2 * number):
        nearest = min((n for n in range(1, dim // 2 + 1) if dim % (2 * n) == 0), key=lambda n: abs(n - number))
        raise ValueError(
            f"{name} must divide {dim_name} ({dim}) into heads of an even width, got {number}"
            f"; the nearest valid value is {nearest}"
        )
    return number


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionState:
    """The keys and values that the next tokens of every sequence may attend to; a pytree.

    Attributes:
        keys: `[B, L, heads, width]`, rotated. With a window, those of the last `L = window` tokens, the
            newest last; without, those of token `i` at `i` and room for `L` tokens in all.
        values: `[B, L, heads, width]`, in the same places.
        tokens: int32 scalar, how many tokens every sequence has seen.
    """

    keys: jax.Array
    values: jax.Array
    tokens: jax.Array


class Attention(nnx.Module):
    """Causal multi-head attention with rotary positions and normalised queries and keys.

    With a `window`, token `t` attends to the tokens `t - window + 1 ... t`, and time and memory grow
    linearly with the length of the sequence.

    Arguments:
        dim: width of the features.
        num_heads: attention heads; their width `dim / num_heads` must be even.
        window: how many tokens, itself included, a token attends to; None: all before it.
        dtype: dtype of the computation; scores are float32 (float64) in any case. None: `param_dtype`.
        param_dtype: dtype of the parameters.
        kernel_init: initializer of the projections; by default that of `nnx.Linear`.
        rngs: random streams; `params` is used.

    Raises:
        TypeError: a setting has the wrong type.
        ValueError: a setting is out of range; the message names it and the nearest valid value.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window: int | None = None,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: nnx.Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        self.dim = _settings.integer("dim", dim, 1)
        self.num_heads = attention_heads(num_heads, self.dim)
        self.head_dim = self.dim // self.num_heads
        self.window = None if window is None else _settings.integer("window", window, 1)
        param_dtype = _settings.float_dtype("param_dtype", param_dtype, BANK_DTYPES)
        self.dtype = _settings.float_dtype("dtype", param_dtype if dtype is None else dtype, BANK_DTYPES)
        if kernel_init is None:
            kernel_init = nnx.initializers.lecun_normal()
        _settings.initializer("kernel_init", kernel_init)
        _settings.random_streams("rngs", rngs)

        def projection(columns):
            linear = nnx.Linear(
                self.dim,
                columns,
                use_bias=False,
                dtype=self.dtype,
                param_dtype=param_dtype,
                kernel_init=kernel_init,
                rngs=rngs,
            )
            _settings.initialized("kernel_init", linear.kernel, (self.dim, columns))
            return linear

        def norm():
            return nnx.RMSNorm(self.head_dim, dtype=self.dtype, param_dtype=param_dtype, rngs=rngs)

        self.query_key_value = projection(3 * self.dim)
        self.query_norm = norm()
        self.key_norm = norm()
        self.output = projection(self.dim)

    def init_state(self, batch: int, max_length: int | None = None) -> AttentionState:
        """The state of `batch` sequences that have seen no token.

        Without a window it has room for `max_length` tokens in all, which then must be given.
        """
        _settings.integer("batch", batch, 0)
        if max_length is not None:
            _settings.integer("max_length", max_length, 0)
        length = max_length if self.window is None else self.window
        if length is None:
            raise ValueError("max_length must be given for attention without a window: its cache does not move")
        shape = (batch, length, self.num_heads, self.head_dim)
        # Two arrays: a buffer cannot be donated twice.
        keys, values = jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)
        return AttentionState(keys=keys, values=values, tokens=jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array, state: AttentionState | None = None) -> tuple[jax.Array, AttentionState | None]:
        """Attends from the next tokens of every sequence.

        Arguments:
            x: features, `[B, T, dim]`.
            state: the tokens before them; None: there are none. Without a window it must have room for
                `T` more: the output of a piece that does not fit is NaN.

        Returns:
            `(y, state)`: `y [B, T, dim]`, and the state after these tokens (None if none was given).

        Raises:
            TypeError: `x` is no floating-point array, or `state` no `AttentionState` of the layer's dtype.
            ValueError: `x` or `state` do not have the shapes above, or `T` is more than an empty state has room for.
        """
        _settings.features("x", x, self.dim)
        batch, num_tokens, _ = x.shape
        if state is not None:
            self._check_state(state, x.shape)
        if num_tokens == 0:
            return x.astype(self.dtype), state
        qkv = self.query_key_value(x).reshape(batch, num_tokens, 3, self.num_heads, self.head_dim)
        query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        start = jnp.zeros((), jnp.int32) if state is None else state.tokens
        positions = start + jnp.arange(num_tokens, dtype=jnp.int32)
        query = _rotate(self.query_norm(query), positions)
        key = _rotate(self.key_norm(key), positions)
        if self.window is not None:
            y, state = self._near(query, key, value, self.window, start, state)
        elif state is None:
            y = _attend(query, key, value, jnp.tri(num_tokens, dtype=bool))
        else:
            y, state = self._all(query, key, value, positions, state)
        return self.output(y.reshape(batch, num_tokens, self.dim)), state

    def _check_state(self, state, x_shape):
        if not isinstance(state, AttentionState):
            raise TypeError(
                f"state must be an AttentionState, as init_state gives it, or None, got {type(state).__name__}"
            )
        length = "L" if self.window is None else self.window
        for name in ("keys", "values"):
            value = getattr(state, name)
            if not is_array(value) or value.dtype != self.dtype:
                got = value.dtype if is_array(value) else type(value).__name__
                raise TypeError(f"state.{name} must be an array of {self.dtype}, got {got}")
            shape = (x_shape[0], value.shape[1] if length == "L" and value.ndim > 1 else length, self.num_heads)
            if value.shape != (*shape, self.head_dim):
                raise ValueError(
                    f"state.{name} must be [{x_shape[0]}, {length}, {self.num_heads}, {self.head_dim}] for x of shape "
                    f"{x_shape}, got {value.shape}"
                )

    def _all(self, query, key, value, positions, state):
        num_tokens, length = query.shape[1], state.keys.shape[1]
        if num_tokens > length:
            raise ValueError(f"the cache was made for max_length={length} tokens, got {num_tokens} at once")
        keys = jax.lax.dynamic_update_slice_in_dim(state.keys, key, state.tokens, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(state.values, value, state.tokens, axis=1)
        seen = jnp.arange(keys.shape[1])[None, :] <= positions[:, None]
        y = _attend(query, keys, values, seen)
        tokens = state.tokens + num_tokens
        # How many came before is known only when it runs; wrong numbers would not be noticed, NaN is.
        return jnp.where(tokens <= length, y, jnp.nan), AttentionState(keys=keys, values=values, tokens=tokens)

    def _near(self, query, key, value, window, start, state):
        """Blocks of at most `window` tokens; each attends to itself and to the `window` tokens before it."""
        batch, num_tokens, heads, width = query.shape
        block = min(window, num_tokens)
        num_blocks = -(-num_tokens // block)

        def with_past(x, past):
            if past is None:
                past = jnp.zeros((batch, window, heads, width), x.dtype)
            return jnp.concatenate([past, x], axis=1)

        keys = with_past(key, None if state is None else state.keys)
        values = with_past(value, None if state is None else state.values)
        if state is not None:
            state = AttentionState(keys=keys[:, num_tokens:], values=values[:, num_tokens:], tokens=start + num_tokens)

        def pad(x):
            return jnp.pad(x, ((0, 0), (0, num_blocks * block - num_tokens), (0, 0), (0, 0)))

        def spans(x):  # [B, blocks, window + block, heads, width]
            if num_blocks == 1:
                return x[:, None]
            x = pad(x).reshape(batch, num_blocks + 1, window, heads, width)
            return jnp.concatenate([x[:, :-1], x[:, 1:]], axis=2)

        query = pad(query).reshape(batch, num_blocks, block, heads, width)
        back = jnp.arange(block)[:, None] + window - jnp.arange(window + block)[None, :]
        near = (back >= 0) & (back < window)
        # Only the first block can look back to before the first token.
        known = (jnp.arange(window + block) + start >= window)[None, :] | (jnp.arange(num_blocks) > 0)[:, None]
        mask = near[None] & known[:, None]
        y = _attend(query, spans(keys), spans(values), mask[:, None])
        return y.reshape(batch, num_blocks * block, heads, width)[:, :num_tokens], state


def _rotate(x, positions):
    """Rotary positions: `x [B, T, heads, width]`, `positions [T]`."""
    half = x.shape[-1] // 2
    acc = jnp.promote_types(x.dtype, jnp.float32)
    frequencies = _ROTARY_BASE ** (-jnp.arange(half, dtype=acc) / half)
    angles = positions.astype(acc)[:, None, None] * frequencies[None, None, :]
    cos, sin = jnp.cos(angles)[None].astype(x.dtype), jnp.sin(angles)[None].astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _attend(query, key, value, mask):
    """Attention of `query [..., q, heads, width]` over `key` and `value [..., k, heads, width]`.

    `mask [..., heads or 1, q, k]` or `[q, k]` says which keys a query sees; each sees at least one.
    """
    acc = jnp.promote_types(query.dtype, jnp.float32)
    # The CPU backend multiplies batches of plain matrices fastest.
    query, key, value = (jnp.moveaxis(x, -2, -3) for x in (query, key, value))
    query = query * query.shape[-1] ** -0.5
    scores = jnp.einsum("...qd,...kd->...qk", query, key, preferred_element_type=acc)
    mask = mask.reshape((1,) * (scores.ndim - mask.ndim) + mask.shape)
    scores = jnp.where(mask, scores, -jnp.inf)
    # A softmax that divides the readings instead of the weights, of which there are more.
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    total = weights.sum(axis=-1, keepdims=True)
    y = jnp.matmul(weights.astype(value.dtype), value, preferred_element_type=acc) / total
    return jnp.moveaxis(y.astype(value.dtype), -3, -2)
