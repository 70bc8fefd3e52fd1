"""Times of the named shapes on a GPU, next to those of the published PyTorch implementation on an H200.

    python tests/benchmarks/gpu.py [--shapes flagship,mid] [--implementation cuda] [--repeats 20] [--profile]

Jitted, the bank donated, median after warm-up; ids are product-key selections of random scores, all distinct
within a token. "forward" saves nothing; "both" is the forward that saves and the backward, from given
cotangents to the gradients of every argument. Decode is timed as a chain of steps in one jitted call, which
takes the same 64 tokens a stream four times: their rows do not fit the cache, and the host has time to start the
next call. `--profile` adds the device time of each kernel of one call (XLA_FLAGS=--xla_gpu_enable_command_buffer= lets
the profiler see them all).
"""

import argparse
import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
from device_time import print_device_time

import sdm_jax
from sdm_jax import _calls
from sdm_jax.cli.bench import SHAPES

# The peer's milliseconds, and its most memory beside the inputs in MiB, of forward and forward + backward.
PEER = {
    "flagship": ((15.1, 49.0), (1115, 11690)),
    "flagship_b4": ((13.2, 43.1), (1935, 13226)),
    "long_chunk": ((13.4, 45.8), (1391, 12250)),
    "mid": ((2.46, 7.85), (340, 1813)),
    "small_head": ((2.52, 7.02), (585, 1723)),
    "fp32": ((7.82, 23.2), (894, 6001)),
}
DECODE = {"decode_8": 5.0, "decode_64": 15.2}  # the peer's microseconds in a graph
DECODE_STEPS, DECODE_ROUNDS = 64, 4


def select(key, shape, num_slots, k):
    """Ids `[..., k]` of the largest sums of two random scores, ascending."""
    side = round(num_slots**0.5)

    def some(key):
        a, b = (jax.lax.top_k(jax.random.normal(x, (*shape[1:], side)), k) for x in jax.random.split(key))
        _, best = jax.lax.top_k((a[0][..., :, None] + b[0][..., None, :]).reshape(*shape[1:], k * k), k)
        i = jnp.take_along_axis(a[1], best // k, -1) * side + jnp.take_along_axis(b[1], best % k, -1)
        return jnp.sort(i, axis=-1).astype(jnp.int32)

    return jax.lax.map(some, jax.random.split(key, shape[0]))


def inputs(shape, seed=0):
    """The bank, and the other arguments of one call."""
    P, T, S, D, W, dtype = shape.P, shape.T, shape.S, shape.D, shape.W, jnp.dtype(shape.dtype)

    @jax.jit
    def make(key):
        keys = iter(jax.random.split(key, 12))
        blocks = max(1, P * T // 1024)

        def ids():
            return select(next(keys), (blocks, P * T // blocks), S, W).reshape(P, T, W)

        def weights():
            return jax.nn.softmax(jax.random.normal(next(keys), (P, T, W))).astype(dtype)

        tokens = dict(k_idx=ids(), k_val=weights(), v=jax.random.normal(next(keys), (P, T, D), dtype))
        tokens |= dict(beta=jax.random.uniform(next(keys), (P, T, 1)), g=-jax.random.uniform(next(keys), (P, T, 1)))
        tokens |= dict(q_idx=ids(), q_val=weights())
        return jax.random.normal(next(keys), (P, S, D), dtype), tokens

    return make(jax.random.key(seed))


def timed(step, bank, repeats):
    """Median seconds of `step(bank) -> (bank, results)`; as many calls to a measurement as take 0.1 s, 50 at most.

    Results are dropped before the next call, so that it finds their memory free and XLA replays its command
    buffer, as it does within a larger jitted step.
    """

    def run(bank, calls):
        start = time.perf_counter()
        for _ in range(calls):
            results = None
            bank, results = step(bank)
        jax.block_until_ready(results)
        return bank, (time.perf_counter() - start) / calls

    bank, _ = run(bank, 3)
    bank, once = run(bank, 1)
    calls = max(1, min(50, int(0.1 / once)))
    times = []
    for _ in range(repeats):
        bank, t = run(bank, calls)
        times.append(t)
    return statistics.median(times)


def extra(compiled):
    """Bytes of temporaries and results that are not donated operands."""
    m = compiled.memory_analysis()
    return m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes


def measure(name, implementation, repeats, profile):
    shape, (peer_times, peer_memory) = SHAPES[name], PEER[name]
    settings = dict(chunk_size=shape.C, implementation=implementation)

    @jax.jit
    def both(bank, d_bank, dy, tokens):
        floats = {n: x for n, x in tokens.items() if not n.endswith("idx")}
        _, vjp = jax.vjp(lambda b, x: sdm_jax.write_read(b, **(tokens | x), **settings), bank, floats)
        return vjp((dy, d_bank))

    forward = jax.jit(lambda bank, tokens: sdm_jax.write_read(bank, **tokens, **settings), donate_argnums=0)
    bank, tokens = inputs(shape)
    bank_struct = jax.ShapeDtypeStruct(bank.shape, bank.dtype)
    dy = jax.random.normal(jax.random.key(7), tokens["v"].shape, bank.dtype)
    t_both = timed(lambda b: (b, both(b, b, dy, tokens)), bank, repeats)
    t_forward = timed(lambda b: forward(b, tokens)[::-1], bank, repeats)
    compiled = forward.lower(bank_struct, tokens).compile(), both.lower(bank_struct, bank_struct, dy, tokens).compile()
    # Beside the inputs, of which the forward's bank is donated; the peer's forward counts a working bank.
    memory = [extra(x) / 2**20 for x in compiled]
    print(
        f"{name:12s} forward {t_forward * 1e3:7.2f} ms (peer {peer_times[0]:5.1f})   both {t_both * 1e3:7.2f} ms "
        f"(peer {peer_times[1]:5.1f})   memory {memory[0]:.0f} / {memory[1]:.0f} MiB "
        f"(peer {peer_memory[0]} / {peer_memory[1]})",
        flush=True,
    )
    if profile:
        bank = jax.block_until_ready(inputs(shape)[0])
        print_device_time(lambda: jax.block_until_ready(both(bank, bank, dy, tokens)), names=True)
        print_device_time(lambda: jax.block_until_ready(forward(bank, tokens)), names=True)


def measure_decode(name, implementation, repeats):
    bank, tokens = inputs(dataclasses.replace(SHAPES[name], T=DECODE_STEPS))

    tokens = [{n: jnp.asarray(x[:, t]) for n, x in tokens.items()} for t in range(DECODE_STEPS)]

    def steps(bank, tokens):
        ys = []
        for token in tokens * DECODE_ROUNDS:
            y, bank = sdm_jax.decode_step(bank, **token, implementation=implementation)
            ys.append(y)
        return ys[-DECODE_STEPS:], bank

    steps = jax.jit(steps, donate_argnums=0)
    t = timed(lambda b: steps(b, tokens)[::-1], bank, repeats) / (DECODE_STEPS * DECODE_ROUNDS)
    print(f"{name:12s} {t * 1e6:7.2f} us a step (peer {DECODE[name]:5.1f})", flush=True)


def measure_selection(implementation, repeats):
    """One selection of 64 of 256 x 256 slots for the 2 x 32768 rows of flagship's reads, and its backward."""
    scores = jax.random.normal(jax.random.key(0), (65536, 512))
    settings = dict(factors=(256, 256), k=64, implementation=implementation)

    def topk(x):
        return _calls.product_key_topk(x, **settings)

    def backward(d, ids):
        return _calls.product_key_topk_backward(d, ids, **settings)

    factors = jax.jit(lambda x: (jax.lax.top_k(x[:, :256], 64), jax.lax.top_k(x[:, 256:], 64)))
    values, ids = jax.jit(topk)(scores)
    times = [
        timed(lambda b, f=f, x=x: (b, f(*x)), None, repeats)
        for f, x in ((jax.jit(topk), [scores]), (jax.jit(backward), [values, ids]), (factors, [scores]))
    ]
    print(
        f"selection    forward {times[0] * 1e3:7.2f} ms   backward {times[1] * 1e3:7.2f} ms   "
        f"lax.top_k of the two factors {times[2] * 1e3:7.2f} ms",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join([*PEER, *DECODE, "selection"]))
    parser.add_argument("--implementation", default="cuda")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    print(jax.devices()[0].device_kind, "jax", jax.__version__, args.implementation, flush=True)
    for name in args.shapes.split(","):
        if name == "selection":
            measure_selection(args.implementation, args.repeats)
            continue
        if name in DECODE:
            measure_decode(name, args.implementation, args.repeats)
        else:
            measure(name, args.implementation, args.repeats, args.profile)


if __name__ == "__main__":
    main()
