"""`product_key_topk` against a NumPy search over all slots that may win, in the order of section 6."""

import contextlib
import functools
import itertools
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import NATIVE, cpu_device

from sdm_jax import _calls, _xla_product_key
from sdm_jax.product_key import product_key_topk

DTYPES = ("float32", "bfloat16")
SHAPES = [  # factors, k
    ((7,), 1),
    ((9,), 9),
    ((16,), 5),
    ((8, 8), 1),
    ((8, 8), 16),
    ((4, 16), 20),
    ((16, 3), 48),
    ((1, 5), 4),
    ((3, 3), 7),
    ((32, 32), 64),
    ((16, 16), 256),
    ((4, 4, 4), 9),
    ((2, 5, 3), 30),
    ((3, 2, 2, 3), 12),
]


def sort_key(x):
    """Orders float32 by value with -0 below +0; NaN is -inf."""
    x = np.where(np.isnan(x), np.float32(-np.inf), np.float32(x))
    return x, ~np.signbit(x)


def oracle(scores, factors, k):
    """One row, by the words of the specification."""
    dtype = scores.dtype
    x = scores.astype(np.float32)
    x[np.isnan(x)] = -np.inf
    ranked, start = [], 0  # of each factor: (score, column), best first
    for n in factors:
        columns = [(x[start + c], c) for c in range(n)]
        columns.sort(key=lambda e: (*sort_key(e[0]), e[1]), reverse=True)
        ranked.append(columns[:k])
        start += n
    best = ranked[0]
    for n, following in zip(factors[1:], ranked[1:], strict=True):
        candidates = []
        for (i, (a, slot)), (j, (b, column)) in itertools.product(enumerate(best), enumerate(following)):
            if (i + 1) * (j + 1) <= k:
                with np.errstate(all="ignore"):
                    total = np.float32((a + b).astype(dtype))
                if np.isnan(total):
                    total = np.float32(-np.inf)
                candidates.append((*sort_key(total), i + j, i, total, slot * n + column))
        candidates.sort(key=lambda e: e[:4], reverse=True)
        best = [(e[4], e[5]) for e in candidates[:k]]
    best = sorted(best, key=lambda e: e[1])
    return np.array([e[0] for e in best]).astype(dtype), np.array([e[1] for e in best], np.int32)


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def check(scores, factors, k):
    values, ids = jax.jit(product_key_topk, static_argnums=(1, 2))(jnp.asarray(scores), factors, k)
    for row in range(scores.shape[0]):
        expected_values, expected_ids = oracle(scores[row].copy(), factors, k)
        np.testing.assert_array_equal(ids[row], expected_ids)
        assert same_bits(values[row], expected_values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("factors", "k"), SHAPES, ids=str)
def test_equals_search(factors, k, dtype):
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((6, sum(factors))).astype(np.float32)
    check(np.asarray(jnp.asarray(scores, dtype)), factors, k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("factors", "k"), SHAPES, ids=str)
def test_ties_and_special_values(factors, k, dtype):
    """Few distinct values: every rule for ties decides somewhere."""
    rng = np.random.default_rng(1)
    pool = [0.0, -0.0, 1.0, -1.0, 1.0 + 2**-8, np.inf, -np.inf, np.nan, 3e38, -3e38]
    for values in (pool[:2], pool[:5], pool[5:8], pool):
        scores = rng.choice(np.float32(values), (6, sum(factors)))
        check(np.asarray(jnp.asarray(scores, dtype)), factors, k)


def test_wins_over_all_sums():
    """Without ties it is the top-k of the full product."""
    rng = np.random.default_rng(2)
    factors, k = (8, 4, 8), 32
    scores = rng.standard_normal((16, sum(factors))).astype(np.float32)
    a, b, c = np.split(scores, np.cumsum(factors)[:-1], axis=1)
    sums = ((a[:, :, None, None] + b[:, None, :, None]) + c[:, None, None, :]).reshape(16, -1)
    ids = np.sort(np.argsort(-sums, axis=1)[:, :k], axis=1)
    values, found = product_key_topk(jnp.asarray(scores), factors, k)
    np.testing.assert_array_equal(found, ids)
    np.testing.assert_array_equal(values, np.take_along_axis(sums, ids, 1))


@pytest.mark.parametrize("implementation", NATIVE)
@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
@pytest.mark.parametrize(("factors", "k"), [*SHAPES, ((300,), 200), ((2,) * 9, 100)], ids=str)
def test_implementations_agree(factors, k, dtype, implementation):
    """The custom calls and both forms of the plain JAX give the same bits."""
    if (implementation, dtype) == ("cuda", "float64"):
        implementation = None  # plain JAX serves
    pool = np.float32([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38])
    if jax.default_backend() != "cpu":  # on a CPU, and only there, XLA takes denormal numbers as zeros
        pool = pool[np.abs(pool) != np.float32(1e-45)]
    rng = np.random.default_rng(3)
    with jax.enable_x64(dtype == "float64"):
        for draw in (lambda shape: rng.choice(pool, shape), lambda shape: rng.standard_normal(shape)):
            scores = np.asarray(jnp.asarray(draw((21, sum(factors))), dtype))
            d_values = np.asarray(jnp.asarray(rng.standard_normal((21, k)), dtype))
            with cpu_device() if implementation == "cpu" else contextlib.nullcontext():
                settings = dict(factors=factors, k=k, implementation=implementation)
                values, ids = _calls.product_key_topk(scores, **settings)
                (d_scores,) = _calls.product_key_topk_backward(d_values, ids, **settings)
            for platform in ("cpu", "tpu"):
                plain = functools.partial(jax.jit, static_argnames=("factors", "k", "platform"))
                settings = dict(factors=factors, k=k, platform=platform)
                with cpu_device():
                    found = plain(_xla_product_key.select)(scores, **settings)
                    (d,) = plain(_xla_product_key.select_backward)(d_values, np.asarray(ids), **settings)
                assert same_bits(values, found[0])
                assert same_bits(ids, found[1])
                tolerance = {"bfloat16": 1e-2, "float32": 1e-5, "float64": 1e-12}[dtype]
                np.testing.assert_allclose(np.float64(d), np.float64(d_scores), rtol=tolerance, atol=tolerance)
                if platform == "cpu" and implementation is not None:
                    assert same_bits(d, d_scores)


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_instruction_sets_agree(isa):
    code = (
        "import jax.numpy as jnp, numpy as np, hashlib, sdm_jax\n"
        "x = jnp.asarray(np.random.default_rng(0).standard_normal((37, 40)), jnp.float32)\n"
        "out = [*sdm_jax.product_key_topk(x, (20, 20), 33), *sdm_jax.product_key_topk(x, (4, 6, 30), 9)]\n"
        "print(hashlib.sha256(b''.join(np.asarray(a).tobytes() for a in out)).hexdigest())"
    )

    def digest(**environment):
        run = [sys.executable, "-c", code]
        return subprocess.run(run, env=os.environ | environment, capture_output=True, text=True, check=True).stdout

    assert digest(SDM_CPU_ISA=isa) == digest()


@pytest.mark.parametrize(("factors", "k"), [((9,), 4), ((8, 4), 6), ((4, 3, 4), 8)], ids=str)
def test_gradient_flows_to_selected_columns(factors, k):
    rng = np.random.default_rng(5)
    scores = rng.standard_normal((3, 2, sum(factors))).astype(np.float32)
    weights = rng.standard_normal((3, 2, k)).astype(np.float32)

    @jax.jit
    def gradient(scores):
        return jax.grad(lambda s: (product_key_topk(s, factors, k)[0] * weights).sum())(scores)

    _, ids = product_key_topk(scores, factors, k)
    expected = np.zeros(scores.shape)
    for row in np.ndindex(3, 2):
        for r in range(k):
            column = np.unravel_index(ids[row][r], factors)
            for start, c in zip(np.cumsum((0, *factors[:-1])), column, strict=True):
                expected[row][start + c] += weights[row][r]
    got = gradient(scores)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(got) != 0, expected != 0)
    assert all(same_bits(got, gradient(scores)) for _ in range(5))


def test_gradient_of_bfloat16_rounds_once():
    scores = jnp.asarray(np.random.default_rng(6).standard_normal((4, 12)), jnp.bfloat16)
    weights = jnp.asarray(np.random.default_rng(7).standard_normal((4, 9)), jnp.bfloat16)

    def gradient(scores):
        return jax.vjp(lambda s: product_key_topk(s, (6, 6), 9)[0], scores)[1](weights.astype(scores.dtype))[0]

    got = gradient(scores)
    # The same slots win in float32 as long as no partial sums round to a tie.
    assert got.dtype == jnp.bfloat16
    _, ids = product_key_topk(scores, (6, 6), 9)
    expected = _xla_product_key.sum_columns(weights.astype(jnp.float32), ids, factors=(6, 6))
    np.testing.assert_array_equal(got, expected.astype(jnp.bfloat16))


def test_float64_values_are_exact():
    with jax.enable_x64(True):
        scores = jnp.asarray(np.random.default_rng(8).standard_normal((4, 12)))
        values, ids = product_key_topk(scores, (6, 6), 5)
        i, j = np.unravel_index(ids, (6, 6))
        expected = np.take_along_axis(np.asarray(scores), i, 1) + np.take_along_axis(np.asarray(scores), j + 6, 1)
        assert values.dtype == jnp.float64
        assert ids.dtype == jnp.int32
        np.testing.assert_array_equal(values, expected)


def test_transformations():
    scores = jnp.asarray(np.random.default_rng(9).standard_normal((3, 4, 12)), jnp.float32)
    select = functools.partial(product_key_topk, factors=(6, 6), k=5)
    values, ids = jax.jit(select)(scores)
    for f in (jax.vmap(select), jax.vmap(jax.vmap(select)), jax.vmap(select, in_axes=1, out_axes=1)):
        mapped_values, mapped_ids = jax.jit(f)(scores)
        np.testing.assert_array_equal(mapped_ids, ids)
        np.testing.assert_array_equal(mapped_values, values)

    def loss(scores):
        return jnp.sin(select(scores)[0]).sum()

    expected = jax.jit(jax.grad(loss))(scores)
    for f in (jax.vmap(jax.grad(loss)), jax.grad(jax.checkpoint(loss))):
        np.testing.assert_array_equal(jax.jit(f)(scores), expected)


@pytest.mark.parametrize("lead", [(0,), (2, 0), (), (1,)], ids=str)
def test_any_leading_axes(lead):
    scores = jnp.ones((*lead, 7))
    values, ids = product_key_topk(scores, (4, 3), 2)
    assert values.shape == ids.shape == (*lead, 2)
    assert jax.grad(lambda s: product_key_topk(s, (4, 3), 2)[0].sum())(scores).shape == scores.shape


def test_integers_of_numpy_are_taken():
    scores = jnp.arange(7.0)
    expected = product_key_topk(scores, (4, 3), 2)
    for kind in (np.int32, np.int64):
        for a, b in zip(product_key_topk(scores, np.array([4, 3], kind), kind(2)), expected, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("scores", "factors", "k", "error", "message"),
    [
        (
            np.zeros((2, 7), np.int32),
            (4, 3),
            2,
            TypeError,
            "scores must be float32, bfloat16, float64, got int32",
        ),
        (np.zeros((2, 7), np.float16), (4, 3), 2, TypeError, "got float16"),
        (np.zeros((2, 7), np.float32), (4, 4), 2, ValueError, r"7 columns, but factors \(4, 4\) need 8"),
        (np.float32(0), (1,), 1, ValueError, "at least one axis"),
        (np.zeros((2, 7), np.float32), (), 1, ValueError, "one or more integers"),
        (np.zeros((2, 7), np.float32), (7, 0), 1, ValueError, "at least 1"),
        (np.zeros((2, 7), np.float32), (4, 3), 0, ValueError, "k must be in 1..12"),
        (
            np.zeros((2, 7), np.float32),
            (4, 3),
            13,
            ValueError,
            "there are 12 slots.*nearest valid value is 12",
        ),
        (
            np.zeros((2, 64), np.float32),
            (32, 32),
            257,
            ValueError,
            "the limit is 256.*nearest valid value is 256",
        ),
        (np.zeros((2, 7), np.float32), (4.0, 3), 2, TypeError, "factors must be a sequence of integers"),
        (np.zeros((2, 7), np.float32), 7, 2, TypeError, "factors must be a sequence of integers"),
        (np.zeros((2, 7), np.float32), (4, 3), 2.0, TypeError, "k must be an integer"),
        (np.zeros((2, 7), np.float32), (4, 3), True, TypeError, "k must be an integer, got True"),
        (np.zeros((2, 4), np.float32), (True, 3), 2, TypeError, "factors must be a sequence of integers"),
        (np.zeros((2, 2**17), np.float32), (2**16, 2**16), 2, ValueError, "at most 2\\^31 - 1"),
    ],
)
def test_bad_input(scores, factors, k, error, message):
    with pytest.raises(error, match=message):
        product_key_topk(scores, factors, k)


def test_slots_near_the_limit_of_int32():
    factors = (46340, 46340)
    assert math.prod(factors) < 2**31
    scores = np.zeros(sum(factors), np.float32)
    scores[[46339, 46340 + 46339]] = 1
    _, ids = product_key_topk(scores, factors, 1)
    assert ids[0] == math.prod(factors) - 1
