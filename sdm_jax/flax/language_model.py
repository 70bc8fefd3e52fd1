"""A small language model of Sparse Delta Memory and attention layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sdm_jax._layout import BANK_DTYPES
from sdm_jax.flax import _settings
from sdm_jax.flax.attention import Attention
from sdm_jax.flax.layer import SparseDeltaMemory

LAYER_KINDS = ("sdm", "swa", "attention")

Cache = tuple[Any, ...]
"""What the layers carry between pieces of a sequence, one state a layer; a pytree."""


@dataclasses.dataclass(frozen=True)
class LanguageModelConfig:
    """Settings of a `LanguageModel`.

    Attributes:
        layers: the mixer of every block, first to last: `"sdm"` (Sparse Delta Memory), `"swa"`
            (sliding-window attention) or `"attention"` (over the whole sequence).
        dim: width of the features.
        vocab_size: number of tokens; 256 for bytes.
        num_heads: heads of the attention layers.
        window: how many tokens, itself included, a token attends to in a `"swa"` layer.
        hidden_dim: width of the SwiGLU layers; None: 8/3 of `dim`, rounded up to a multiple of 32.
        memory: keyword arguments of `SparseDeltaMemory` for the `"sdm"` layers.
        dtype: dtype of the computation; None: `param_dtype`.
        param_dtype: dtype of the parameters.
    """

    layers: Sequence[str] = ("swa", "swa", "sdm", "swa")
    dim: int = 128
    vocab_size: int = 256
    num_heads: int = 4
    window: int = 64
    hidden_dim: int | None = None
    memory: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dtype: str | None = None
    param_dtype: str = "float32"


class SwiGLU(nnx.Module):
    """The gated feed-forward layer: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, dim: int, hidden_dim: int, *, rngs: nnx.Rngs, **settings: Any):
        self.gate_up = nnx.Linear(dim, 2 * hidden_dim, use_bias=False, rngs=rngs, **settings)
        self.down = nnx.Linear(hidden_dim, dim, use_bias=False, rngs=rngs, **settings)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class Block(nnx.Module):
    """A pre-norm residual block: a sequence mixer, then a SwiGLU layer."""

    def __init__(self, kind: str, config: LanguageModelConfig, *, rngs: nnx.Rngs):
        settings: dict[str, Any] = {
            "dtype": jnp.dtype(config.dtype or config.param_dtype),
            "param_dtype": jnp.dtype(config.param_dtype),
        }
        dim = config.dim
        hidden_dim = config.hidden_dim or -(-8 * dim // 96) * 32
        self.mixer_norm = nnx.RMSNorm(dim, rngs=rngs, **settings)
        self.mixer: SparseDeltaMemory | Attention
        if kind == "sdm":
            self.mixer = SparseDeltaMemory(dim, rngs=rngs, **(settings | dict(config.memory)))
        else:
            window = config.window if kind == "swa" else None
            self.mixer = Attention(dim, config.num_heads, window, rngs=rngs, **settings)
        self.feed_forward_norm = nnx.RMSNorm(dim, rngs=rngs, **settings)
        self.feed_forward = SwiGLU(dim, hidden_dim, rngs=rngs, **settings)

    def __call__(self, x: jax.Array, state: Any = None) -> tuple[jax.Array, Any]:
        y, state = self.mixer(self.mixer_norm(x), state)
        x = x + y
        return x + self.feed_forward(self.feed_forward_norm(x)), state


class LanguageModel(nnx.Module):
    """A causal language model: an embedding, pre-norm blocks, and a head tied to the embedding.

    `logits, cache = model(tokens, cache)` continues where `cache` stopped; a text may be given in pieces
    of any length, or at once.

    Arguments:
        config: the settings.
        rngs: random streams; `params` is used.

    Raises:
        TypeError: a setting has the wrong type.
        ValueError: a setting is out of range; the message names it and the nearest valid value.
    """

    def __init__(self, config: LanguageModelConfig, *, rngs: nnx.Rngs):
        if isinstance(config.layers, str) or not config.layers:
            raise ValueError(f"layers must be a sequence of one or more of {LAYER_KINDS}, got {config.layers!r}")
        for i, kind in enumerate(config.layers):
            _settings.choice(f"layers[{i}]", kind, LAYER_KINDS)
        if config.hidden_dim is not None:
            _settings.integer("hidden_dim", config.hidden_dim, 1)
        param_dtype = _settings.float_dtype("param_dtype", config.param_dtype, BANK_DTYPES)
        dtype = _settings.float_dtype("dtype", config.dtype or param_dtype, BANK_DTYPES)
        self.vocab_size = _settings.integer("vocab_size", config.vocab_size, 1)
        dim = _settings.integer("dim", config.dim, 1)
        self.embedding = nnx.Embed(
            self.vocab_size,
            dim,
            dtype=dtype,
            param_dtype=param_dtype,
            # The head is the same matrix: at this deviation the first logits are of order one.
            embedding_init=nnx.initializers.normal(stddev=dim**-0.5),
            rngs=rngs,
        )
        self.blocks = nnx.List([Block(kind, config, rngs=rngs) for kind in config.layers])
        self.norm = nnx.RMSNorm(dim, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    def init_cache(self, batch: int, max_length: int | None = None) -> Cache:
        """The cache of `batch` texts before their first token.

        `max_length`, the number of tokens in all, is needed by `"attention"` layers only. Logits of tokens
        beyond it are NaN.
        """
        return tuple(
            block.mixer.init_state(batch)
            if isinstance(block.mixer, SparseDeltaMemory)
            else block.mixer.init_state(batch, max_length)
            for block in self.blocks
        )

    def __call__(self, tokens: jax.Array, cache: Cache | None = None) -> tuple[jax.Array, Cache | None]:
        """Predicts, after each of the given tokens, the next one.

        Arguments:
            tokens: integers in `[0, vocab_size)`, `[B, T]`.
            cache: where the texts stopped; None: at their start.

        Returns:
            `(logits, cache)`: `logits [B, T, vocab_size]` in float32 (float64 for a float64 model), and the
            cache after these tokens (None if none was given).
        """
        x = self.embedding(tokens)
        states = []
        for i, block in enumerate(self.blocks):
            x, state = block(x, None if cache is None else cache[i])
            states.append(state)
        logits = self.embedding.attend(self.norm(x))
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        return logits, None if cache is None else tuple(states)


@nnx.jit(static_argnames=("length",))
def _generate(model, prompt, key, temperature, length):
    batch, num_prompt = prompt.shape
    cache = model.init_cache(batch, num_prompt + length)
    logits, cache = model(prompt, cache)

    def draw(logits, key):
        # Dividing the logits would turn a temperature of zero into NaN; scaling the noise does not.
        return jnp.argmax(logits + temperature * jax.random.gumbel(key, logits.shape, logits.dtype), axis=-1)

    def step(carry, key):
        logits, cache = carry
        token = draw(logits, key)
        logits, cache = model(token[:, None], cache)
        return (logits[:, -1], cache), token

    _, tokens = jax.lax.scan(step, (logits[:, -1], cache), jax.random.split(key, length))
    return tokens.T


def generate(
    model: LanguageModel,
    prompt: jax.typing.ArrayLike,
    length: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
) -> jax.Array:
    """Samples continuations: the prompt at once, then token by token.

    The model should be in `eval()` mode if it has BatchNorm.

    Arguments:
        model: the model.
        prompt: tokens, `[B, N]` with `N >= 1`.
        length: how many tokens to sample.
        temperature: 1 samples the model's distribution, 0 takes the likeliest token.
        seed: of the samples.

    Returns:
        The sampled tokens, `[B, length]`, without the prompt.

    Raises:
        ValueError: the prompt is empty, or `length` or `temperature` is negative.
    """
    prompt = jnp.asarray(prompt)
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ValueError(f"prompt must be [batch, tokens] with at least one token, got shape {prompt.shape}")
    if not temperature >= 0:  # NaN is no temperature either
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    length = _settings.integer("length", length, 0)
    return _generate(model, prompt, jax.random.key(seed), jnp.float32(temperature), length)
