"""The steps one by one: each against plain JAX, all together against the whole operation, and bad lists."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FAST_COMPILE, INPUTS, Case, in_dtype, make_inputs, results
from tolerance import assert_same_bits, relative_error, relative_rms, tol

from sdm_jax import kernels
from sdm_jax.kernels import Chunks

CHUNK = 16
CASE = Case("kernels", lead=(2,), tokens=40, slots=24, width=17, writes=4, reads=3, gate_per_write=True)
SHARED = CASE._replace(name="kernels_shared", bank_lead=(1,), lead=(1, 2))
NAMES = ("y", "new_bank", "d_bank", "d_k_val", "d_v", "d_beta", "d_g", "d_q_val")
PER_CHUNK = ("a", "qk", "slots", "starts", "order", "decay", "read_slots", "read_starts", "read_order")


class Steps:
    """The steps of one implementation, each jitted alone. Records what they were called with."""

    def __init__(self, implementation):
        self.implementation = implementation
        self.calls = {}

    def __getattr__(self, name):
        def call(*args, **settings):
            self.calls.setdefault((name, tuple(settings.items())), args)
            return run(name, self.implementation, args, settings)

        return call


@functools.cache
def jitted(name, implementation, settings):
    step = functools.partial(getattr(kernels, name), implementation=implementation, **dict(settings))
    return jax.jit(step, compiler_options=FAST_COMPILE)


def run(name, implementation, args, settings):
    return jitted(name, implementation, tuple(settings.items()))(*args)


def composed(steps, inputs, cotangents, mode="none"):
    """The whole operation and its gradients, step after step."""
    bank, k_idx, k_val, v, beta, g, q_idx, q_val = (jnp.asarray(inputs[name]) for name in INPUTS)
    slots = bank.shape[-2]
    chunks = steps.phase1(k_idx, k_val, g, q_idx, q_val, chunk_size=CHUNK, num_slots=slots)
    x, qx = steps.solve(chunks.a, chunks.qk, beta, chunks.writes)
    ranges = [slice(t, min(t + CHUNK, v.shape[-2])) for t in range(0, v.shape[-2], CHUNK)]

    def of_chunk(i):
        """Arrays of one chunk; the last one's, which is short, are cut to its tokens."""
        at, n = ranges[i], ranges[i].stop - ranges[i].start
        part = {name: getattr(chunks, name)[..., i, :] for name in PER_CHUNK if name not in ("a", "qk")}
        squares = {"a": chunks.a, "qk": chunks.qk, "x": x, "qx": qx}
        part |= {name: square[..., i, :n, :n] for name, square in squares.items()}
        for kind, count in (("", k_idx.shape[-1]), ("read_", q_idx.shape[-1])):
            most = min(n * count, slots)
            part[f"{kind}slots"] = part[f"{kind}slots"][..., :most]
            part[f"{kind}starts"] = part[f"{kind}starts"][..., : most + 1]
            part[f"{kind}order"] = part[f"{kind}order"][..., : n * count]
        part["decay"] = part["decay"][..., : min(n * k_idx.shape[-1], slots)]
        per_token = {
            "k_eff": chunks.k_eff, "k_carry": chunks.k_carry, "q_eff": chunks.q_eff,
            "k_idx": k_idx, "q_idx": q_idx, "v": v, "beta": beta, "dy": cotangents["y"],
        }  # fmt: skip
        part |= {name: jnp.asarray(value[..., at, :]) for name, value in per_token.items()}
        return part | {"writes": chunks.writes[..., at]}

    kept, readings = [], []
    for i in range(len(ranges)):
        c = of_chunk(i)
        retrieved, inter = steps.gather(bank, c["k_idx"], c["k_eff"], c["q_idx"], c["q_eff"])
        snapshot = steps.take_snapshot(bank, c["slots"], snapshot_quant=mode)
        error, delta, y = steps.dual_matmul(c["x"], c["qx"], c["beta"], c["writes"], c["v"], retrieved, inter)
        bank = steps.mover(bank, c["slots"], c["starts"], c["order"], c["k_carry"], c["decay"], delta)
        kept.append((*snapshot, error, delta))
        readings.append(y)
    new_bank, d_bank = bank, jnp.asarray(cotangents["new_bank"], bank.dtype)

    gradients = []
    for i in reversed(range(len(ranges))):
        c = of_chunk(i)
        snapshot, scale, error, delta = kept[i]
        carried = steps.gather_gradient(d_bank, c["k_idx"], c["k_carry"])
        dv, dbeta, da, dqk = steps.du_matmul(
            c["a"], c["qk"], c["x"], c["beta"], c["writes"], c["dy"], carried, error, delta
        )
        bank, d_bank, dk_eff, dk_carry, ddecay = steps.write_mover_backward(
            bank, d_bank, c["slots"], c["starts"], c["order"], c["decay"], c["k_eff"],
            snapshot, scale, delta, dv, snapshot_quant=mode,
        )  # fmt: skip
        d_bank, dq_eff = steps.read_mover_backward(
            bank, d_bank, c["read_slots"], c["read_starts"], c["read_order"], c["q_eff"], c["dy"]
        )
        full = CHUNK - da.shape[-1]
        square = [(0, 0)] * (da.ndim - 2) + [(0, full), (0, full)]
        most = [(0, 0)] * (ddecay.ndim - 1) + [(0, chunks.decay.shape[-1] - ddecay.shape[-1])]
        gradients.insert(
            0,
            (
                dv,
                dbeta,
                jnp.pad(da, square),
                jnp.pad(dqk, square),
                dk_eff,
                dk_carry,
                dq_eff,
                jnp.pad(ddecay, most),
            ),
        )
    dv, dbeta, da, dqk, dk_eff, dk_carry, dq_eff, ddecay = zip(*gradients, strict=True)
    dv, dbeta, dk_eff, dk_carry, dq_eff = (jnp.concatenate(x, axis=-2) for x in (dv, dbeta, dk_eff, dk_carry, dq_eff))
    da, dqk = jnp.stack(da, axis=-3), jnp.stack(dqk, axis=-3)
    ddecay = jnp.stack(ddecay, axis=-2)
    dk_val, dg, dq_val = steps.phase1_backward(
        k_idx, k_val, g, q_idx, q_val, chunks, da, dqk, dk_eff, dk_carry, dq_eff, ddecay, num_slots=slots
    )
    got = (jnp.concatenate(readings, axis=-2), new_bank, d_bank, dk_val, dv, dbeta, dg, dq_val)
    return {name: np.asarray(x) for name, x in zip(NAMES, got, strict=True)} | {"restored": np.asarray(bank)}


@functools.cache
def walk(implementation, case=CASE, dtype="float32", mode="none"):
    """All steps of one case: what they give together, and the first call of each."""
    inputs, cotangents = make_inputs(case)
    inputs = in_dtype(inputs, dtype)
    cotangents = {name: x.astype(dtype) for name, x in cotangents.items()}
    steps = Steps(implementation)
    with jax.enable_x64(dtype == "float64"):
        return composed(steps, inputs, cotangents, mode), steps.calls


def whole(implementation, case=CASE, dtype="float32", mode="none"):
    inputs, cotangents = make_inputs(case)
    settings = {"chunk_size": CHUNK, "snapshot_quant": mode, "shared_bank": case.shared}
    return results(in_dtype(inputs, dtype), cotangents, implementation=implementation, **settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("case", [CASE, SHARED], ids=str)
def test_steps_make_the_operation(case, dtype):
    got, _ = walk("cpu", case, dtype)
    want = whole("cpu", case, dtype)
    # In bfloat16 the whole casts the gradients of its inputs in the end.
    got = {name: got[name].astype(want[name].dtype) for name in NAMES}
    errors = {name: relative_error(got[name], want[name]) for name in NAMES}
    assert all(error <= tol(dtype) for error in errors.values()), errors


@pytest.mark.parametrize("mode", ["none", "bf16", "fp8", "int4"])
def test_snapshots_are_restored(mode):
    inputs, _ = make_inputs(CASE)
    got, _ = walk("cpu", mode=mode)
    error = relative_rms(got["restored"], inputs["bank"])
    low, high = {"none": (0, 0), "bf16": (1e-3, 3e-3), "fp8": (0.01, 0.04), "int4": (0.05, 0.15)}[mode]
    assert low <= error <= high
    want = whole("cpu", mode=mode)
    errors = {name: relative_error(got[name], want[name]) for name in NAMES}
    assert all(error <= tol("float32") for error in errors.values()), errors


def test_steps_in_plain_jax():
    """Each step in plain JAX and as a kernel, on the arguments that the step has in the whole."""
    _, calls = walk("cpu")
    assert {name for name, _ in calls} == set(kernels.__all__) - {"Chunks"}
    for (name, settings), args in calls.items():
        if name != "take_snapshot":
            assert_equal_steps(name, dict(settings), args)


@pytest.mark.parametrize("mode", ["none", "bf16", "fp8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_take_snapshot_in_plain_jax(mode, dtype):
    rng = np.random.default_rng(0)
    bank = jnp.asarray(rng.standard_normal((2, 50, 65)), dtype)
    bank = bank.at[0, 3].set(0).at[0, 4].multiply(1e-30).at[0, 5].multiply(1e30).at[0, 6, 7].set(jnp.nan)
    slots = jnp.asarray(np.argsort(rng.random((2, 50)), axis=-1)[:, :30], jnp.int32)
    slots = slots.at[0, :4].set(jnp.arange(3, 7)).at[:, 25:].set(-1)
    got, want = (
        run("take_snapshot", implementation, (bank, slots), {"snapshot_quant": mode})
        for implementation in ("cpu", "xla")
    )
    finite = np.isfinite(np.asarray(bank, np.float32)[np.arange(2)[:, None], slots[:, :25]]).all(axis=-1)
    assert not finite.all()
    (rows, scale), (want_rows, want_scale) = ((np.asarray(x[:, :25]) for x in y) for y in (got, want))
    assert_same_bits({"rows": rows[finite]}, {"rows": want_rows[finite]})
    assert scale.shape == (2, 25 if mode in ("fp8", "int4") else 0)
    if scale.size:
        assert_same_bits({"scale": scale[finite]}, {"scale": want_scale[finite]})
        assert np.isnan(scale[~finite]).all()
        assert np.isnan(want_scale[~finite]).all()


def assert_equal_steps(name, settings, args):
    got, want = (run(name, implementation, args, settings) for implementation in ("cpu", "xla"))
    for i, (a, b) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(a.dtype, jnp.integer):
            assert np.array_equal(a, b), f"result {i} of {name}"
        else:
            assert relative_error(a, b) <= tol("float32"), f"result {i} of {name}"


@pytest.mark.parametrize("name", [name for name in kernels.__all__ if name != "Chunks"])
def test_vmap_of_a_step(name):
    _, calls = walk("cpu")
    ((settings, args),) = [(dict(key[1]), args) for key, args in calls.items() if key[0] == name][:1]
    if name == "take_snapshot":  # rows of no slot are unspecified
        args = (args[0], jnp.maximum(args[1], 0))
    step = functools.partial(getattr(kernels, name), implementation="cpu", **settings)
    twice = jax.tree.map(lambda x: jnp.stack([x, x]), args)
    want = step(*args)
    for got in (jax.vmap(step)(*twice), step(*twice)):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert np.array_equal(a[0], b, equal_nan=True)
            assert np.array_equal(a[1], b, equal_nan=True)


# ---- garbage in lists


GARBAGE = (-1, -5, 24, 10**6, 2**31 - 1, -(2**31))


@pytest.mark.parametrize("implementation", ["cpu", "xla"])
@pytest.mark.parametrize("seed", range(3))
def test_garbage_in_lists_touches_nothing(implementation, seed):
    # Whatever the integer arguments hold, every step returns results of its shapes.
    _, calls = walk("cpu")
    rng = np.random.default_rng(seed)

    def spoil(x):
        if not jnp.issubdtype(jnp.asarray(x).dtype, jnp.integer):
            return x
        bad = rng.choice(np.array(GARBAGE, np.int32), x.shape)
        return jnp.where(rng.random(x.shape) < (0.3, 0.7, 1.0)[seed], bad, x)

    for (name, settings), args in calls.items():
        want = run(name, implementation, args, dict(settings))
        got = run(name, implementation, jax.tree.map(spoil, args), dict(settings))
        jax.block_until_ready(got)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)


@pytest.mark.parametrize("implementation", ["cpu", "xla"])
def test_a_bank_survives_garbage(implementation):
    # Slots that do not exist, positions that do not exist: the rows of all others stay as they are.
    _, calls = walk("cpu")
    bank, slots, starts, order, k_carry, decay, delta = calls["mover", ()]
    none = jnp.full_like(slots, 2**31 - 1)
    got = run("mover", implementation, (bank, none, starts, order, k_carry, decay, delta), {})
    assert np.array_equal(got, bank)
    nowhere = jnp.full_like(order, 10**6)
    got = run("mover", implementation, (bank, slots, starts, nowhere, k_carry, jnp.ones_like(decay), delta), {})
    assert np.array_equal(got, bank)


# ---- errors


def test_errors_name_the_argument():
    _, calls = walk("cpu")
    bank, k_idx, k_eff, q_idx, q_eff = calls["gather", ()]
    with pytest.raises(ValueError, match="k_eff has 3 on its axis W, but needs 4"):
        kernels.gather(bank, k_idx, k_eff[..., :3], q_idx, q_eff)
    with pytest.raises(TypeError, match="k_idx must be int32, got float32"):
        kernels.gather(bank, k_eff, k_eff, q_idx, q_eff)
    with pytest.raises(TypeError, match="q_eff must be float32, got bfloat16"):
        kernels.gather(bank, k_idx, k_eff, q_idx, q_eff.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="bank has leading axes"):
        kernels.gather(bank[:1], k_idx, k_eff, q_idx, q_eff)
    with pytest.raises(ValueError, match="implementation must be one of"):
        kernels.gather(bank, k_idx, k_eff, q_idx, q_eff, implementation="reference")
    with pytest.raises(ValueError, match="snapshot_quant must be one of"):
        kernels.take_snapshot(bank, calls["mover", ()][1], snapshot_quant="int8")
    inputs = next(args for key, args in calls.items() if key[0] == "phase1")
    with pytest.raises(ValueError, match="chunk_size must be in"):
        kernels.phase1(*inputs, chunk_size=0, num_slots=24)
    with pytest.raises(TypeError, match="chunks must be the Chunks"):
        kernels.phase1_backward(*inputs, None, *[None] * 6, num_slots=24)


def test_chunks_are_what_phase1_returns():
    _, calls = walk("cpu")
    args = next(args for key, args in calls.items() if key[0] == "phase1")
    assert isinstance(kernels.phase1(*args, chunk_size=CHUNK, num_slots=24), Chunks)
