"""Sampling from a language model: whole continuations, token by token, or as text."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sdm_jax.flax import _settings
from sdm_jax.flax.language_model import LanguageModel


class Tokenizer(Protocol):
    """Whatever turns text into tokens and back."""

    def encode(self, text: str) -> Sequence[int]:
        """The tokens of a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""


class ByteTokenizer:
    """The bytes of a text in UTF-8; bytes that are none decode to U+FFFD."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def token_ids(tokenizer: Any, text: str) -> Sequence[int]:
    """The tokens of a text; some tokenizers (of the package `tokenizers`) have them in an attribute `ids`."""
    tokens = tokenizer.encode(text)
    return getattr(tokens, "ids", tokens)


def generate(
    model: LanguageModel,
    prompt: jax.typing.ArrayLike,
    length: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
) -> jax.Array:
    """Samples continuations: the prompt at once, then token by token, in one compiled program.

    BatchNorm uses its running statistics, whatever the model's mode. It is a program of its own: call it outside of
    `jax.jit` and `jax.vmap`.

    Arguments:
        model: the model.
        prompt: tokens, `[B, N]` integers with `N >= 1`.
        length: how many tokens to sample.
        temperature: 1 samples the model's distribution, 0 takes the likeliest token.
        seed: of the samples.

    Returns:
        The sampled tokens, `[B, length]` int32, without the prompt.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the prompt is empty or has tokens that the model does not know, or `length`, `temperature` or
            `seed` is out of range.
    """
    tokens, length, noise, key = _check(model, prompt, length, temperature, seed)
    return _generate(*nnx.split(model), tokens, key, noise, length)


def generate_stream(
    model: LanguageModel,
    prompt: jax.typing.ArrayLike,
    length: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
) -> Iterator[np.ndarray]:
    """`generate`, giving the tokens of each position, `[B]` int32, as soon as they are sampled."""
    tokens, length, noise, key = _check(model, prompt, length, temperature, seed)
    return _stream(model, tokens, length, noise, key)


def generate_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    length: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
) -> Iterator[str]:
    """Samples the continuation of a text and gives it piece by piece.

    Arguments:
        model: the model.
        tokenizer: any object with `encode(text) -> tokens` and `decode(tokens) -> text`.
        prompt: the text to continue.
        length: how many tokens to sample.
        temperature: 1 samples the model's distribution, 0 takes the likeliest token.
        seed: of the samples.

    Returns:
        An iterator over the pieces of the continuation, without the prompt; a character of several tokens comes
        whole.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the prompt has no tokens, or one that the model does not know; `length` or `temperature` is
            negative.
    """
    ids = np.asarray(token_ids(tokenizer, prompt))
    tokens = generate_stream(model, ids[None], length, temperature=temperature, seed=seed)
    return _pieces(tokenizer, tokens)


def _pieces(tokenizer, tokens):
    ids: list[int] = []
    shown = 0
    for token in tokens:
        ids.append(int(token[0]))
        text = tokenizer.decode(ids)
        # U+FFFD at the end may be the beginning of a character.
        if len(text) > shown and not text.endswith("\ufffd"):
            yield text[shown:]
            shown = len(text)
    rest = tokenizer.decode(ids)[shown:]
    if rest:
        yield rest


def _check(model, prompt, length, temperature, seed) -> tuple[jax.Array, int, jax.Array, jax.Array]:
    if not isinstance(model, LanguageModel):
        raise TypeError(f"model must be a LanguageModel, got {type(model).__name__}")
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((prompt, nnx.state(model)))):
        raise TypeError("prompt and model must be concrete: sampling runs outside of jax.jit, jax.vmap and jax.grad")
    if not isinstance(prompt, jax.Array):
        prompt = np.asarray(prompt)  # as it is: JAX would take the low 32 bits of wider integers
    if prompt.ndim != 2 or prompt.size == 0:
        raise ValueError(f"prompt must be [batch, tokens] with at least one token, got shape {prompt.shape}")
    if not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise TypeError(f"prompt must have an integer dtype, got {prompt.dtype}")
    if _settings.number("temperature", temperature) < 0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    _settings.known_tokens("prompt", prompt, model.vocab_size)
    length = _settings.integer("length", length, 0)
    key = jax.random.key(_settings.integer("seed", seed, 0, 2**31 - 1))
    return jnp.asarray(prompt, jnp.int32), length, jnp.float32(temperature), key


def _next(graph, variables, tokens, cache, key, temperature):
    """The next token of every text after `tokens [B, T]`, and the cache after these."""
    model = nnx.merge(graph, variables, copy=True)
    model.eval()
    logits, cache = model(tokens, cache)
    logits = logits[:, -1]
    # Dividing the logits would turn a temperature of zero into NaN; scaling the noise does not.
    noise = temperature * jax.random.gumbel(key, logits.shape, logits.dtype)
    return jnp.argmax(logits + noise, axis=-1).astype(jnp.int32), cache


_jit_next = functools.partial(jax.jit, static_argnums=0, donate_argnums=3)(_next)


def _stream(model, tokens, length, temperature, key):
    graph, variables = nnx.split(model)
    cache: Any = model.init_cache(tokens.shape[0], tokens.shape[1] + length)
    for i in range(length):
        token, cache = _jit_next(graph, variables, tokens, cache, jax.random.fold_in(key, i), temperature)
        yield np.asarray(token)
        tokens = token[:, None]


@functools.partial(jax.jit, static_argnames=("graph", "length"))
def _generate(graph, variables, prompt, key, temperature, length):
    batch, num_prompt = prompt.shape
    if length == 0:
        return jnp.zeros((batch, 0), jnp.int32)
    cache = nnx.merge(graph, variables).init_cache(batch, num_prompt + length)
    token, cache = _next(graph, variables, prompt, cache, jax.random.fold_in(key, 0), temperature)

    def step(carry, i):
        token, cache = carry
        token, cache = _next(graph, variables, token[:, None], cache, jax.random.fold_in(key, i), temperature)
        return (token, cache), token

    _, tokens = jax.lax.scan(step, (token, cache), jnp.arange(1, length))
    return jnp.concatenate([token[None], tokens]).T
