"""Speed of the CPU kernels, as ratios within one run. Not part of the default run:

    python -m pytest tests/benchmarks/test_cpu_speed.py -s

The machine should be otherwise idle. Contestants take turns, and each one's best time counts, so that a
disturbance has to hit all of them to change a ratio.
"""

from __future__ import annotations

import functools
import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sdm_jax
from sdm_jax import _calls, _cpu, _xla


def inputs(streams, tokens, slots, width, entries, seed=0):
    """Arguments of write_read: distinct random slots of a token, ascending, as a top-k selection gives them."""
    rng = np.random.default_rng(seed)

    def ids():
        drawn = rng.integers(0, slots // entries, (streams, tokens, entries))
        return (drawn + np.arange(entries) * (slots // entries)).astype(np.int32)

    def normal(*shape, scale=1.0):
        return (rng.normal(size=shape) * scale).astype(np.float32)

    weights = functools.partial(normal, streams, tokens, entries, scale=entries**-0.5)
    arrays = (
        normal(streams, slots, width),
        ids(),
        weights(),
        normal(streams, tokens, width),
        rng.uniform(size=(streams, tokens, 1)).astype(np.float32),
        -0.1 * rng.uniform(size=(streams, tokens, 1)).astype(np.float32),
        ids(),
        weights(),
    )
    return tuple(map(jnp.asarray, arrays))


def best_times(contestants, rounds):
    """Milliseconds of each function's best call. They take turns of three calls, so that a call also comes after one
    of its own kind: memory that another kind has just given back to the system costs the next one more."""
    best = dict.fromkeys(contestants, float("inf"))
    for f in contestants.values():
        jax.block_until_ready(f())
    for _ in range(rounds):
        for name, f in contestants.items():
            for _ in range(3):
                start = time.perf_counter()
                jax.block_until_ready(f())
                best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


def report(title, rows):
    print(f"\n{title}; {os.cpu_count()} cores, {_cpu.isa()}, jax {jax.__version__}")
    for name, value in rows.items():
        print(f"  {name:46s} {value}")


def in_place(f, state, *tokens):
    """`f(state, *tokens) -> (state, results)` jitted with the state donated, as a function of nothing."""
    step = jax.jit(f, donate_argnums=0)
    state = [jax.tree.map(lambda x: x + 0, state)]

    def run():
        state[0], results = step(state[0], *tokens)
        return results

    return run


def cpu_forward(*x):
    y, bank = sdm_jax.write_read(*x, implementation="cpu")
    return bank, y


def plain_forward(form):
    def forward(*x):
        y, bank = _xla.forward(*x, chunk=64, snapshot_quant="none", save=False, form=form)
        return bank, y

    return forward


def gradients(backward, forward, bank, *tokens):
    """The call and all its gradients for a sum of squares of the readings, with its memory in place.

    The donated bank comes back restored. The gradient of the bank takes the buffer of the new bank's cotangent, which
    a step receives from the one before, as in a chain of segments.
    """

    def step(state, *tokens):
        bank, d_new_bank = state
        k_idx, k_val, _, beta, g, q_idx, q_val = tokens
        y, new_bank, *saved = forward(bank, *tokens)
        restored, d_bank, *rest = backward(new_bank, d_new_bank, 2 * y, k_idx, k_val, beta, g, q_idx, q_val, saved)
        return (restored, d_bank), rest

    return in_place(step, (bank, jnp.zeros_like(bank)), *tokens)


def training_gradients(implementation, bank, *tokens):
    """`jax.grad` of a sum of squares of the readings, the bank a broadcast parameter as in a layer."""
    k_idx, k_val, v, beta, g, q_idx, q_val = tokens

    def loss(parameter, k_val, v, beta, g, q_val):
        bank_now = jnp.broadcast_to(parameter, bank.shape)
        y, _ = sdm_jax.write_read(bank_now, k_idx, k_val, v, beta, g, q_idx, q_val, implementation=implementation)
        return (y * y).sum()

    step = jax.jit(jax.grad(loss, argnums=tuple(range(6))))
    return functools.partial(step, bank[0], k_val, v, beta, g, q_val)


def plain_gradients(form, *arguments):
    return gradients(
        lambda *x: _xla.backward(*x[:-1], _calls.unflatten(x[-1]), chunk=64, snapshot_quant="none", form=form),
        lambda *x: _xla.forward(*x, chunk=64, snapshot_quant="none", save=True, form=form),
        *arguments,
    )


def cpu_gradients(*arguments):
    return gradients(
        lambda *x: _calls.backward(*x[:-1], *x[-1], chunk=64, snapshot_quant="none"),
        lambda *x: _calls.forward(*x, chunk=64, snapshot_quant="none", save=True),
        *arguments,
    )


@pytest.fixture(scope="module")
def arguments():
    return inputs(streams=2, tokens=2048, slots=16384, width=256, entries=32)


def test_forward_against_plain_jax(arguments):
    times = best_times(
        {
            "cpu": in_place(cpu_forward, *arguments),
            "plain JAX, token scan": in_place(plain_forward("token"), *arguments),
            "plain JAX, chunked": in_place(plain_forward("chunked"), *arguments),
        },
        rounds=10,
    )
    report("forward, P=2 T=2048 S=16384 D=256 W=R=32 C=64 float32, ms", {k: f"{v:8.1f}" for k, v in times.items()})
    assert times["plain JAX, token scan"] >= 1.5 * times["cpu"]
    assert times["plain JAX, chunked"] >= 6 * times["cpu"]


def test_forward_and_backward_against_plain_jax(arguments):
    times = best_times(
        {
            "cpu": cpu_gradients(*arguments),
            "plain JAX, token scan": plain_gradients("token", *arguments),
        },
        rounds=20,
    )
    times |= best_times({"plain JAX, chunked": plain_gradients("chunked", *arguments)}, rounds=3)
    report(
        "forward and backward in place, P=2 T=2048 S=16384 D=256 W=R=32 C=64 float32, ms",
        {k: f"{v:8.1f}" for k, v in times.items()},
    )
    assert min(v for k, v in times.items() if k != "cpu") >= 3 * times["cpu"]


def test_training_step_against_plain_jax(arguments):
    times = best_times(
        {
            "cpu": training_gradients("cpu", *arguments),
            "plain JAX": training_gradients("xla", *arguments),
        },
        rounds=12,
    )
    report(
        "jax.grad, bank broadcast from a parameter, P=2 T=2048 S=16384 D=256 W=R=32 C=64 float32, ms",
        {k: f"{v:8.1f}" for k, v in times.items()},
    )
    assert times["plain JAX"] >= 2 * times["cpu"]


def copy_rate(num_bytes=1 << 28):
    """Bytes read and written a second by a memory copy on all cores."""
    cores = os.cpu_count() or 1
    source = [np.ones(num_bytes // cores, np.uint8) for _ in range(cores)]
    target = [np.zeros_like(s) for s in source]

    def run():
        threads = [threading.Thread(target=np.copyto, args=pair) for pair in zip(target, source, strict=True)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()

    return run, 2 * num_bytes


def test_wide_forward_against_a_memory_copy():
    streams, tokens, slots, width, entries = 1, 1024, 65536, 1024, 64
    arguments = inputs(streams, tokens, slots, width, entries)
    fewest = 3 * streams * tokens * entries * width * 4  # rows read for writes and reads, rows written
    copy, copied = copy_rate()
    times = best_times({"cpu": in_place(cpu_forward, *arguments), "copy": copy}, rounds=10)
    rate, copy_bytes = fewest / times["cpu"] / 1e6, copied / times["copy"] / 1e6
    report(
        "forward, P=1 T=1024 S=65536 D=1024 W=R=64 C=64 float32",
        {
            "cpu": f"{times['cpu']:8.1f} ms",
            "fewest bytes": f"{rate:8.1f} GB/s",
            "memory copy, read and written": f"{copy_bytes:8.1f} GB/s",
            "share": f"{rate / copy_bytes:8.0%}",
        },
    )
    assert rate >= 0.4 * copy_bytes


def test_product_key_topk_against_top_k():
    rows, side, k = 2048, 256, 64
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(rows, 2 * side)), jnp.float32)

    def of_factors(x):
        return jax.lax.top_k(x[:, :side], k), jax.lax.top_k(x[:, side:], k)

    def of_all_sums(x):
        return jax.lax.top_k((x[:, :side, None] + x[:, None, side:]).reshape(-1, side * side), k)

    times = best_times(
        {
            "product_key_topk": functools.partial(
                jax.jit(lambda x: sdm_jax.product_key_topk(x, (side, side), k)), scores
            ),
            "lax.top_k of the factors, no merge": functools.partial(jax.jit(of_factors), scores),
        },
        rounds=10,
    )
    part = rows // 8  # all sums of all rows would take 512 MiB
    times["lax.top_k of all sums"] = (
        8 * best_times({"": functools.partial(jax.jit(of_all_sums), scores[:part])}, rounds=2)[""]
    )
    report(f"product keys, {rows} rows, two factors of {side}, k={k}, ms", {n: f"{v:8.1f}" for n, v in times.items()})
    assert times["lax.top_k of the factors, no merge"] >= 2 * times["product_key_topk"]
    assert times["lax.top_k of all sums"] >= 10 * times["product_key_topk"]
