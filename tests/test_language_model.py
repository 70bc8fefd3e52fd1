"""The language model: attention over windows, prefill and decode, sampling, and that it learns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sdm_jax.flax import (
    Attention,
    AttentionState,
    ByteTokenizer,
    LanguageModel,
    LanguageModelConfig,
    generate,
    generate_stream,
    generate_text,
)

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
    np.testing.assert_array_equal(warm, jnp.stack(list(generate_stream(model, prompt, 6, temperature=2.0, seed=3)), 1))
    assert (warm != generate(model, prompt, 6, temperature=2.0, seed=4)).any()
    assert generate(model, prompt, 0).shape == (2, 0)
    assert list(generate_stream(model, prompt, 0)) == []


@pytest.mark.parametrize("sample", [generate, generate_stream])
def test_sampling_runs_outside_of_jit(sample):
    with pytest.raises(TypeError, match=r"sampling runs outside of jax\.jit"):
        jax.jit(lambda prompt: sample(make(), prompt, 5))(text())
    with pytest.raises(TypeError, match=r"sampling runs outside of jax\.jit"):
        jax.vmap(lambda prompt: sample(make(), prompt, 5))(text()[None])
    with pytest.raises(TypeError, match=r"sampling runs outside of jax\.jit"):
        jax.jit(lambda model: sample(model, np.zeros((1, 3), int), 5))(make())


def test_unknown_tokens_of_jax_arrays():
    model = make(layers=("swa", "sdm"))
    tokens = text()
    negative = run(model, tokens.at[0, 20].set(-1))[0]
    np.testing.assert_array_equal(negative, run(model, tokens.at[0, 20].set(49))[0])
    logits = run(model, tokens.at[0, 20].set(50))[0]
    assert np.isnan(logits[0, 20:]).all()
    np.testing.assert_array_equal(logits[1], run(model, tokens)[0][1])


def test_config_is_hashable():
    other = dataclasses.replace(SMALL, memory=dict(SMALL.memory))
    assert hash(other) == hash(SMALL)
    assert {SMALL: 1}[other] == 1
    assert dataclasses.replace(SMALL, memory={}) not in {SMALL}


def test_generate_ignores_the_mode():
    """In `train()` mode BatchNorm would normalise each new token by itself."""
    model = make(memory={**SMALL.memory, "query_batchnorm": True})
    model.eval()
    expected = generate(model, text(tokens=9), 5, temperature=0)
    model.train()
    statistics = jax.tree.map(np.array, nnx.state(model, nnx.BatchStat))
    np.testing.assert_array_equal(generate(model, text(tokens=9), 5, temperature=0), expected)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model, nnx.BatchStat), statistics)


@pytest.mark.parametrize(
    ("arguments", "settings", "error", "message"),
    [
        ((text()[:, :0], 6), {}, ValueError, "prompt must be .* with at least one token"),
        ((text()[0], 6), {}, ValueError, r"prompt must be \[batch, tokens\]"),
        ((text() / 2, 6), {}, TypeError, "prompt must have an integer dtype, got float32"),
        ((text(), 2.5), {}, TypeError, "length must be an integer, got 2.5"),
        ((text(), -1), {}, ValueError, "length must be at least 0"),
        ((np.array([[2**33]]), 6), {}, ValueError, "prompt has ids of 8589934592..8589934592"),
        (([[3, 2**33]], 6), {}, ValueError, r"prompt has ids of 3\.\.8589934592"),
        ((text() + 40, 6), {}, ValueError, r"prompt has ids of 4.\.\.8., but the model knows those below 50"),
        ((text(), 6), {"seed": "a"}, TypeError, "seed must be an integer, got 'a'"),
        ((text(), 6), {"seed": -1}, ValueError, "seed must be in 0..2147483647, got -1"),
        ((text(), 6), {"temperature": -1.0}, ValueError, "temperature must be at least 0"),
        ((text(), 6), {"temperature": float("nan")}, ValueError, "temperature must be finite"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_generation(arguments, settings, error, message):
    for function in (generate, generate_stream):
        with pytest.raises(error, match=message):
            function(make(), *arguments, **settings)


class WordTokenizer:
    """Any object will do that has these two."""

    words = ("slot", "bank", "delta")

    def encode(self, text):
        return [self.words.index(word) for word in text.split()]

    def decode(self, tokens):
        return "".join(f" {self.words[token % 3]}" for token in tokens)


def test_generate_text():
    model = make(vocab_size=256)
    ids = generate(model, jnp.array([list(b"slot")]), 40, temperature=2.0)[0]
    pieces = list(generate_text(model, ByteTokenizer(), "slot", 40, temperature=2.0))
    assert "".join(pieces) == bytes(ids.tolist()).decode(errors="replace")
    words = list(generate_text(make(), WordTokenizer(), "bank slot", 5))
    assert len(words) == 5
    assert all(word[1:] in WordTokenizer.words for word in words)
    with pytest.raises(ValueError, match=r"prompt has ids of 100\.\.195, but the model knows those below 50"):
        generate_text(make(), ByteTokenizer(), "déjà", 5)
    with pytest.raises(ValueError, match="at least one token"):
        generate_text(model, ByteTokenizer(), "", 5)


def test_characters_of_several_bytes_come_whole(monkeypatch):
    said = "naïve ☃ 🙂\n".encode() + b"\xff!\xe2\x98"
    monkeypatch.setattr(
        "sdm_jax.flax.generation.generate_stream", lambda *args, **settings: (np.array([byte]) for byte in said)
    )
    pieces = list(generate_text(make(vocab_size=256), ByteTokenizer(), "x", 1))
    assert pieces[2:4] == ["ï", "v"]
    assert "🙂" in pieces
    assert "".join(pieces) == said.decode(errors="replace")


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


def test_untied_head():
    model = make(tie_head=False)
    hidden = jax.random.normal(jax.random.key(0), (2, 16))
    tokens = text()
    changed = nnx.clone(model)
    changed.head.kernel[...] += hidden.T @ jnp.zeros((2, 50)) + 1.0
    assert (run(model, tokens)[0] != run(changed, tokens)[0]).all()
    assert make().head is None
    assert sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))) == 16 * 50 + sum(
        x.size for x in jax.tree.leaves(nnx.state(make(), nnx.Param))
    )


def test_remat_computes_blocks_again():
    """The same losses, gradients and statistics, with less kept for the backward."""
    tokens = text(batch=4, tokens=32)

    def parts(remat):
        model = make(remat=remat, layers=("sdm", "swa"), memory={**SMALL.memory, "query_batchnorm": True})
        graph, params, statistics = nnx.split(model, nnx.Param, ...)

        def loss(params):
            model = nnx.merge(graph, params, statistics, copy=True)
            logits, _ = model(tokens)
            return jnp.sin(logits).sum(), nnx.state(model, nnx.BatchStat)

        kept = jax.eval_shape(lambda params: jax.vjp(loss, params, has_aux=True)[1], params)
        results = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        return results, sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))

    (remat, remat_bytes), (plain, plain_bytes) = parts(True), parts(False)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), remat, plain)
    assert remat_bytes < 0.3 * plain_bytes


def test_memory_none_is_its_defaults():
    model = make(layers=("sdm",), memory=None)
    assert nnx.graphdef(model) == nnx.graphdef(make(layers=("sdm",), memory={}))


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
        ({"num_heads": 3}, ValueError, r"num_heads must divide dim \(16\) into heads of an even width, got 3"),
        ({"num_heads": 16}, ValueError, "num_heads must be in 1..8, got 16; the nearest valid value is 8"),
        ({"dim": 21, "num_heads": 7}, ValueError, "dim must be even with attention layers, got 21"),
        ({"dim": 20, "num_heads": 4}, ValueError, r"num_heads must divide dim \(20\).*nearest valid value is 5"),
        ({"window": 0}, ValueError, "window must be at least 1"),
        ({"hidden_dim": 0}, ValueError, "hidden_dim must be at least 1"),
        ({"vocab_size": 2.5}, TypeError, "vocab_size must be an integer"),
        ({"dtype": "float16"}, TypeError, "dtype must be float32"),
        ({"memory": {"slots_per_head": 40}}, ValueError, "slots_per_head must be a square"),
        ({"memory": {"num_slots": 36}}, ValueError, "a name in memory must be one of.*nearest valid value is 'num_"),
        ({"param_dtype": None}, TypeError, "param_dtype must be float32, bfloat16, float64, got None"),
        ({"memory": 36}, TypeError, "memory must be a mapping"),
        ({"tie_head": 1}, TypeError, "tie_head must be True or False"),
        ({"remat": "all"}, TypeError, "remat must be True or False"),
        ({"layers": 4}, ValueError, "layers must be a sequence"),
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
    for arguments, error, message in [
        ((2, -1), ValueError, "max_length must be at least 0, got -1"),
        ((2, 2.5), TypeError, "max_length must be an integer, got 2.5"),
        (("a", 4), TypeError, "batch must be an integer, got 'a'"),
        ((-2, 4), ValueError, "batch must be at least 0, got -2"),
    ]:
        with pytest.raises(error, match=message):
            make().init_cache(*arguments)


def test_bad_arguments_of_the_constructors():
    with pytest.raises(TypeError, match="config must be a LanguageModelConfig, got dict"):
        LanguageModel({"dim": 16}, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"rngs must be flax\.nnx\.Rngs"):
        LanguageModel(SMALL, rngs=jax.random.key(0))
    with pytest.raises(ValueError, match="rngs must have a stream params"):
        LanguageModel(SMALL, rngs=nnx.Rngs())
    with pytest.raises(ValueError, match=r"kernel_init must give .* \(16, 48\), got shape \(3,\)"):
        Attention(16, 2, kernel_init=lambda *_: jnp.zeros(3), rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="kernel_init must be a function"):
        Attention(16, 2, kernel_init=3, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="dtype must be float32"):
        Attention(16, 2, dtype="int8", rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (text() * 1.0, TypeError, "tokens must have an integer dtype, got float32"),
        (text()[0], ValueError, r"tokens must be \[batch, tokens\], got shape \(37,\)"),
        ([[1, 2]], TypeError, r"tokens must be an array \[batch, tokens\], got list"),
        (None, TypeError, "tokens must be an array.*got NoneType"),
        (np.full((1, 3), 2**32 + 3), ValueError, "tokens has ids of 4294967299..4294967299"),
        (np.full((1, 3), -1, np.int32), ValueError, r"tokens has ids of -1\.\.-1, but the model knows those below 50"),
    ],
    ids=["float", "one_axis", "list", "none", "wide", "negative"],
)
def test_bad_tokens(tokens, error, message):
    with pytest.raises(error, match=message):
        make()(tokens)


def test_bad_cache():
    model = make()
    cache = model.init_cache(2, 40)
    for bad, error, message in [
        (model.init_cache(3, 40), ValueError, r"cache\[0\] is of 3 texts, but tokens are of 2"),
        (cache[:2], ValueError, "cache must have 3 states, one a layer, got 2"),
        (cache[::-1][1:] + cache[:1], TypeError, r"cache\[0\] must be an AttentionState, got SDMState"),
        (cache[0], TypeError, "cache must be a tuple, as init_cache gives it, or None, got AttentionState"),
        (make(dtype="bfloat16").init_cache(2, 40), TypeError, "state.keys must be an array of float32, got bfloat16"),
        (make(window=4).init_cache(2, 40), ValueError, r"state.keys must be \[2, 8, 2, 8\] for x of shape"),
    ]:
        with pytest.raises(error, match=message):
            model(text(), bad)


def test_bad_attention_calls():
    layer = Attention(16, 2, rngs=nnx.Rngs(0))
    x = jnp.zeros((2, 5, 16))
    state = layer.init_state(2, 9)
    for arguments, error, message in [
        (([1.0],), TypeError, r"x must be an array \[batch, tokens, 16\], got list"),
        ((x[0],), ValueError, r"x must be \[batch, tokens, 16\]"),
        ((x, (state.keys, state.values)), TypeError, "state must be an AttentionState.*got tuple"),
        ((x[:1], state), ValueError, r"state.keys must be \[1, L, 2, 8\]"),
        ((x, AttentionState(state.keys, None, state.tokens)), TypeError, "state.values must be an array of float32"),
        ((jnp.zeros((2, 10, 16)), state), ValueError, "max_length=9 tokens, got 10 at once"),
    ]:
        with pytest.raises(error, match=message):
            layer(*arguments)
