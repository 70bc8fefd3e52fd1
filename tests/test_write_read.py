"""`write_read`: every implementation over one set of cases, against the token loop in float64."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    FEW_SLOTS,
    FLOATS,
    GATES,
    IDS,
    INPUTS,
    NATIVE,
    RESULTS,
    SHAPE,
    SHAPES,
    Case,
    as_jax,
    case_oracle,
    case_results,
    in_dtype,
    make_inputs,
    oracle,
    recurrence,
    results,
)
from tolerance import assert_close, assert_same_bits, relative_error, relative_rms, rms, tol

import sdm_jax

GOLDEN = pathlib.Path(__file__).parent / "golden" / "pytorch_h200_f32.npz"


def ids_of(case):
    return str(case)


# ---- values and gradients


@pytest.mark.parametrize("case", SHAPES, ids=ids_of)
def test_shapes(implementation, case):
    assert_close(case_results(case, implementation), case_oracle(case), "float32")


@pytest.mark.parametrize("case", GATES + IDS, ids=ids_of)
def test_gates_and_ids(implementation, case):
    assert_close(case_results(case, implementation), case_oracle(case), "float32")


@pytest.mark.parametrize("case", [*SHAPES[::3], *GATES[::4]], ids=ids_of)
def test_float64_bank_on_the_cpu(case):
    # The float32 inputs, widened: float64 results must be far closer than float32 ones.
    assert_close(case_results(case, "cpu", "float64"), case_oracle(case), "float64")


def test_float64_bank_in_plain_jax():
    case = SHAPE["width_3"]
    assert_close(case_results(case, "xla", "float64"), case_oracle(case), "float64")


BFLOAT16_CASES = [case for case in (*SHAPES, *GATES, *IDS) if case.chunk == 16]


# Plain JAX compiles for seconds, the others in no time.
FEW_BFLOAT16_CASES = [SHAPE["shared_by_some"], GATES[-1], *IDS[4:]]


@pytest.mark.parametrize("case", BFLOAT16_CASES, ids=ids_of)
def test_bfloat16_bank_on_the_cpu(case):
    assert_close(case_results(case, "cpu", "bfloat16"), case_oracle(case, "bfloat16"), "bfloat16")


@pytest.mark.parametrize("case", FEW_BFLOAT16_CASES, ids=ids_of)
def test_bfloat16_bank(implementation, case):
    got = case_results(case, implementation, "bfloat16")
    assert {got[name].dtype.name for name in ("y", "new_bank", "d_bank", "d_k_val", "d_v", "d_q_val")} == {"bfloat16"}
    assert {got[name].dtype.name for name in ("d_beta", "d_g")} == {"float32"}
    assert_close(got, case_oracle(case, "bfloat16"), "bfloat16")


@pytest.mark.parametrize(
    "case",
    [
        GATES[-1],
        GATES[-1]._replace(name="width_64", width=64),
        GATES[-1]._replace(name="width_128", width=128, chunk=70, tokens=80),
    ],
    ids=ids_of,
)
def test_bfloat16_bank_with_float32_gradient(implementation, case):
    plain = case_results(case, implementation, "bfloat16")
    got = case_results(case, implementation, "bfloat16", grad_bank_dtype=jnp.float32)
    assert got["d_bank"].dtype.name == "bfloat16"
    assert_same_bits({n: got[n] for n in ("y", "new_bank")}, {n: plain[n] for n in ("y", "new_bank")})
    want = case_oracle(case, "bfloat16")
    assert_close(got, want, "bfloat16")
    # dM is rounded once instead of once or twice a chunk.
    assert relative_rms(got["d_bank"], want["d_bank"]) < relative_rms(plain["d_bank"], want["d_bank"])
    assert relative_rms(got["d_bank"], want["d_bank"]) < 2**-9


def test_float32_inputs_of_a_bfloat16_bank_are_rounded():
    case = SHAPE["width_3"]
    inputs, cotangents = make_inputs(case)
    wide = inputs | {"bank": in_dtype(inputs, "bfloat16")["bank"]}
    got = results(wide, cotangents, **case.settings)
    want = case_results(case, None, "bfloat16")
    assert {got[f"d_{name}"].dtype.name for name in FLOATS if name != "bank"} == {"float32"}
    assert_same_bits(
        {name: got[name].astype(want[name].dtype) for name in RESULTS}, want
    )  # a gradient rounded to the dtype of its input, and only then


def test_reference_is_the_recurrence():
    inputs, cotangents = make_inputs(Case("recurrence", lead=(), slots=30, gate_per_write=True))
    y, new_bank = recurrence(inputs)
    want = oracle(inputs, cotangents)
    np.testing.assert_allclose(y, want["y"], rtol=0, atol=1e-13)
    np.testing.assert_allclose(new_bank, want["new_bank"], rtol=0, atol=1e-13)


def test_chunk_size_changes_rounding_only(implementation):
    case = SHAPE["large_chunk"]
    want = case_oracle(case)
    assert case.chunk != 40
    assert_close(case_results(case, implementation, chunk_size=40), want, "float32")


def test_golden_results(implementation):
    golden = np.load(GOLDEN)
    inputs = {name: golden[name] for name in INPUTS}
    cotangents = {"y": golden["dy"], "new_bank": np.zeros_like(golden["bank"])}
    got = results(
        inputs,
        cotangents,
        implementation=implementation,
        chunk_size=int(golden["chunk_size"]),
    )
    errors = {name: relative_error(got[name], golden[name]) for name in RESULTS}
    assert all(error <= 1e-6 for error in errors.values()), errors


# ---- snapshot modes


SNAPSHOT_CASE = Case("snapshot", width=64, gates="mild")
ODD_WIDTH = FEW_SLOTS._replace(name="snapshot_odd_width", gates=-0.05, gate_per_write=True)
# Relative RMS error of the gradients that read restored rows, at least and at most.
BANDS = {"bf16": (2e-4, 5e-3), "fp8": (2e-3, 5e-2), "int4": (1e-2, 2.5e-1)}
EXACT = ("y", "new_bank", "d_bank", "d_v", "d_beta")
APPROXIMATE = ("d_k_val", "d_g", "d_q_val")


def assert_approximate(got, exact, mode):
    assert_same_bits({name: got[name] for name in EXACT}, {name: exact[name] for name in EXACT})
    low, high = BANDS[mode]
    errors = {name: relative_rms(got[name], exact[name]) for name in APPROXIMATE}
    assert all(low <= error <= high for error in errors.values()), errors


@pytest.mark.parametrize("mode", ["bf16", "fp8", "int4"])
def test_lossy_snapshots(implementation, mode):
    exact = case_results(SNAPSHOT_CASE, implementation)
    assert_approximate(case_results(SNAPSHOT_CASE, implementation, snapshot_quant=mode), exact, mode)


def test_int4_snapshot_of_an_odd_width(implementation):
    exact = case_results(ODD_WIDTH, implementation, "bfloat16")
    assert_approximate(case_results(ODD_WIDTH, implementation, "bfloat16", snapshot_quant="int4"), exact, "int4")


@pytest.mark.parametrize("mode", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize("case", [SHAPE["width_1"], ODD_WIDTH, SHAPE["width_130"], SHAPE["shared_by_some"]], ids=ids_of)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_lossy_snapshots_on_the_cpu(case, mode, dtype):
    case = case._replace(gates="mild")
    exact = case_results(case, "cpu", dtype)
    got = case_results(case, "cpu", dtype, snapshot_quant=mode)
    if case.width > 1 and (mode, dtype) != ("bf16", "bfloat16"):
        assert_approximate(got, exact, mode)
    else:  # the scale of a row of one column fits it, up to bfloat16's rounding
        assert_same_bits({name: got[name] for name in EXACT}, {name: exact[name] for name in EXACT})
        assert all(relative_rms(got[name], exact[name]) < 2**-7 for name in APPROXIMATE)


def test_bfloat16_snapshot_of_a_bfloat16_bank_is_exact():
    want = case_results(ODD_WIDTH, None, "bfloat16")
    assert_same_bits(case_results(ODD_WIDTH, None, "bfloat16", snapshot_quant="bf16"), want)


def test_not_finite_rows_restore_as_nan(implementation):
    # A row of one stream holds an infinity: gradients that read it are NaN; the other stream is untouched.
    case = SNAPSHOT_CASE
    inputs, cotangents = make_inputs(case)
    clean = results(inputs, cotangents, implementation=implementation, snapshot_quant="int4", chunk_size=16)
    inputs["bank"][0, 0, 0] = np.inf
    inputs["k_idx"][0, 0, 0] = 0
    inputs["k_val"][0, 0, 0] = 0.25
    inputs["v"][0, 0], inputs["beta"][0, 0], inputs["g"][0, 0] = 1, 0.5, -0.1
    got = results(inputs, cotangents, implementation=implementation, snapshot_quant="int4", chunk_size=16)
    assert np.isnan(got["d_k_val"][0, 0, 0])
    assert_same_bits({n: got[n][1] for n in RESULTS}, {n: clean[n][1] for n in RESULTS})


# ---- gates


@pytest.mark.parametrize("per_write", [False, True], ids=["per_token", "per_write"])
def test_erasing_gate_has_zero_gradient(implementation, per_write):
    case = FEW_SLOTS._replace(name="erase", gates=-np.inf, gate_per_write=per_write)
    got = case_results(case, implementation)
    gates = make_inputs(case)[0]["g"]
    assert np.isneginf(gates).sum() > 10
    assert np.all(got["d_g"][np.isneginf(gates)] == 0)
    assert all(np.isfinite(x).all() for x in got.values())


def test_erased_slot_forgets_exactly(implementation):
    # One slot, erased by every third token: what came before, however large, leaves no trace after it.
    case = FEW_SLOTS._replace(name="forget", gates=-np.inf, ids="equal")
    inputs, cotangents = make_inputs(case)
    other = inputs | {"bank": inputs["bank"] * np.float32(1e30)}
    a, b = (results(x, cotangents, implementation=implementation, chunk_size=16) for x in (inputs, other))
    slot = inputs["k_idx"][0, 0, 0]
    assert np.array_equal(a["new_bank"][0, slot], b["new_bank"][0, slot])
    assert np.isfinite(b["d_g"]).all()


def test_plus_infinite_gate_acts_like_nan(implementation):
    case = FEW_SLOTS._replace(name="mild", gates="mild")
    inputs, cotangents = make_inputs(case)
    clean = results(inputs, cotangents, implementation=implementation, chunk_size=16)
    inputs["g"][0, 5] = np.inf
    got = results(inputs, cotangents, implementation=implementation, chunk_size=16)
    slot = next(s for s in inputs["k_idx"][0, 5] if 0 <= s < case.slots)
    assert not np.isfinite(got["new_bank"][0, slot]).any()
    assert_same_bits({n: got[n][1] for n in RESULTS}, {n: clean[n][1] for n in RESULTS})


@pytest.mark.parametrize("name", ["bank", "k_val", "v", "beta", "g", "q_val"])
def test_nan_stays_in_its_stream(implementation, name):
    case = FEW_SLOTS._replace(name="mild", gates="mild")
    inputs, cotangents = make_inputs(case)
    clean = results(inputs, cotangents, implementation=implementation, chunk_size=16)
    inputs[name][0] = np.nan
    got = results(inputs, cotangents, implementation=implementation, chunk_size=16)
    assert np.isnan(got["y"][0]).any()
    assert_same_bits({n: got[n][1] for n in RESULTS}, {n: clean[n][1] for n in RESULTS})


def test_nan_stays_in_its_chunk(implementation):
    # Token 20 writes a NaN value; readings of the chunk before it stay as they were.
    case = FEW_SLOTS._replace(name="mild", gates="mild")
    inputs, cotangents = make_inputs(case)
    clean = results(inputs, cotangents, implementation=implementation, chunk_size=16)
    inputs["v"][0, 20] = np.nan
    got = results(inputs, cotangents, implementation=implementation, chunk_size=16)
    assert np.array_equal(got["y"][0, :16], clean["y"][0, :16])


def test_zero_gates_are_the_ungated_delta_rule(implementation):
    # Distinct ids, g = 0: M <- M + k beta (v - k^T M), with dense keys.
    case = FEW_SLOTS._replace(name="ungated", ids="distinct", gates=0.0)
    inputs, cotangents = make_inputs(case)
    got = results(inputs, cotangents, implementation=implementation, chunk_size=16)
    for stream in range(2):
        bank = inputs["bank"][stream].astype(np.float64)
        y = []
        for t in range(case.tokens):
            k, q = np.zeros(case.slots), np.zeros(case.slots)
            k[inputs["k_idx"][stream, t]] = inputs["k_val"][stream, t]
            q[inputs["q_idx"][stream, t]] = inputs["q_val"][stream, t]
            bank = bank + np.outer(k, inputs["beta"][stream, t] * (inputs["v"][stream, t] - k @ bank))
            y.append(q @ bank)
        assert relative_error(got["y"][stream], np.array(y)) <= tol("float32")
        assert relative_error(got["new_bank"][stream], bank) <= tol("float32")


# ---- ids


def test_equal_ids_give_the_same_bits_every_time(implementation):
    case = FEW_SLOTS._replace(name="equal_per_write", ids="equal", gate_per_write=True)
    want = case_results(case, implementation)
    assert_close(want, case_oracle(case), "float32")
    for _ in range(20):
        assert_same_bits(case_results(case, implementation), want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_ids_outside_the_bank_are_dropped_alike(implementation, dtype):
    # -1, S and 2^31 - 1 with NaN weights and gates act like -1 with zeros, bit for bit.
    case = FEW_SLOTS._replace(name="outside", gate_per_write=True)
    inputs, cotangents = make_inputs(case)
    if (implementation, dtype) == ("cuda", "float64"):
        with pytest.raises(sdm_jax.UnsupportedConfigurationError, match="float64 bank; float32 and bfloat16"):
            results(in_dtype(inputs, dtype), cotangents, implementation=implementation)
        return
    cleaned = {name: np.nan_to_num(x, nan=0.0, neginf=-np.inf) for name, x in inputs.items()}
    for name in ("k_idx", "q_idx"):
        cleaned[name] = np.where((inputs[name] < 0) | (inputs[name] >= case.slots), -1, inputs[name]).astype(np.int32)
    got, want = (
        results(in_dtype(x, dtype), cotangents, implementation=implementation, chunk_size=16) for x in (inputs, cleaned)
    )
    assert_same_bits(got, want)
    outside = inputs["k_idx"] != cleaned["k_idx"]
    assert set(np.unique(inputs["k_idx"][outside])) >= {case.slots, 2**31 - 1}
    dropped = cleaned["k_idx"] < 0
    assert np.all(got["d_k_val"][dropped] == 0)
    assert np.all(got["d_g"][dropped] == 0)
    silent = dropped.all(axis=-1)
    assert silent.any()
    assert np.all(got["d_v"][silent] == 0)
    assert np.all(got["d_beta"][silent] == 0)
    assert np.all(got["d_q_val"][cleaned["q_idx"] < 0] == 0)


def test_stream_of_dropped_ids_only(implementation):
    case = FEW_SLOTS._replace(name="mild", gates="mild")
    inputs, cotangents = make_inputs(case)
    inputs["k_idx"][1], inputs["q_idx"][1] = -1, case.slots
    for name in ("k_val", "v", "beta", "g", "q_val"):
        inputs[name][1] = np.nan
    got = results(inputs, cotangents, implementation=implementation, chunk_size=16)
    assert np.array_equal(got["new_bank"][1], inputs["bank"][1])
    assert np.array_equal(got["d_bank"][1], cotangents["new_bank"][1])
    for name in ("y", "d_k_val", "d_v", "d_beta", "d_g", "d_q_val"):
        assert np.all(got[name][1] == 0), name


@pytest.mark.parametrize(
    ("lead", "tokens"), [((0,), 5), ((2,), 0), ((2, 0), 0), ((), 0)], ids=["B0", "T0", "B0_T0", "no_axes_T0"]
)
def test_empty(implementation, lead, tokens):
    case = Case("empty", lead=lead, tokens=tokens, gates="mild")
    inputs, cotangents = make_inputs(case)
    got = results(inputs, cotangents, implementation=implementation)
    assert got["y"].shape == inputs["v"].shape
    assert np.array_equal(got["new_bank"], inputs["bank"])
    assert np.array_equal(got["d_bank"], cotangents["new_bank"])
    for name in FLOATS:
        assert got[f"d_{name}"].shape == inputs[name].shape


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8", "uint16", "uint32", "int64", "uint64"])
def test_id_dtypes(dtype):
    # Ids beyond the bank that fit the dtype stay dropped: 2^32 + 5 must not wrap to slot 5.
    case = FEW_SLOTS._replace(name="mild", gates="mild")
    inputs, _ = make_inputs(case)
    other = dict(inputs)
    for name in ("k_idx", "q_idx"):
        dropped = (inputs[name] < 0) | (inputs[name] >= case.slots)
        other[name] = np.where(dropped, 0, inputs[name]).astype(dtype)
        other[name][dropped] = min(np.iinfo(dtype).max, 2**32 + 5)
    run = jax.jit(sdm_jax.write_read)
    want = dict(zip(RESULTS, run(**inputs), strict=False))
    assert np.isfinite(want["y"]).all()
    assert_same_bits(dict(zip(RESULTS, sdm_jax.write_read(**other), strict=False)), want)
    with jax.enable_x64(True):
        assert_same_bits(dict(zip(RESULTS, run(**other), strict=False)), want)


# ---- long streams


@pytest.mark.parametrize("gate", [-1e-3, -5.0])
def test_many_tokens_on_few_slots(implementation, gate):
    case = Case("long", lead=(), tokens=131072, slots=8, width=2, writes=2, reads=2, gates=gate)
    inputs, cotangents = make_inputs(case)
    truth = results(in_dtype(inputs, "float64"), cotangents, implementation="cpu")
    start = {name: x if name == "bank" else x[:2000] for name, x in inputs.items()}
    np.testing.assert_allclose(truth["y"][:2000], recurrence(start)[0], rtol=0, atol=1e-11)
    got = results(inputs, cotangents, implementation=implementation)
    assert_close(got, truth, "float32")


@pytest.mark.parametrize("gate", [0.0, -0.05])
def test_long_bfloat16_stream_drifts_little(gate):
    # Each write rounds its row once a chunk, so an ungated bank drifts; a gate forgets the drift.
    case = Case("drift", lead=(), tokens=16384, slots=64, width=8, writes=2, reads=2, gates=gate, ids="distinct")
    inputs, cotangents = make_inputs(case)
    narrow = in_dtype(inputs, "bfloat16")
    got = results(narrow, cotangents)
    exact = {name: x.astype(np.float64) if name in FLOATS else x for name, x in narrow.items()}
    want = results(exact, cotangents, implementation="cpu")
    bound = {0.0: 2**-6, -0.05: 2**-7}[gate]
    for name in ("y", "new_bank"):
        assert relative_rms(got[name], want[name]) < bound
        assert abs(rms(got[name]) / rms(want[name]) - 1) < 2**-8


@pytest.mark.parametrize("implementation", NATIVE)
def test_many_streams_equal_a_loop(implementation):
    lead = 65600
    case = Case("streams", lead=(lead,), tokens=3, slots=4, width=4, writes=2, reads=2, gates="mild")
    inputs, cotangents = make_inputs(case)
    got = results(inputs, cotangents, implementation=implementation)
    part = lead // 8
    for start in range(0, lead, part):
        some = slice(start, start + part)
        want = results(
            {name: x[some] for name, x in inputs.items()},
            {name: x[some] for name, x in cotangents.items()},
            implementation=implementation,
        )
        assert_same_bits({name: got[name][some] for name in RESULTS}, want)


def test_sequences_packed_in_one_stream(implementation):
    # Two sequences in disjoint ranges of one bank, one after the other in one stream, against run apart.
    case = Case("packed", lead=(2,), bank_lead=(), tokens=24, slots=80)
    inputs, cotangents = make_inputs(case)
    apart = results(inputs, cotangents, implementation=implementation, shared_bank=True, chunk_size=16)

    def joined(x):
        return x.reshape(1, 48, x.shape[-1])

    packed = {name: x[None] if name == "bank" else joined(x) for name, x in inputs.items()}
    packed_cotangents = {"y": joined(cotangents["y"]), "new_bank": cotangents["new_bank"][None]}
    got = results(packed, packed_cotangents, implementation=implementation, chunk_size=16)
    assert_close({name: x.reshape(apart[name].shape) for name, x in got.items()}, apart, "float32")


def test_without_jit(implementation):
    case = SHAPE["width_3"]
    inputs, _ = make_inputs(case)
    y, new_bank = sdm_jax.write_read(*as_jax(inputs), implementation=implementation, chunk_size=16)
    want = case_oracle(case)
    assert relative_error(y, want["y"]) <= tol("float32")
    assert relative_error(new_bank, want["new_bank"]) <= tol("float32")


def test_the_platform_picks_an_implementation():
    case = SHAPE["width_3"]
    got = case_results(case, None)
    assert_close(got, case_oracle(case), "float32")
    if jax.default_backend() == "cpu":
        assert_same_bits(got, case_results(case, "cpu"))
