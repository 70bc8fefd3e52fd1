"""The language model: attention over windows, prefill and decode, sampling, and that it learns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sdm_jax.flax import Attention, LanguageModel, LanguageModelConfig, generate

SMALL = LanguageModelConfig(
    layers=("swa", "sdm", "attention"),
    dim=16,
    vocab_size=50,
    num_heads=2,
    window=8,
    memory={"slots_per_head": 36, "num_writes": 4, "num_reads": 4, "num_heads": 2},
)

run = jax.jit(lambda model, tokens, cache=None: model(tokens, cache))


def make(**settings):
    return LanguageModel(dataclasses.replace(SMALL, **settings), rngs=nnx.Rngs(0))


def text(batch=2, tokens=37, seed=0):
    return jax.random.randint(jax.random.key(seed), (batch, tokens), 0, 50)


def attention_by_the_words(layer, x, window):
    """Softmax over the whole matrix of scores, in NumPy."""
    batch, tokens, dim = x.shape
    heads, width = layer.num_heads, layer.head_dim
    into, out = (np.asarray(p.kernel[...], np.float64) for p in (layer.query_key_value, layer.output))
    qkv = (x @ into).reshape(batch, tokens, 3, heads, width)
    half = width // 2
    angles = np.arange(tokens)[:, None] * 10_000.0 ** (-np.arange(half) / half)
    turn = np.exp(1j * angles)[:, None, :]

    def rotate(a):
        a = a / np.sqrt((a**2).mean(-1, keepdims=True) + 1e-6)
        a = (a[..., :half] + 1j * a[..., half:]) * turn
        return np.concatenate([a.real, a.imag], -1)

    q, k, v = rotate(qkv[:, :, 0]), rotate(qkv[:, :, 1]), qkv[:, :, 2]
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width)
    back = np.arange(tokens)[:, None] - np.arange(tokens)
    scores = np.where((back >= 0) & (back < window), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, tokens, dim) @ out


@pytest.mark.parametrize(("window", "tokens"), [(1, 5), (8, 5), (8, 8), (8, 37), (64, 37), (None, 37)])
def test_attention_is_the_softmax_of_the_window(window, tokens):
    layer = Attention(12, 2, window, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, tokens, 12))
    expected = attention_by_the_words(layer, np.asarray(x, np.float64), window or tokens)
    y, state = run(layer, x)
    assert state is None
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-5)


def test_window_attention_costs_in_proportion_to_the_length():
    layer = Attention(16, 2, 8, rngs=nnx.Rngs(0))

    def flops(tokens):
        return run.lower(layer, jnp.zeros((1, tokens, 16))).compile().cost_analysis()["flops"]

    assert flops(512) == pytest.approx(4 * flops(128), rel=0.05)


def test_prefill_and_decode_equal_one_pass():
    model = make()
    tokens = text()
    logits, none = run(model, tokens)
    assert none is None
    assert logits.shape == (2, 37, 50)
    for pieces in [(37,), (5, 0, 1, 31), (1,) * 37]:
        cache, parts, start = model.init_cache(2, 37), [], 0
        for length in pieces:
            part, cache = run(model, tokens[:, start : start + length], cache)
            parts.append(part)
            start += length
        np.testing.assert_allclose(jnp.concatenate(parts, axis=1), logits, rtol=0, atol=5e-5)


def test_is_causal():
    model = make()
    tokens = text()
    changed = tokens.at[:, 20].add(1) % 50
    a, b = run(model, tokens)[0], run(model, changed)[0]
    np.testing.assert_array_equal(a[:, :20], b[:, :20])
    assert (a[:, 20:] != b[:, 20:]).any(axis=(0, 2)).all()


def test_generate():
    model = make()
    prompt = text(tokens=9)
    greedy = generate(model, prompt, 6, temperature=0)
    logits, _ = run(model, jnp.concatenate([prompt, greedy], axis=1))
    np.testing.assert_array_equal(greedy, logits[:, 8:-1].argmax(-1))
    warm = generate(model, prompt, 6, temperature=2.0, seed=3)
    np.testing.assert_array_equal(warm, generate(model, prompt, 6, temperature=2.0, seed=3))
    assert (warm != generate(model, prompt, 6, temperature=2.0, seed=4)).any()
    assert generate(model, prompt, 0).shape == (2, 0)
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, prompt[:, :0], 6)
    with pytest.raises(ValueError, match="temperature must be at least 0"):
        generate(model, prompt, 6, temperature=-1.0)


def test_samples_follow_the_distribution():
    """At temperature 2 the frequencies of the next token are those of half the logits."""
    model = make(layers=("swa",))
    prompt = text(batch=1, tokens=4)
    expected = jax.nn.softmax(run(model, prompt)[0][0, -1] / 2)
    drawn = generate(model, jnp.tile(prompt, (5_000, 1)), 1, temperature=2.0)
    counts = np.bincount(np.asarray(drawn[:, 0]), minlength=50) / 5_000
    np.testing.assert_allclose(counts, expected, rtol=0, atol=0.02)


def test_learns_a_fixed_batch():
    model = make(memory={**SMALL.memory, "query_batchnorm": True})
    graph, params, statistics = nnx.split(model, nnx.Param, ...)
    optimizer = optax.adam(1e-2)
    tokens = text(batch=4, tokens=33)

    @jax.jit
    def step(params, statistics, state):
        def loss(params):
            model = nnx.merge(graph, params, statistics, copy=True)
            logits, _ = model(tokens[:, :-1])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
            return loss, nnx.state(model, nnx.Param, ...)[1]

        (value, statistics), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), statistics, state, value

    state = optimizer.init(params)
    losses = []
    for _ in range(150):
        params, statistics, state, value = step(params, statistics, state)
        losses.append(float(value))
    assert losses[0] > 3.5
    assert losses[-1] < 0.1


def test_dtype():
    model = make(dtype="bfloat16")
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    logits, cache = jax.eval_shape(run, model, text(), model.init_cache(2, 40))
    assert logits.dtype == jnp.float32
    assert {x.dtype.name for x in jax.tree.leaves(cache)} == {"bfloat16", "int32"}


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"layers": ()}, ValueError, "layers must be a sequence of one or more"),
        ({"layers": "sdm"}, ValueError, "layers must be a sequence of one or more"),
        ({"layers": ("swa", "smd")}, ValueError, r"layers\[1\] must be one of.*nearest valid value is 'sdm'"),
        ({"dim": 0}, ValueError, "dim must be at least 1"),
        ({"num_heads": 3}, ValueError, r"num_heads must divide dim \(16\), got 3"),
        ({"num_heads": 16}, ValueError, "must be even"),
        ({"window": 0}, ValueError, "window must be at least 1"),
        ({"hidden_dim": 0}, ValueError, "hidden_dim must be at least 1"),
        ({"vocab_size": 2.5}, TypeError, "vocab_size must be an integer"),
        ({"dtype": "float16"}, TypeError, "dtype must be float32"),
        ({"memory": {"slots_per_head": 40}}, ValueError, "slots_per_head must be a square"),
        ({"memory": {"slots": 36}}, TypeError, "slots"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_bad_settings(settings, error, message):
    with pytest.raises(error, match=message):
        make(**settings)


def test_attention_needs_a_length_for_its_cache():
    with pytest.raises(ValueError, match="max_length must be given"):
        make().init_cache(2)
    make(layers=("swa", "sdm")).init_cache(2)
