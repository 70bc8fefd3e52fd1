"""How a language model uses the slots of its banks."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sdm_jax.flax.language_model import LanguageModel
from sdm_jax.flax.layer import SparseDeltaMemory


class SlotStatistics(NamedTuple):
    """The use of the slots of one layer over some texts; every field but the first is `[H]`, one value a head."""

    layer: int
    """The layer's place in the model."""
    written: np.ndarray
    """Share of the slots that any token wrote."""
    read: np.ndarray
    """Share of the slots that any token read."""
    write_entropy: np.ndarray
    """Entropy of the writes over the slots, over that of an even use: 1 is even, 0 is a single slot."""
    read_entropy: np.ndarray
    """The same of the reads."""
    write_strength: np.ndarray
    """Mean of the input gate `beta`."""
    forget_gate: np.ndarray
    """Mean of the forget gate `exp(g)`."""
    initial_norm: np.ndarray
    """Root mean square of the norms of the initial bank's rows."""
    final_norm: np.ndarray
    """The same of the banks after the texts."""


def slot_statistics(model: LanguageModel, texts: Iterable[Any]) -> list[SlotStatistics]:
    """Counts the accesses of every Sparse Delta Memory layer, in `eval()` mode.

    Arguments:
        model: the model. It is not changed.
        texts: one or more batches of tokens, each `[B, T]`; every text starts from the initial bank.

    Returns:
        The statistics, one of each `"sdm"` layer.

    Raises:
        ValueError: there are no texts.
    """
    graph, variables = nnx.split(model)
    batches = [jax.device_get(_count(graph, variables, jnp.asarray(tokens))) for tokens in texts]
    if not batches:
        raise ValueError("texts must have at least one batch")
    sizes = np.array([tokens for tokens, _ in batches], np.float64)
    weights = sizes / sizes.sum()
    statistics = []
    for layer in batches[0][1]:
        counts = [batch[layer] for _, batch in batches]
        writes, reads = (sum(c[name].astype(np.int64) for c in counts) for name in ("writes", "reads"))

        def mean(name, counts=counts):
            return sum(w * c[name] for w, c in zip(weights, counts, strict=True))

        statistics.append(
            SlotStatistics(
                layer=layer,
                written=(writes > 0).mean(axis=1),
                read=(reads > 0).mean(axis=1),
                write_entropy=_entropy(writes),
                read_entropy=_entropy(reads),
                write_strength=mean("write_strength"),
                forget_gate=mean("forget_gate"),
                initial_norm=np.sqrt(mean("initial_square")),
                final_norm=np.sqrt(mean("final_square")),
            )
        )
    return statistics


def _entropy(counts):
    slots = counts.shape[1]
    if slots == 1:
        return np.ones(len(counts))
    share = counts / counts.sum(axis=1, keepdims=True)
    bits = -(share * np.log(np.where(share > 0, share, 1.0))).sum(axis=1)
    return bits / np.log(slots)


@functools.partial(jax.jit, static_argnums=0)
def _count(graph, variables, tokens):
    """The number of tokens, and of each layer the counts `[H, S]` and the means `[H]`, by the layer's place."""
    model = nnx.merge(graph, variables, copy=True)
    model.eval()
    x = model.embedding(tokens)
    layers = {}
    for i, block in enumerate(model.blocks):
        memory, state = block.mixer, None
        if isinstance(memory, SparseDeltaMemory):
            state = memory.init_state(tokens.shape[0])
            k_idx, _, _, beta, g, q_idx, _ = memory.operands(block.mixer_norm(x))
            acc = beta.dtype
            layers[i] = {
                "writes": _histogram(k_idx, memory.slots_per_head),
                "reads": _histogram(q_idx, memory.slots_per_head),
                "write_strength": beta.mean(axis=(0, 2, 3)),
                "forget_gate": jnp.exp(g).mean(axis=(0, 2, 3)),
                "initial_square": _mean_square(state.bank, acc),
            }
        x, state = block(x, state)
        if i in layers:
            layers[i]["final_square"] = _mean_square(state.bank, acc)
    return tokens.size, layers


def _histogram(ids, slots):
    """How often each slot is named in `ids [B, H, T, n]`: `[H, S]` int32."""
    heads = jnp.arange(ids.shape[1])[None, :, None, None]
    return jnp.zeros((ids.shape[1], slots), jnp.int32).at[heads, ids].add(1)


def _mean_square(bank, acc):
    """Mean of the squared norms of the rows of `bank [B, H, S, D]`: `[H]`."""
    return jnp.square(bank.astype(acc)).sum(axis=-1).mean(axis=(0, 2))
