"""The plain JAX steps and both forms of the whole call, against the reference."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdm_jax import _xla, reference, snapshot
from sdm_jax._layout import Sizes, accumulate_dtype, saved_struct

FORMS = ("chunked", "token")
INPUTS = ("bank", "k_idx", "k_val", "v", "beta", "g", "q_idx", "q_val")
RESULTS = ("y", "new_bank", "d_bank", "d_k_val", "d_v", "d_beta", "d_g", "d_q_val")  # and the restored bank
GATES = (0.0, -0.05, -5.0, -20.0, -1e4, -np.inf, 0.3)
CHUNK = 16
# Compiling is most of the time of these tests, and their arrays are tiny.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def jit(fn):
    return jax.jit(fn, compiler_options=COMPILER_OPTIONS)


def make_inputs(lead, num_tokens, num_slots, width, num_writes, num_reads, *, gates, dropped=True, bank_lead=None):
    """Arguments of `write_read` in float32, and cotangents; stream `p` has the gate `GATES[p]`.

    The ids come from few slots, so that tokens repeat their own and each other's, and a shared bank's
    streams keep to ranges of their own. Dropped entries and gates hold NaN, and so do tokens 2 and 3 of
    every stream, which write nothing.
    """
    rng = np.random.default_rng(5)
    num_streams = int(np.prod(lead))
    bank_lead = lead if bank_lead is None else bank_lead
    sharing = num_streams // int(np.prod(bank_lead))
    span = num_slots // sharing
    offset = (np.arange(num_streams) % sharing * span).reshape(*lead, 1, 1)
    used = rng.permutation(span)[: 3 * num_writes + 8]

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    def ids_and_weights(count):
        ids = (rng.choice(used, (*lead, num_tokens, count)) + offset).astype(np.int32)
        weights = normal(*lead, num_tokens, count)
        weights /= np.abs(weights).sum(-1, keepdims=True)  # beta |k|^2 <= 1 even where all ids are equal
        if dropped:
            out = rng.random(ids.shape) < 0.15
            out[..., 2:4, :] |= count == num_writes
            ids[out] = rng.choice(np.array([-1, num_slots, 2**31 - 1, -(2**31)], np.int32), out.sum())
            weights[out] = np.nan
        return ids, weights

    k_idx, k_val = ids_and_weights(num_writes)
    q_idx, q_val = ids_and_weights(num_reads)
    gate = np.resize(np.array(GATES, np.float32), num_streams).reshape(*lead, 1, 1)
    # Gates near the given one, which is met exactly by every third token.
    g = np.broadcast_to(gate, (*lead, num_tokens, gates)) * rng.uniform(0.5, 1, (num_tokens, gates))
    g = np.where(np.isinf(gate), -1.0, g)
    g[..., ::3, :] = gate
    v, beta = normal(*lead, num_tokens, width), rng.random((*lead, num_tokens, 1))
    if dropped:
        v[..., 2:4, :] = beta[..., 2:4, :] = g[..., 2:4, :] = np.nan
        if gates == num_writes:
            g[np.isnan(k_val)] = np.nan
    values = (normal(*bank_lead, num_slots, width), k_idx, k_val, v, beta, g, q_idx, q_val)
    inputs = {name: x if name.endswith("idx") else x.astype(np.float32) for name, x in zip(INPUTS, values, strict=True)}
    return inputs, (normal(*v.shape), normal(*bank_lead, num_slots, width))


def gradients(fn, inputs, cotangents, dtype, gate_dtype):
    """The results and all gradients of a `write_read`, named, as NumPy arrays."""
    dtypes = {name: gate_dtype if name in ("beta", "g") else dtype for name in INPUTS}
    ids = tuple(jnp.asarray(inputs[name]) for name in ("k_idx", "q_idx"))
    floats = [jnp.asarray(inputs[n]).astype(dtypes[n]) for n in INPUTS if not n.endswith("idx")]
    cotangents = tuple(jnp.asarray(x).astype(dtype) for x in cotangents)
    values = fn(ids, floats, cotangents)
    return {name: np.asarray(x) for name, x in zip((*RESULTS, "restored"), values, strict=False)}


def with_vjp(write_read):
    def run(ids, floats, cotangents):
        def call(bank, k_val, v, beta, g, q_val):
            return write_read(bank, ids[0], k_val, v, beta, g, ids[1], q_val)

        out, vjp = jax.vjp(call, *floats)
        return *out, *vjp(cotangents)

    return jit(run)


@functools.cache
def reference_with_vjp(chunk, shared_bank):
    return with_vjp(functools.partial(reference.write_read, chunk_size=chunk, shared_bank=shared_bank))


@functools.cache
def xla_with_vjp(form, chunk, mode="none", grad_bank_dtype=None):
    settings = {"chunk": chunk, "snapshot_quant": mode, "form": form}

    def run(ids, floats, cotangents):
        (k_idx, q_idx), (bank, k_val, v, beta, g, q_val), (dy, d_bank) = ids, floats, cotangents
        y, new_bank, *leaves = _xla.forward(bank, k_idx, k_val, v, beta, g, q_idx, q_val, save=True, **settings)
        struct = saved_struct(Sizes.of(bank, k_idx, g, q_idx, chunk), bank.dtype, mode)
        assert [(x.shape, x.dtype) for x in leaves] == [(s.shape, s.dtype) for s in jax.tree.leaves(struct)]
        saved = jax.tree.unflatten(jax.tree.structure(struct), leaves)
        restored, d_bank, *gradients = _xla.backward(
            new_bank, d_bank.astype(grad_bank_dtype or bank.dtype), dy, k_idx, k_val, beta, g, q_idx, q_val,
            saved, **settings,
        )  # fmt: skip
        assert d_bank.dtype == (grad_bank_dtype or bank.dtype)
        assert all(x.dtype == accumulate_dtype(bank.dtype) for x in gradients)
        return y, new_bank, d_bank, *gradients, restored

    return jit(run)


def assert_close(got, want, tolerance, streams=0):
    """Within `tolerance` of the largest value, of each of the `streams` of the first axis if given."""
    for name in RESULTS:
        x, y = np.asarray(got[name], np.float64), np.asarray(want[name], np.float64)
        assert x.shape == y.shape, name
        assert np.isfinite(x).all(), name
        assert np.isfinite(y).all(), name
        axes = tuple(range(1, x.ndim)) if streams else None
        error = np.abs(x - y).max(axis=axes)
        largest = np.abs(y).max(axis=axes)
        assert (error <= tolerance * np.where(largest == 0, 1, largest)).all(), (name, error / largest)


def exact(inputs, cotangents, shared_bank=False):
    with jax.enable_x64(True):
        fn = reference_with_vjp(CHUNK, shared_bank)
        return gradients(fn, inputs, cotangents, jnp.float64, jnp.float64)


SHAPES = {
    "token_gates_D17": {"sizes": (37, 300, 17, 5, 3), "gates": 1, "lead": (7,)},
    "write_gates_D5": {"sizes": (32, 300, 5, 3, 4), "gates": 3, "lead": (7,)},
    "full_bank_D1": {"sizes": (16, 16, 1, 1, 2), "gates": 1, "lead": (7,)},
    "shared_bank": {"sizes": (21, 200, 8, 4, 4), "gates": 4, "lead": (1, 2, 2), "bank_lead": (1, 2)},
}


@functools.cache
def case(name):
    shape = SHAPES[name]
    bank_lead = shape.get("bank_lead")
    inputs, cotangents = make_inputs(shape["lead"], *shape["sizes"], gates=shape["gates"], bank_lead=bank_lead)
    return inputs, cotangents, exact(inputs, cotangents, bank_lead is not None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SHAPES)
def test_values_and_gradients(name, form):
    inputs, cotangents, want = case(name)
    got = gradients(xla_with_vjp(form, CHUNK), inputs, cotangents, jnp.float32, jnp.float32)
    assert_close(got, want, 1e-5, streams=len(SHAPES[name]["lead"]) == 1)
    for ids, names in (("k_idx", ("d_k_val",)), ("q_idx", ("d_q_val",))):
        dropped = (inputs[ids] < 0) | (inputs[ids] >= inputs["bank"].shape[-2])
        assert all((got[name][dropped] == 0).all() for name in names)
    assert all((got[name][np.isnan(inputs[name[2:]])] == 0).all() for name in ("d_v", "d_beta", "d_g"))
    assert (got["d_g"][np.isneginf(inputs["g"])] == 0).all()


@pytest.mark.parametrize("form", FORMS)
def test_float64(form):
    inputs, cotangents, want = case("write_gates_D5")
    with jax.enable_x64(True):
        got = gradients(xla_with_vjp(form, CHUNK), inputs, cotangents, jnp.float64, jnp.float64)
    assert_close(got, want, 1e-13, streams=True)


@pytest.mark.parametrize("grad_bank_dtype", [None, "float32"])
def test_bfloat16(grad_bank_dtype):
    inputs, cotangents = make_inputs((2,), 37, 300, 16, 4, 4, gates=1)
    fn = reference_with_vjp(CHUNK, False)
    want = gradients(fn, inputs, cotangents, jnp.bfloat16, jnp.float32)
    fn = xla_with_vjp("token", CHUNK, grad_bank_dtype=grad_bank_dtype)  # served by the chunked form
    got = gradients(fn, inputs, cotangents, jnp.bfloat16, jnp.float32)
    assert_close(got, want, 1e-2)
    rounded = np.asarray(got["new_bank"] != want["new_bank"]).mean()
    assert rounded < 1e-3  # one rounding a chunk, of nearly the same sums


def test_gate_gradients_keep_their_relative_accuracy():
    """At g = -20 a gate's gradient is tiny beside the terms of a suffix sum, and still accurate."""
    inputs, cotangents, _ = case("token_gates_D17")
    inputs = {**inputs, "g": np.full_like(inputs["g"], -20)}
    want = exact(inputs, cotangents)["d_g"]
    for form in FORMS:
        got = gradients(xla_with_vjp(form, CHUNK), inputs, cotangents, jnp.float32, jnp.float32)["d_g"]
        assert (np.abs(got - want) <= 1e-4 * np.abs(want) + 1e-6 * np.abs(want).max()).all(), form


@pytest.mark.parametrize("name", [*FORMS, "reference"])
def test_golden(name):
    """The published PyTorch implementation on a GPU, in float32."""
    golden = dict(np.load(pathlib.Path(__file__).parent / "golden" / "pytorch_h200_f32.npz"))
    chunk = int(golden["chunk_size"])
    fn = reference_with_vjp(chunk, False) if name == "reference" else xla_with_vjp(name, chunk)
    cotangents = (golden["dy"], np.zeros_like(golden["bank"]))
    got = gradients(fn, golden, cotangents, jnp.float32, jnp.float32)
    assert_close(got, golden, 1e-6)


def test_reference_against_finite_differences():
    inputs, cotangents = make_inputs((1,), 6, 9, 2, 3, 2, gates=3)
    inputs["g"][:, 4:] = -0.3
    got = exact(inputs, cotangents)
    with jax.enable_x64(True):

        @jit
        def loss(inputs):
            y, new_bank = reference.write_read(*(inputs[name] for name in INPUTS), chunk_size=CHUNK)
            return jnp.vdot(y, cotangents[0]) + jnp.vdot(new_bank, cotangents[1])

        inputs = {n: x if n.endswith("idx") else x.astype(np.float64) for n, x in inputs.items()}
        for name in INPUTS:
            if name.endswith("idx"):
                continue
            for i in np.ndindex(inputs[name].shape):
                values = []
                for step in (1e-6, -1e-6):
                    moved = inputs[name].copy()
                    moved[i] += step
                    values.append(float(loss({**inputs, name: moved})))
                slope = (values[0] - values[1]) / 2e-6
                np.testing.assert_allclose(got["d_" + name][i], slope, rtol=1e-6, atol=1e-7, err_msg=f"{name}{i}")


@pytest.mark.parametrize(
    ("mode", "form"), [("fp8", "chunked"), ("int4", "chunked"), ("bf16", "token"), ("fp8", "token"), ("int4", "token")]
)
def test_lossy_snapshots(mode, form):
    inputs, cotangents, _ = case("token_gates_D17")
    plain = gradients(xla_with_vjp(form, CHUNK), inputs, cotangents, jnp.float32, jnp.float32)
    got = gradients(xla_with_vjp(form, CHUNK, mode), inputs, cotangents, jnp.float32, jnp.float32)
    for name in ("y", "new_bank"):
        np.testing.assert_array_equal(got[name], plain[name])
    for name in ("d_bank", "d_v", "d_beta"):
        np.testing.assert_allclose(got[name], plain[name], rtol=0, atol=1e-6 * np.abs(plain[name]).max())
    bound = {"bf16": 5e-3, "fp8": 5e-2, "int4": 0.25}[mode]
    for name in ("d_k_val", "d_g", "d_q_val"):
        error = np.linalg.norm(got[name] - plain[name]) / np.linalg.norm(plain[name])
        assert 0 < error < bound, name

    # The bank comes back exactly, or with the dequantized rows of the slots that were written.
    bank = inputs["bank"]
    np.testing.assert_array_equal(plain["restored"], bank)
    written = np.zeros(bank.shape[:-1], bool)
    for stream, ids in enumerate(inputs["k_idx"]):
        written[stream, ids[(ids >= 0) & (ids < bank.shape[1])]] = True
    rows = snapshot.dequantize(*snapshot.quantize(bank, mode), mode, jnp.float32, bank.shape[-1])
    np.testing.assert_array_equal(got["restored"], np.where(written[..., None], rows, bank))


def test_snapshot_error():
    """Relative RMS error on normal data, and rows that are not finite."""
    rows = np.random.default_rng(0).standard_normal((64, 65)).astype(np.float32)
    rows[0, 3], rows[1, 64], rows[2] = np.nan, -np.inf, 0
    for mode, low, high in (("bf16", 1e-3, 2e-3), ("fp8", 0.02, 0.03), ("int4", 0.09, 0.13)):
        stored, scale = snapshot.quantize(jnp.asarray(rows), mode)
        back = np.asarray(snapshot.dequantize(stored, scale, mode, jnp.float32, 65))
        assert low < np.linalg.norm(back[2:] - rows[2:]) / np.linalg.norm(rows[2:]) < high
        if scale is not None:
            assert np.isnan(back[:2]).all()
    low, high = np.asarray(snapshot.quantize(jnp.array([[7.0, -7.0, 1.0]]), "int4")[0])[0]
    assert (low, high) == (0x97, 0x01)


def test_steps_compose():
    """The steps, called one by one on a ragged stream, are the whole call."""
    inputs, (dy, d_new_bank), _ = case("token_gates_D17")
    bank, k_idx, k_val, v, beta, g, q_idx, q_val = (jnp.asarray(inputs[name]) for name in INPUTS)
    num_tokens, num_slots = k_idx.shape[1], bank.shape[1]
    settings = {"chunk": CHUNK, "num_slots": num_slots}
    want = gradients(xla_with_vjp("chunked", CHUNK), inputs, (dy, d_new_bank), jnp.float32, jnp.float32)

    @jit
    def compose(bank, d_bank, dy):
        chunks = _xla.phase1(k_idx, k_val, g, q_idx, q_val, **settings)
        x, qx = _xla.solve(chunks.a, chunks.qk, beta, chunks.writes)
        num_chunks = x.shape[1]
        y, kept, gradients = [], [], []
        for i in range(num_chunks):
            part = slice(i * CHUNK, min((i + 1) * CHUNK, num_tokens))
            c, of_slots = part.stop - part.start, (chunks.slots[:, i], chunks.starts[:, i], chunks.order[:, i])
            rows = _xla.gather(bank, k_idx[:, part], chunks.k_eff[:, part], q_idx[:, part], chunks.q_eff[:, part])
            stored = _xla.take_snapshot(bank, chunks.slots[:, i], mode="none")
            tokens = (beta[:, part], chunks.writes[:, part])
            error, delta, y_part = _xla.dual_matmul(x[:, i, :c, :c], qx[:, i, :c, :c], *tokens, v[:, part], *rows)
            bank = _xla.mover(bank, *of_slots, chunks.k_carry[:, part], chunks.decay[:, i], delta)
            y.append(y_part)
            kept.append((part, c, of_slots, tokens, error, delta, stored))
        new_bank = bank
        for i, (part, c, of_slots, tokens, error, delta, stored) in reversed(list(enumerate(kept))):
            carried = _xla.gather_gradient(d_bank, k_idx[:, part], chunks.k_carry[:, part])
            matrices = (m[:, i, :c, :c] for m in (chunks.a, chunks.qk, x))
            dv, dbeta, da, dqk = _xla.du_matmul(*matrices, *tokens, dy[:, part], carried, error, delta)
            bank, d_bank, dk_eff, dk_carry, ddecay = _xla.write_mover_backward(
                bank,
                d_bank,
                *of_slots,
                chunks.decay[:, i],
                chunks.k_eff[:, part],
                *stored,
                delta,
                dv,
                mode="none",
            )
            of_reads = (chunks.read_slots[:, i], chunks.read_starts[:, i], chunks.read_order[:, i])
            d_bank, dq_eff = _xla.read_mover_backward(bank, d_bank, *of_reads, chunks.q_eff[:, part], dy[:, part])
            whole = ((0, 0), (0, CHUNK - c), (0, CHUNK - c))
            da, dqk = jnp.pad(da, whole)[:, None], jnp.pad(dqk, whole)[:, None]
            gradients.append((dv, dbeta, da, dqk, dk_eff, dk_carry, dq_eff, ddecay[:, None]))
        joined = (jnp.concatenate(x[::-1], axis=1) for x in zip(*gradients, strict=True))
        dv, dbeta, *rest = joined
        dk_val, dg, dq_val = _xla.phase1_backward(k_idx, k_val, g, q_idx, q_val, chunks, *rest, **settings)
        y = jnp.concatenate(y, axis=1)
        return bank, (y, new_bank, d_bank, dk_val, dv, dbeta, dg, dq_val)

    restored, values = compose(bank, jnp.asarray(d_new_bank), jnp.asarray(dy))
    np.testing.assert_array_equal(restored, bank)
    assert_close(dict(zip(RESULTS, values, strict=True)), want, 1e-6)


@pytest.mark.parametrize(("form", "slab"), [("chunked", CHUNK), ("chunked", 64), ("token", 64)])
def test_saving_and_slabs_do_not_matter(monkeypatch, form, slab):
    inputs, cotangents, _ = case("token_gates_D17")
    saving = gradients(xla_with_vjp(form, CHUNK), inputs, cotangents, jnp.float32, jnp.float32)
    monkeypatch.setattr("sdm_jax._layout.SLAB_TOKENS", slab)
    settings = {"chunk": CHUNK, "snapshot_quant": "none", "form": form}
    y, new_bank = jit(functools.partial(_xla.forward, save=False, **settings))(*inputs.values())
    np.testing.assert_allclose(y, saving["y"], rtol=0, atol=1e-6 * np.abs(y).max())
    np.testing.assert_allclose(new_bank, saving["new_bank"], rtol=0, atol=1e-6 * np.abs(new_bank).max())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("streams", "num_tokens"), [(7, 0), (0, 37), (7, 37)])
def test_empty(streams, num_tokens, form):
    """No tokens, no streams, and streams of which every id is dropped."""
    inputs, cotangents, _ = case("token_gates_D17")
    inputs = {n: x[:streams] if n == "bank" else x[:streams, :num_tokens] for n, x in inputs.items()}
    cotangents = (cotangents[0][:streams, :num_tokens], cotangents[1][:streams])
    inputs["k_idx"], inputs["q_idx"] = np.full_like(inputs["k_idx"], -1), np.full_like(inputs["q_idx"], 300)
    got = gradients(xla_with_vjp(form, CHUNK), inputs, cotangents, jnp.float32, jnp.float32)
    np.testing.assert_array_equal(got["new_bank"], inputs["bank"])
    np.testing.assert_array_equal(got["d_bank"], cotangents[1])
    assert all(not got[name].any() for name in RESULTS if not name.endswith("bank"))


def test_decode_step():
    inputs, _, _ = case("shared_bank")
    args = {n: jnp.asarray(x) for n, x in inputs.items()}
    y, new_bank = reference.write_read(*args.values(), chunk_size=CHUNK, shared_bank=True)
    bank = args.pop("bank")
    step = jit(functools.partial(reference.decode_step, shared_bank=True))
    for t in range(y.shape[-2]):
        reading, bank = step(bank, *(x[..., t, :] for x in args.values()))
        np.testing.assert_allclose(reading, y[..., t, :], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(bank, new_bank, rtol=1e-5, atol=1e-6)
