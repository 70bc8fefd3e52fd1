"""Inputs of the tests, the cases they form, and what must come out of them."""

import contextlib
import functools
import math
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sdm_jax
from sdm_jax import reference
from sdm_jax._primitive import has_cuda_module

INPUTS = ("bank", "k_idx", "k_val", "v", "beta", "g", "q_idx", "q_val")
FLOATS = tuple(name for name in INPUTS if not name.endswith("idx"))
RESULTS = ("y", "new_bank", *(f"d_{name}" for name in FLOATS))
ROUNDED = ("bank", "k_val", "v", "q_val")  # enter the computation in the bank's dtype

# The implementations that can run here; those of them with kernels of the package.
NATIVE = ["cpu"]
if has_cuda_module() and jax.default_backend() == "gpu":
    NATIVE.append(pytest.param("cuda", marks=pytest.mark.gpu))
IMPLEMENTATIONS = [*NATIVE, "xla"]

NOT_A_SLOT = (-1, "S", "S + 5", 2**31 - 1, -(2**31))
MIXED_GATES = (0.0, -1e-3, -0.05, -1.0, -5.0, -20.0, -1e4, -math.inf, 0.2)

# Compiling is most of the time of these tests, and their arrays are tiny.
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Case(NamedTuple):
    """Sizes and kind of the inputs of one call."""

    name: str
    lead: tuple[int, ...] = (2,)
    tokens: int = 40
    slots: int = 96
    width: int = 17
    writes: int = 4
    reads: int = 3
    chunk: int = 16
    gate_per_write: bool = False
    bank_lead: tuple[int, ...] | None = None  # of a bank that several streams share
    gates: str | float = "mixed"  # "mixed", "mild", or a value that every third token has
    ids: str = "mixed"  # "mixed": repeats and dropped entries; "distinct"; "repeats"; "equal"; "dropped"

    def __str__(self):
        return self.name

    @property
    def shared(self):
        return self.bank_lead is not None

    @property
    def settings(self):
        return {"chunk_size": self.chunk, "shared_bank": self.shared}


# One list of shapes for every implementation. 96 slots hold all writes of a chunk, 40 do not.
SHAPES = [
    Case("one_stream", lead=()),
    Case("two_axes", lead=(2, 3), tokens=20),
    Case("three_axes", lead=(1, 2, 2), tokens=17, gate_per_write=True),
    Case("shared_by_all", lead=(3,), bank_lead=(), tokens=35),
    Case("shared_by_some", lead=(2, 3), bank_lead=(2,), tokens=20, gate_per_write=True),
    Case("width_1", width=1),
    Case("width_3", width=3, gate_per_write=True),
    Case("width_64", width=64, tokens=33),
    Case("width_130", width=130, tokens=33),
    Case("width_300", width=300, tokens=33),
    Case("one_token", tokens=1),
    Case("one_chunk_unfilled", tokens=7, chunk=64),
    Case("whole_chunks", tokens=48, chunk=16),
    Case("odd_chunk", tokens=60, chunk=23, slots=40),
    Case("large_chunk", tokens=90, chunk=64, slots=300),
    Case("chunk_above_64", tokens=150, chunk=70, slots=300, width=128, gate_per_write=True),
    Case("one_write", writes=1, reads=1),
    Case("one_write_many_reads", writes=1, reads=8),
    Case("many_writes_one_read", writes=8, reads=1, slots=200),
    Case("few_slots", slots=5),
    Case("one_slot", slots=1, writes=2, reads=2),
]
SHAPE = {case.name: case for case in SHAPES}

# Gates and ids on one shape each for one gate a token and one a write.
FEW_SLOTS = Case("", slots=40)
GATES = [
    FEW_SLOTS._replace(name=f"gate_{gates}{'_per_write' * per_write}", gates=gates, gate_per_write=per_write)
    for per_write in (False, True)
    for gates in ("mild", 0.0, -0.05, -5.0, -20.0, -1e4, -math.inf, 0.2, "mixed")
]
IDS = [
    FEW_SLOTS._replace(name=f"{ids}{'_per_write' * per_write}", ids=ids, gate_per_write=per_write)
    for per_write in (False, True)
    for ids in ("distinct", "repeats", "equal", "dropped")
]


def make_inputs(case, seed=0):
    """Arguments of `write_read` and cotangents of its results: two dicts of float32 and int32 NumPy arrays.

    Values that nothing may look at are NaN. Within a token the weights' magnitudes sum to at most 1, so that
    beta |k|^2 <= 1 even where all ids are equal. Streams that share a bank keep to slots of their own.
    """
    rng = np.random.default_rng((zlib.crc32(case.name.encode()), seed))
    lead, tokens, writes = case.lead, case.tokens, case.writes
    bank_lead = lead if case.bank_lead is None else case.bank_lead
    sharing = math.prod(lead[len(bank_lead) :]) if case.shared else 1
    span = case.slots // sharing
    offset = (np.arange(math.prod(lead)) % sharing * span).reshape(*lead, 1, 1)

    def ids_and_weights(count):
        shape = (*lead, tokens, count)
        if case.ids == "distinct":
            ids = np.argsort(rng.random((*lead, tokens, span)), axis=-1)[..., :count]
        elif case.ids == "equal":
            ids = np.broadcast_to(rng.integers(span, size=(*lead, 1, 1)), shape)
        elif case.ids == "repeats":
            ids = rng.integers(min(span, 5), size=shape)
        else:
            few, all_slots = rng.integers(min(span, 4), size=shape), rng.integers(span, size=shape)
            ids = np.where(rng.random(shape) < 0.3, few, all_slots)
        ids = (ids + offset).astype(np.int32)
        weights = rng.standard_normal(shape)
        weights /= np.abs(weights).sum(axis=-1, keepdims=True)
        if case.ids in ("mixed", "dropped"):
            out = rng.random(shape) < (0.15 if case.ids == "mixed" else 0.6)
            out[..., 2:4, :] |= count == writes  # tokens that write nothing
            not_a_slot = [case.slots + {"S": 0, "S + 5": 5}[x] if isinstance(x, str) else x for x in NOT_A_SLOT]
            ids[out] = rng.choice(np.array(not_a_slot, np.int32), out.sum())
            weights[out] = np.nan
        return ids, weights

    k_idx, k_val = ids_and_weights(writes)
    q_idx, q_val = ids_and_weights(case.reads)
    gates = writes if case.gate_per_write else 1
    g = -rng.uniform(0.001, 1, (*lead, tokens, gates))
    if case.gates == "mixed":
        g = rng.choice(np.array(MIXED_GATES), g.shape)
    elif case.gates != "mild":
        # Every third token has the very value, the others a gate of its size.
        g = np.abs(g) * (np.sign(case.gates) if math.isinf(case.gates) else case.gates)
        g[..., ::3, :] = case.gates
    v, beta = rng.standard_normal((*lead, tokens, case.width)), rng.random((*lead, tokens, 1))
    silent = ~((k_idx >= 0) & (k_idx < case.slots)).any(axis=-1)
    for x in (v, beta, g):
        x[silent] = np.nan
    if case.gate_per_write:
        g[np.isnan(k_val)] = np.nan
    values = (
        rng.standard_normal((*bank_lead, case.slots, case.width)),
        k_idx,
        k_val,
        v,
        beta,
        g,
        q_idx,
        q_val,
    )
    inputs = {name: x if name.endswith("idx") else x.astype(np.float32) for name, x in zip(INPUTS, values, strict=True)}
    cotangents = {
        "y": rng.standard_normal(v.shape).astype(np.float32),
        "new_bank": rng.standard_normal(inputs["bank"].shape).astype(np.float32),
    }
    return inputs, cotangents


def in_dtype(inputs, dtype):
    """The inputs as a caller with a bank of `dtype` has them: gates and strengths in float32 at least."""
    wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    return {
        name: x if name.endswith("idx") else x.astype(dtype if name in ROUNDED else wide) for name, x in inputs.items()
    }


def cpu_device():
    """A context in which computations run on the CPU, which is not the default where there is a GPU."""
    return jax.default_device(jax.local_devices(backend="cpu")[0])


@functools.cache
def _with_vjp(fn, options, **settings):
    """A jitted function to the results and all gradients of a `write_read` or `decode_step`."""

    def run(inputs, cotangents):
        floats = {name: inputs[name] for name in FLOATS}

        def call(floats):
            y, new_bank = fn(**(inputs | floats), **settings)
            return {"y": y, "new_bank": new_bank}

        out, vjp = jax.vjp(call, floats)
        (gradients,) = vjp(cotangents)
        return out | {f"d_{name}": gradients[name] for name in FLOATS}

    return jax.jit(run, compiler_options=dict(options) or None)


def results(inputs, cotangents, *, fn=sdm_jax.write_read, fast_compile=True, **settings):
    """Values and all gradients of a call, as a dict of NumPy arrays named by RESULTS."""
    options = tuple(FAST_COMPILE.items()) if fast_compile else ()
    # Settings that are the default do not ask for a compilation of their own.
    default = {"chunk_size": 64, "snapshot_quant": "none", "shared_bank": False}
    settings = {name: value for name, value in settings.items() if default.get(name, ...) != value}
    run = _with_vjp(fn, options, **settings)
    on_cpu = fn is reference.write_read or settings.get("implementation") == "cpu"
    device = cpu_device() if on_cpu else contextlib.nullcontext()
    # Rounded here: XLA may drop a rounding within a program.
    cotangents = {name: cotangents[name].astype(inputs["bank"].dtype) for name in ("y", "new_bank")}
    with jax.enable_x64(inputs["bank"].dtype == np.float64), device:
        out = run(inputs, cotangents)
    return {name: np.asarray(out[name]) for name in RESULTS}


# Sizes that `oracle` pads calls to, so that many share one compilation:
# streams, tokens, slots, columns, entries of a token.
_BUCKETS = [(3, 80, 100, 20, 5), (6, 160, 304, 304, 8)]


def oracle(inputs, cotangents, *, chunk_size=16, shared_bank=False, dtype="float64"):
    """What `results` has to be: the token loop `reference` on a bank of `dtype`, as float64 arrays.

    Padding with dropped entries, columns of zeros and slots that nobody names changes nothing. Streams of a
    shared bank touch different slots, so they may as well take turns as one longer stream.
    """
    bank, k_idx = inputs["bank"], inputs["k_idx"]
    bank_lead, (num_slots, width) = bank.shape[:-2], bank.shape[-2:]
    streams, turns = math.prod(bank_lead), math.prod(k_idx.shape[:-2]) // max(1, math.prod(bank_lead))
    tokens, writes, reads = *k_idx.shape[-2:], inputs["q_idx"].shape[-1]
    turn = -(-tokens // chunk_size) * chunk_size  # the bank is rounded where it would be if apart
    sizes = (streams, turns * turn, num_slots, width, max(writes, reads))
    fitting = [bucket for bucket in _BUCKETS if all(a <= b for a, b in zip(sizes, bucket, strict=True))]
    n, t, s, d, e = fitting[0] if fitting else sizes
    t = -(-t // chunk_size) * chunk_size

    def padded(x, columns, fill=0.0):  # [*B, T, K] -> [n, t, columns]
        out = np.full((streams, turns, turn, columns), fill, x.dtype)
        out[:, :, :tokens, : x.shape[-1]] = x.reshape(streams, turns, tokens, x.shape[-1])
        out = out.reshape(streams, turns * turn, columns)
        return np.pad(out, ((0, n - streams), (0, t - turns * turn), (0, 0)), constant_values=fill)

    def cut(x, shape):  # the reverse
        x = x[:streams, : turns * turn].reshape(streams, turns, turn, -1)
        return x[:, :, :tokens, : shape[-1]].reshape(shape)

    def padded_bank(x):
        x = x.reshape(streams, num_slots, width)
        return np.pad(x, ((0, n - streams), (0, s - num_slots), (0, d - width)))

    def cut_bank(x):
        return x[:streams, :num_slots, :width].reshape(bank.shape)

    def ids(x):
        return padded(np.where((x >= 0) & (x < num_slots), x, -1).astype(np.int32), e, -1)

    g = inputs["g"]
    padded_inputs = {
        "bank": padded_bank(bank),
        "k_idx": ids(k_idx),
        "k_val": padded(inputs["k_val"], e),
        "v": padded(inputs["v"], d),
        "beta": padded(inputs["beta"], 1),
        "g": padded(np.broadcast_to(g, k_idx.shape), e),
        "q_idx": ids(inputs["q_idx"]),
        "q_val": padded(inputs["q_val"], e),
    }
    padded_cotangents = {"y": padded(cotangents["y"], d), "new_bank": padded_bank(cotangents["new_bank"])}
    wide = np.float64 if dtype == "float64" else np.float32
    cotangents = {name: x.astype(wide) for name, x in padded_cotangents.items()}
    out = results(in_dtype(padded_inputs, dtype), cotangents, fn=reference.write_read, chunk_size=chunk_size)
    out = {name: x.astype(np.float64) for name, x in out.items()}
    want = {name: cut_bank(out[name]) for name in ("new_bank", "d_bank")}
    want["y"] = cut(out["y"], inputs["v"].shape)
    for name in ("k_val", "v", "beta", "q_val"):
        want[f"d_{name}"] = cut(out[f"d_{name}"], inputs[name].shape)
    d_g = cut(out["d_g"], k_idx.shape)
    want["d_g"] = d_g if g.shape == k_idx.shape else d_g.sum(axis=-1, keepdims=True)
    return {name: want[name] for name in RESULTS}


@functools.lru_cache(maxsize=256)
def case_oracle(case, dtype="float64", seed=0):
    """`oracle` of a case: float64 truth, or with a bfloat16 bank what rounding leaves of it."""
    inputs, cotangents = make_inputs(case, seed)
    chunk = case.chunk if dtype == "bfloat16" else 16
    return oracle(inputs, cotangents, chunk_size=chunk, shared_bank=case.shared, dtype=dtype)


def case_results(case, implementation, dtype="float32", seed=0, **settings):
    """`results` of a case."""
    inputs, cotangents = make_inputs(case, seed)
    inputs = in_dtype(inputs, dtype)
    return results(inputs, cotangents, implementation=implementation, **(case.settings | settings))


def recurrence(inputs):
    """Section 1 of the specification, word for word, for one stream, in float64 NumPy."""
    bank = inputs["bank"].astype(np.float64)
    y = np.zeros(inputs["v"].shape)
    exists = {name: (inputs[name] >= 0) & (inputs[name] < len(bank)) for name in ("k_idx", "q_idx")}
    gates = np.broadcast_to(inputs["g"], inputs["k_idx"].shape)
    for t in range(len(y)):
        written = [
            (int(slot), float(weight), float(gate))
            for slot, weight, gate, ok in zip(
                inputs["k_idx"][t], inputs["k_val"][t], gates[t], exists["k_idx"][t], strict=True
            )
            if ok
        ]
        if written:
            decayed = set()
            for slot, _, gate in written:
                if slot not in decayed:
                    bank[slot] *= math.exp(gate)
                    decayed.add(slot)
            retrieved = sum(weight * bank[slot] for slot, weight, _ in written)
            delta = float(inputs["beta"][t, 0]) * (inputs["v"][t].astype(np.float64) - retrieved)
            for slot, weight, _ in written:
                bank[slot] += weight * delta
        for slot, weight, ok in zip(inputs["q_idx"][t], inputs["q_val"][t], exists["q_idx"][t], strict=True):
            if ok:
                y[t] += float(weight) * bank[slot]
    return y, bank


def as_jax(inputs):
    """The inputs as positional JAX arrays."""
    return tuple(jnp.asarray(inputs[name]) for name in INPUTS)
