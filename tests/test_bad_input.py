"""What does not fit raises one clear Python error while the call is traced."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import INPUTS, RESULTS, as_jax
from tolerance import assert_same_bits

import sdm_jax

P, T, S, D, W, R = 2, 8, 16, 3, 4, 5
Struct = jax.ShapeDtypeStruct
GOOD = {
    "bank": Struct((P, S, D), jnp.float32),
    "k_idx": Struct((P, T, W), jnp.int32),
    "k_val": Struct((P, T, W), jnp.float32),
    "v": Struct((P, T, D), jnp.float32),
    "beta": Struct((P, T, 1), jnp.float32),
    "g": Struct((P, T, W), jnp.float32),
    "q_idx": Struct((P, T, R), jnp.int32),
    "q_val": Struct((P, T, R), jnp.float32),
}


def zeros(structs):
    return {name: jnp.zeros(x.shape, x.dtype) for name, x in structs.items()}


def trace(structs, **settings):
    return jax.eval_shape(functools.partial(sdm_jax.write_read, **settings), **structs)


def with_shape(name, *shape):
    return GOOD | {name: Struct(shape, GOOD[name].dtype)}


def with_dtype(name, dtype):
    return GOOD | {name: Struct(GOOD[name].shape, dtype)}


def test_good_shapes_pass():
    y, new_bank = trace(GOOD)
    assert (y.shape, new_bank.shape) == ((P, T, D), (P, S, D))


SHAPE_ERRORS = [
    # argument, shape, what the message has to say
    ("bank", (S,), r"bank must have shape \[\.\.\., S, D\], got \[16\]"),
    ("bank", (S, D), r"bank has leading axes \[\] but k_idx has \[2\].*shared_bank=True"),
    ("bank", (3, S, D), r"bank has leading axes \[3\] but k_idx has \[2\]"),
    ("bank", (P, 1, S, D), r"bank has leading axes \[2, 1\] but k_idx has \[2\]"),
    ("bank", (P, S, D + 1), r"v has 3 on its last axis \(D\), but needs 4"),
    ("bank", (P, 0, D), r"bank has no slots \(S\)"),
    ("k_idx", (T,), r"k_idx must have shape \[\.\.\., T, W\], got \[8\]"),
    ("k_idx", (P, T, W + 1), r"k_val has 4 on its last axis \(W\), but needs 5"),
    ("k_idx", (P, T + 1, W), r"k_val has 8 on axis 1 \(T\), but k_idx has 9"),
    ("k_val", (P, T, W, 1), r"k_val must have 3 axes, \[2, 8, 4\]"),
    ("k_val", (P, T), r"k_val must have 3 axes, \[2, 8, 4\]"),
    ("k_val", (P, T, 1), r"k_val has 1 on its last axis \(W\), but needs 4"),
    ("v", (P, T, D + 1), r"v has 4 on its last axis \(D\), but needs 3"),
    ("v", (P, T - 1, D), r"v has 7 on axis 1 \(T\), but k_idx has 8"),
    ("v", (1, T, D), r"v has 1 on axis 0 \(a leading axis\), but k_idx has 2"),
    ("v", (T, D), r"v must have 3 axes"),
    ("beta", (P, T), r"beta must have 3 axes, \[2, 8, 1\]"),
    ("beta", (P, T, W), r"beta has 4 on its last axis \(1\), but needs 1"),
    ("beta", (P, 1, 1), r"beta has 1 on axis 1 \(T\), but k_idx has 8"),
    ("g", (P, T, 2), r"g has 2 on its last axis \(1 or W\), but needs 1 or 4"),
    ("g", (P, 1, 1), r"g has 1 on axis 1 \(T\), but k_idx has 8"),
    ("q_idx", (P, T, R + 1), r"q_val has 5 on its last axis \(R\), but needs 6"),
    ("q_idx", (P, T + 1, R), r"q_idx has 9 on axis 1 \(T\), but k_idx has 8"),
    ("q_val", (P, T, 1), r"q_val has 1 on its last axis \(R\), but needs 5"),
    ("q_val", (), r"q_val must have shape \[\.\.\., T, R\], got \[\]"),
]


@pytest.mark.parametrize(("name", "shape", "message"), SHAPE_ERRORS)
def test_shapes(name, shape, message):
    with pytest.raises(ValueError, match=message):
        trace(with_shape(name, *shape))


@pytest.mark.parametrize("dtype", ["float16", "int32", "bool", "complex64", "float8_e4m3fn"])
def test_bank_dtypes(dtype):
    with pytest.raises(TypeError, match=rf"bank must be float32, bfloat16, float64; got {dtype}"):
        trace(with_dtype("bank", jnp.dtype(dtype)))


@pytest.mark.parametrize("name", ["k_idx", "q_idx"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_ids_that_are_no_integers(name, dtype):
    with pytest.raises(TypeError, match=rf"{name} must have an integer dtype, got {dtype}"):
        trace(with_dtype(name, jnp.dtype(dtype)))


@pytest.mark.parametrize("name", ["k_val", "v", "beta", "g", "q_val"])
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_numbers_that_are_no_floats(name, dtype):
    with pytest.raises(TypeError, match=rf"{name} must have a floating-point dtype, got {dtype}"):
        trace(with_dtype(name, jnp.dtype(dtype)))


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("value", [None, 1.0, [[1, 2]], "bank"])
def test_not_an_array(name, value):
    with pytest.raises(TypeError, match=rf"{name} must be an array, got {type(value).__name__}"):
        sdm_jax.write_read(**(zeros(GOOD) | {name: value}))


@pytest.mark.parametrize(("what", "ids", "weights"), [("W", "k_idx", "k_val"), ("R", "q_idx", "q_val")])
@pytest.mark.parametrize("count", [0, 257])
def test_entries_of_a_token(what, ids, weights, count):
    structs = GOOD | {
        "g": Struct((P, T, 1), jnp.float32),
        ids: Struct((P, T, count), jnp.int32),
        weights: Struct((P, T, count), jnp.float32),
    }
    with pytest.raises(ValueError, match=rf"{ids} has {count} entries a token .*\({what}\); 1 to 256"):
        trace(structs)


def test_most_entries_pass():
    structs = GOOD | {
        "g": Struct((P, T, 1), jnp.float32),
        "k_idx": Struct((P, T, 256), jnp.int32),
        "k_val": Struct((P, T, 256), jnp.float32),
        "q_idx": Struct((P, T, 256), jnp.int32),
        "q_val": Struct((P, T, 256), jnp.float32),
    }
    assert trace(structs, chunk_size=256)[0].shape == (P, T, D)


@pytest.mark.parametrize("lead", [(2**16, 2), (1,)])
def test_two_to_the_31_rows(lead):
    slots = 2**31 // int(np.prod(lead))
    structs = {name: Struct((*lead, *x.shape[1:]), x.dtype) for name, x in GOOD.items()}
    with pytest.raises(sdm_jax.UnsupportedConfigurationError, match=rf"bank has {2**31} rows .* fewer than 2\^31"):
        trace(structs | {"bank": Struct((*lead, slots, 1), jnp.float32), "v": Struct((*lead, T, 1), jnp.float32)})


def test_two_to_the_31_tokens():
    lead, tokens = (2**20,), 2**11 - 1
    structs = {name: Struct((*lead, tokens, x.shape[-1]), x.dtype) for name, x in GOOD.items()}
    with pytest.raises(sdm_jax.UnsupportedConfigurationError, match=r"tokens .* are 2147483648; fewer than 2\^31"):
        trace(structs | {"bank": Struct((*lead, 4, D), jnp.float32)})


SHARED = GOOD | {"bank": Struct((S, D), jnp.float32)}


def test_shared_bank_has_to_be_asked_for():
    with pytest.raises(ValueError, match="shared_bank=True"):
        trace(SHARED)
    assert trace(SHARED, shared_bank=True)[1].shape == (S, D)


def test_shared_bank_with_other_axes():
    with pytest.raises(ValueError, match=r"leading axes of bank, \[3\], must be the first of those of k_idx, \[2\]"):
        trace(with_shape("bank", 3, S, D), shared_bank=True)


# ---- settings


SETTING_ERRORS = [
    ({"chunk_size": 15}, ValueError, r"chunk_size must be in \[16, 256\], got 15"),
    ({"chunk_size": 257}, ValueError, r"chunk_size must be in \[16, 256\], got 257"),
    ({"chunk_size": np.int64(0)}, ValueError, r"chunk_size must be in \[16, 256\], got 0"),
    ({"chunk_size": 64.0}, TypeError, "chunk_size must be an integer, got 64.0"),
    ({"chunk_size": True}, TypeError, "chunk_size must be an integer, got True"),
    ({"chunk_size": "64"}, TypeError, "chunk_size must be an integer, got '64'"),
    ({"chunk_size": None}, TypeError, "chunk_size must be an integer, got None"),
    (
        {"snapshot_quant": "int8"},
        ValueError,
        "snapshot_quant must be one of 'none', 'bf16', 'fp8', 'int4', got 'int8'",
    ),
    ({"snapshot_quant": None}, TypeError, "snapshot_quant must be one of 'none'.*got None"),
    ({"snapshot_quant": 4}, TypeError, "snapshot_quant must be one of 'none'.*got 4"),
    ({"implementation": "gpu"}, ValueError, "implementation must be one of 'cpu', 'cuda', 'xla'.*got 'gpu'"),
    ({"implementation": 1}, TypeError, "implementation must be one of 'cpu', 'cuda', 'xla'.*got 1"),
    ({"grad_bank_dtype": "bfloat16"}, ValueError, "grad_bank_dtype must be None.*got bfloat16"),
    ({"grad_bank_dtype": jnp.float64}, ValueError, "grad_bank_dtype must be None.*got float64"),
    ({"grad_bank_dtype": "float33"}, TypeError, "grad_bank_dtype must be None or float32, got 'float33'"),
    ({"shared_bank": 1}, TypeError, "shared_bank must be True or False, got 1"),
    ({"shared_bank": None}, TypeError, "shared_bank must be True or False, got None"),
]


@pytest.mark.parametrize(("settings", "error", "message"), SETTING_ERRORS)
def test_settings(settings, error, message):
    with pytest.raises(error, match=message):
        trace(GOOD, **settings)
    with pytest.raises(error, match=message):
        sdm_jax.plan(**GOOD, **settings)


def test_unknown_setting():
    with pytest.raises(TypeError, match="chunks"):
        trace(GOOD, chunks=64)
    with pytest.raises(TypeError, match="chunks"):
        sdm_jax.plan(**GOOD, chunks=64)


@pytest.mark.parametrize("x64", [False, True])
def test_settings_of_numpy(x64):
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.integers(S, size=x.shape, dtype=np.int32)
        if name.endswith("idx")
        else (-0.1 * rng.random(x.shape)).astype(np.float32)
        for name, x in GOOD.items()
    }
    plain = {"chunk_size": 16, "snapshot_quant": "fp8", "shared_bank": False, "implementation": "cpu"}
    same = [
        plain | {"chunk_size": np.int32(16)},
        plain | {"chunk_size": np.int64(16), "shared_bank": np.bool_(False)},
        plain | {"chunk_size": np.uint8(16), "snapshot_quant": np.str_("fp8"), "implementation": np.str_("cpu")},
        plain | {"grad_bank_dtype": np.float32},
        plain | {"grad_bank_dtype": jnp.float32},
        plain | {"grad_bank_dtype": np.dtype("float32")},
    ]
    want = dict(zip(RESULTS, sdm_jax.write_read(**arrays, **plain), strict=False))
    with jax.enable_x64(x64):
        for settings in same:
            got = sdm_jax.write_read(**arrays, **settings)
            assert_same_bits(dict(zip(RESULTS, got, strict=False)), want)
            value, gradients = jax.value_and_grad(
                lambda bank, settings=settings: sdm_jax.write_read(**(arrays | {"bank": bank}), **settings)[0].sum()
            )(jnp.asarray(arrays["bank"]))
            assert np.isfinite(float(value))
            assert np.isfinite(np.asarray(gradients)).all()


# ---- wherever a call is traced


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: jax.jit(jax.vmap(f)), jax.checkpoint])
def test_errors_under_transformations(transform):
    arrays = zeros(with_shape("v", P, T, D + 1))
    with pytest.raises(ValueError, match=r"v has 4 on its last axis \(D\), but needs 3"):
        transform(lambda arrays: sdm_jax.write_read(**arrays))(arrays)


def test_errors_under_grad():
    arrays = zeros(GOOD)
    floats = {"v": jnp.zeros((P, T, D + 1))}
    with pytest.raises(ValueError, match=r"v has 4 on its last axis \(D\), but needs 3"):
        jax.grad(lambda x: sdm_jax.write_read(**(arrays | x))[0].sum())(floats)


def test_decode_step():
    structs = {name: Struct((P, x.shape[-1]), x.dtype) for name, x in GOOD.items()} | {"bank": GOOD["bank"]}
    assert jax.eval_shape(sdm_jax.decode_step, **structs)[0].shape == (P, D)
    with pytest.raises(ValueError, match=r"v has 4 on its last axis \(D\), but needs 3"):
        jax.eval_shape(sdm_jax.decode_step, **(structs | {"v": Struct((P, 4), jnp.float32)}))
    with pytest.raises(ValueError, match=r"bank has leading axes \[2\] but k_idx has \[2, 8\]"):
        jax.eval_shape(sdm_jax.decode_step, **GOOD)
    with pytest.raises(TypeError, match="k_idx must have an integer dtype"):
        jax.eval_shape(sdm_jax.decode_step, **(structs | {"k_idx": Struct((P, W), jnp.float32)}))
    with pytest.raises(ValueError, match="implementation must be one of"):
        sdm_jax.decode_step(**zeros(structs), implementation="c")
    with pytest.raises(TypeError, match="shared_bank must be True or False"):
        sdm_jax.decode_step(**zeros(structs), shared_bank="yes")


def test_implementation_of_another_platform():
    if jax.default_backend() == "cpu":
        with pytest.raises(sdm_jax.UnsupportedConfigurationError, match=r"='cuda'.*NVIDIA GPUs"):
            sdm_jax.write_read(**zeros(GOOD), implementation="cuda")


# ---- looking at values


@pytest.fixture
def values():
    rng = np.random.default_rng(0)
    arrays = {name: rng.random(x.shape).astype(np.float32) for name, x in GOOD.items()}
    arrays["k_idx"] = np.argsort(rng.random((P, T, S)), axis=-1)[..., :W].astype(np.int32)
    arrays["q_idx"] = rng.integers(S, size=(P, T, R)).astype(np.int32)
    return arrays


def test_check_inputs_passes_what_is_allowed(values):
    sdm_jax.check_inputs(**values)
    values["g"][0, 1] = -np.inf
    values["k_idx"][1, 2, 0] = -1
    for name in ("k_val", "g"):
        values[name][1, 2, 0] = np.nan  # of a dropped entry
    values["k_idx"][0, 3], values["v"][0, 3], values["beta"][0, 3] = -1, np.inf, np.nan
    values["q_idx"][0, 0, 1], values["q_val"][0, 0, 1] = -1, np.nan
    sdm_jax.check_inputs(**values)
    sdm_jax.check_inputs(*as_jax(values), allow_repeats=False)


@pytest.mark.parametrize("name", ["k_idx", "q_idx"])
@pytest.mark.parametrize("value", [S, -2, 2**31 - 1])
def test_check_inputs_finds_ids_out_of_range(values, name, value):
    values[name][1, 3, 2] = value
    with pytest.raises(ValueError, match=rf"{name}\[1, 3, 2\] is {value}, outside \[0, 16\)"):
        sdm_jax.check_inputs(**values)


def test_check_inputs_finds_repeated_ids(values):
    values["k_idx"][1, 5, 3] = values["k_idx"][1, 5, 1]
    sdm_jax.check_inputs(**values)
    with pytest.raises(ValueError, match=rf"k_idx\[1, 5, 3\] is {values['k_idx'][1, 5, 1]}"):
        sdm_jax.check_inputs(**values, allow_repeats=False)
    values["k_idx"][1, 5, 1] = values["k_idx"][1, 5, 3] = -1  # padding does not repeat
    sdm_jax.check_inputs(**values, allow_repeats=False)


@pytest.mark.parametrize("name", ["bank", "k_val", "v", "beta", "g", "q_val"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_check_inputs_finds_what_is_not_finite(values, name, value):
    values[name][1, 2, 0] = value
    with pytest.raises(ValueError, match=rf"{name}\[1, 2, 0\] is {value}"):
        sdm_jax.check_inputs(**values)


def test_check_inputs_of_a_shared_bank(values):
    values["bank"] = np.zeros((S, D), np.float32)
    values["k_idx"][0], values["q_idx"][0] = np.arange(W), 0
    values["k_idx"][1], values["q_idx"][1] = np.arange(W) + W, W
    sdm_jax.check_inputs(**values, shared_bank=True)
    values["q_idx"][1, 0, 0] = 2
    with pytest.raises(ValueError, match=r"slot 2 of shared bank 0 is named by its streams 0 and 1"):
        sdm_jax.check_inputs(**values, shared_bank=True)


def test_check_inputs_needs_values(values):
    with pytest.raises(TypeError, match=r"check_inputs looks at values.*bank is traced"):
        jax.jit(lambda bank: sdm_jax.check_inputs(**(values | {"bank": bank})))(values["bank"])
    with pytest.raises(ValueError, match=r"v has 3 on its last axis"):
        sdm_jax.check_inputs(**(values | {"bank": np.zeros((P, S, 5), np.float32)}))


def test_count_repeated_writes():
    ids = np.array([[[0, 1, 2], [3, 3, 3]], [[-1, -1, 5], [7, 5, 7]]], np.int32)
    assert sdm_jax.count_repeated_writes(ids).tolist() == [2, 1]
    assert sdm_jax.count_repeated_writes(ids, 7).tolist() == [2, 0]
    assert sdm_jax.count_repeated_writes(ids, num_slots=np.int64(3)).tolist() == [0, 0]
    assert jax.jit(jax.vmap(sdm_jax.count_repeated_writes))(jnp.asarray(ids)).tolist() == [2, 1]
    assert sdm_jax.count_repeated_writes(ids).dtype == jnp.int32
    wide = ids.astype(np.int64)
    wide[0, 1, 1] = 2**32 + 3  # not slot 3
    assert sdm_jax.count_repeated_writes(wide).tolist() == [1, 1]
    with pytest.raises(TypeError, match="k_idx must be an integer array"):
        sdm_jax.count_repeated_writes(ids.astype(np.float32))
    with pytest.raises(ValueError, match=r"k_idx must have shape \[\.\.\., T, W\]"):
        sdm_jax.count_repeated_writes(ids[0, 0])
    with pytest.raises(ValueError, match="num_slots must be in"):
        sdm_jax.count_repeated_writes(ids, 0)


# ---- the plan


def test_plan():
    plan = sdm_jax.plan(**GOOD)
    assert (plan.implementation, plan.steps, plan.chunk) == ("cpu", 1, T)
    assert sdm_jax.plan(**zeros(GOOD)) == plan
    assert sdm_jax.plan(**GOOD, platform="tpu").implementation == "xla"
    assert sdm_jax.plan(**GOOD, platform="rocm").implementation == "xla"
    assert sdm_jax.plan(**GOOD, implementation="reference").implementation == "reference"
    with pytest.raises(sdm_jax.UnsupportedConfigurationError, match=r"implementation='cpu'.*tpu"):
        sdm_jax.plan(**GOOD, implementation="cpu", platform="tpu")
    with pytest.raises(ValueError, match="platform must be one of 'cpu'"):
        sdm_jax.plan(**GOOD, platform="gpu")
    with pytest.raises(ValueError, match=r"v has 4 on its last axis"):
        sdm_jax.plan(**with_shape("v", P, T, D + 1))


def test_plan_of_a_long_stream():
    def plan(tokens, **settings):
        structs = {name: Struct((P, tokens, x.shape[-1]), x.dtype) for name, x in GOOD.items()}
        bank = {"bank": Struct((P, 1000, 64), jnp.float32), "v": Struct((P, tokens, 64), jnp.float32)}
        return sdm_jax.plan(**(structs | bank), **settings)

    assert plan(1000, chunk_size=16).steps == 63
    assert plan(1024).forward_working_bytes == plan(16384).forward_working_bytes
    rows = P * (1000 // 50) * 50 * W
    snapshot = {
        mode: plan(1000, chunk_size=50, snapshot_quant=mode).snapshot_bytes for mode in ("none", "bf16", "fp8", "int4")
    }
    assert snapshot == {"none": rows * 256, "bf16": rows * 128, "fp8": rows * 68, "int4": rows * 36}
    saved = {mode: plan(1000, chunk_size=50, snapshot_quant=mode).saved_bytes for mode in snapshot}
    assert len({saved[mode] - snapshot[mode] for mode in snapshot}) == 1
