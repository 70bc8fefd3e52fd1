"""A small language model of Sparse Delta Memory and attention layers."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sdm_jax._layout import BANK_DTYPES
from sdm_jax.checks import is_array
from sdm_jax.flax import _settings
from sdm_jax.flax.attention import Attention, AttentionState
from sdm_jax.flax.layer import SDMState, SparseDeltaMemory

LAYER_KINDS = ("sdm", "swa", "attention")
_MEMORY_SETTINGS = [
    name for name in inspect.signature(SparseDeltaMemory.__init__).parameters if name not in ("self", "dim", "rngs")
]

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
        memory: keyword arguments of `SparseDeltaMemory` for the `"sdm"` layers; None: its defaults.
        tie_head: the head is the embedding's matrix; else it has one of its own.
        remat: the backward computes each block again instead of keeping what is inside it.
        dtype: dtype of the computation; None: `param_dtype`.
        param_dtype: dtype of the parameters.
    """

    layers: Sequence[str] = ("swa", "swa", "sdm", "swa")
    dim: int = 128
    vocab_size: int = 256
    num_heads: int = 4
    window: int = 64
    hidden_dim: int | None = None
    memory: Mapping[str, Any] | None = dataclasses.field(default_factory=dict)
    tie_head: bool = True
    remat: bool = False
    dtype: str | None = None
    param_dtype: str = "float32"

    def __hash__(self) -> int:
        # Equal settings have equal ones of these; `memory`, a dict, has no hash.
        return hash((tuple(self.layers), self.dim, self.vocab_size, self.num_heads, self.window, self.hidden_dim))


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
            self.mixer = SparseDeltaMemory(dim, rngs=rngs, **(settings | dict(config.memory or {})))
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
    """A causal language model: an embedding, pre-norm blocks, and a head.

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
        if not isinstance(config, LanguageModelConfig):
            raise TypeError(f"config must be a LanguageModelConfig, got {type(config).__name__}")
        if isinstance(config.layers, str) or not isinstance(config.layers, Sequence) or not config.layers:
            raise ValueError(f"layers must be a sequence of one or more of {LAYER_KINDS}, got {config.layers!r}")
        for i, kind in enumerate(config.layers):
            _settings.choice(f"layers[{i}]", kind, LAYER_KINDS)
        if config.hidden_dim is not None:
            _settings.integer("hidden_dim", config.hidden_dim, 1)
        for name in _settings.metadata("memory", config.memory):
            _settings.choice("a name in memory", name, _MEMORY_SETTINGS)
        _settings.random_streams("rngs", rngs)
        param_dtype = _settings.float_dtype("param_dtype", config.param_dtype, BANK_DTYPES)
        dtype = _settings.float_dtype("dtype", config.dtype or param_dtype, BANK_DTYPES)
        self.remat = _settings.flag("remat", config.remat)
        self.vocab_size = _settings.integer("vocab_size", config.vocab_size, 1)
        dim = _settings.integer("dim", config.dim, 1)
        self.embedding = nnx.Embed(
            self.vocab_size,
            dim,
            dtype=dtype,
            param_dtype=param_dtype,
            # A tied head is the same matrix: at this deviation the first logits are of order one.
            embedding_init=nnx.initializers.normal(stddev=dim**-0.5),
            rngs=rngs,
        )
        tied = _settings.flag("tie_head", config.tie_head)
        settings: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.head = None if tied else nnx.Linear(dim, self.vocab_size, use_bias=False, **settings)
        self.blocks = nnx.List([Block(kind, config, rngs=rngs) for kind in config.layers])
        self.norm = nnx.RMSNorm(dim, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    def init_cache(self, batch: int, max_length: int | None = None) -> Cache:
        """The cache of `batch` texts before their first token.

        `max_length`, the number of tokens in all, is needed by `"attention"` layers only. Logits of tokens
        beyond it are NaN.

        Raises:
            TypeError: `batch` or `max_length` is no integer, or the model is abstract.
            ValueError: `batch` or `max_length` is negative, or `max_length` is needed.
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
            tokens: integers in `[0, vocab_size)`, `[B, T]`. Those of a NumPy array are checked; those of a JAX array,
                which under `jit` has no values yet, are not: a negative one counts from the end, as in JAX's
                indexing, and one that is no row of the embedding gives NaN, there and through the layers at other
                tokens of that text, also earlier ones (in training with BatchNorm, of all texts).
            cache: where the texts stopped; None: at their start. In pieces a text gives the logits of the whole to
                rounding; where scores tie to rounding, as in bfloat16 they often do, other slots may be selected,
                and logits differ visibly.

        Returns:
            `(logits, cache)`: `logits [B, T, vocab_size]` in float32 (float64 for a float64 model), and the
            cache after these tokens (None if none was given).

        Raises:
            TypeError: `tokens` is no array of integers, or `cache` not what `init_cache` gives.
            ValueError: `tokens` has another shape or, in a NumPy array, values out of range, or `cache` is that of
                another number of texts or layers.
        """
        if not is_array(tokens):
            raise TypeError(f"tokens must be an array [batch, tokens], got {type(tokens).__name__}")
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(f"tokens must have an integer dtype, got {tokens.dtype}")
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be [batch, tokens], got shape {tokens.shape}")
        if isinstance(tokens, np.ndarray):
            _settings.known_tokens("tokens", tokens, self.vocab_size)
        if cache is not None:
            self._check_cache(cache, tokens.shape[0])
        x = self.embedding(tokens)
        run = nnx.remat(Block.__call__) if self.remat else Block.__call__
        states = []
        for i, block in enumerate(self.blocks):
            x, state = run(block, x, None if cache is None else cache[i])
            states.append(state)
        x = self.norm(x)
        logits = self.embedding.attend(x) if self.head is None else self.head(x)
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        return logits, None if cache is None else tuple(states)

    def _check_cache(self, cache, batch):
        if not isinstance(cache, tuple | list):
            raise TypeError(f"cache must be a tuple, as init_cache gives it, or None, got {type(cache).__name__}")
        if len(cache) != len(self.blocks):
            raise ValueError(f"cache must have {len(self.blocks)} states, one a layer, got {len(cache)}")
        for i, (block, state) in enumerate(zip(self.blocks, cache, strict=True)):
            kind = SDMState if isinstance(block.mixer, SparseDeltaMemory) else AttentionState
            if not isinstance(state, kind):
                raise TypeError(f"cache[{i}] must be an {kind.__name__}, got {type(state).__name__}")
            rows = state.bank if isinstance(state, SDMState) else state.keys
            if is_array(rows) and rows.shape[:1] != (batch,):
                raise ValueError(f"cache[{i}] is of {rows.shape[0]} texts, but tokens are of {batch}")
