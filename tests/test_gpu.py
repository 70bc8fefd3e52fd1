"""What only a GPU can show: command buffers, banks of more than 2^31 numbers, programs made without a GPU."""

import functools
import hashlib
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FLOATS, NATIVE, RESULTS, SHAPE, Case, case_results, in_dtype, make_inputs
from tolerance import assert_same_bits

import sdm_jax

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(len(NATIVE) < 2, reason="needs a GPU and the CUDA module"),
]

WIDE = Case("wide", lead=(3,), tokens=100, slots=300, width=600, writes=8, reads=8)
CASES = (WIDE, SHAPE["odd_chunk"], SHAPE["shared_by_some"])


def op(**settings):
    return functools.partial(sdm_jax.write_read, implementation="cuda", **settings)


def vjp_of(inputs, cotangents, call):
    """Values and gradients of all floats, as a dict."""
    floats = {name: inputs[name] for name in FLOATS}
    out, vjp = jax.vjp(lambda floats: call(**(inputs | floats)), floats)
    (gradients,) = vjp((cotangents["y"], cotangents["new_bank"]))
    return dict(zip(("y", "new_bank"), out, strict=True)) | {f"d_{name}": x for name, x in gradients.items()}


def on_device(inputs):
    return {name: jnp.asarray(x) for name, x in inputs.items()}


# ---- command buffers


def handler_calls(run, times=5):
    """Handlers that run while a program that has run before runs again."""
    from sdm_jax import _cuda

    for _ in range(4):
        jax.block_until_ready(run())
    before = _cuda.calls()
    for _ in range(times):
        jax.block_until_ready(run())
    return _cuda.calls() - before


@pytest.mark.parametrize("tokens", [64, 1024, 40000])
def test_a_forward_alone_is_captured(tokens):
    case = Case("captured", tokens=tokens, slots=512, width=64, gates="mild", ids="distinct", chunk=64)
    inputs = on_device(make_inputs(case)[0])
    tokens = {name: x for name, x in inputs.items() if name != "bank"}
    forward = jax.jit(lambda bank, tokens: op()(bank, **tokens)[::-1], donate_argnums=0)
    state = {"bank": inputs["bank"]}

    def run():
        state["bank"], y = forward(state["bank"], tokens)
        return y

    assert handler_calls(run) == 0


@pytest.mark.parametrize("tokens", [64, 1024])
def test_a_gradient_alone_is_captured(tokens):
    case = Case("captured", tokens=tokens, slots=512, width=64, gates="mild", ids="distinct", chunk=64)
    inputs, cotangents = map(on_device, make_inputs(case))
    both = jax.jit(lambda inputs, cotangents: vjp_of(inputs, cotangents, op()))
    assert handler_calls(lambda: both(inputs, cotangents)) == 0


def test_decode_steps_are_captured():
    case = Case("captured", tokens=8, slots=512, width=64, gates="mild", ids="distinct")
    inputs = on_device(make_inputs(case)[0])
    steps = [{name: x[:, t] for name, x in inputs.items() if name != "bank"} for t in range(8)]

    @functools.partial(jax.jit, donate_argnums=0)
    def chain(bank, steps):
        ys = []
        for step in steps:
            y, bank = sdm_jax.decode_step(bank, **step, implementation="cuda")
            ys.append(y)
        return bank, jnp.stack(ys)

    state = {"bank": inputs["bank"]}

    def run():
        state["bank"], y = chain(state["bank"], steps)
        return y

    assert handler_calls(run) == 0


# ---- the same bits


def test_fifty_runs():
    inputs, cotangents = make_inputs(WIDE)
    for dtype in (np.float32, jnp.bfloat16):
        arguments = on_device(in_dtype(inputs, dtype))
        both = jax.jit(lambda inputs, cotangents: vjp_of(inputs, cotangents, op(chunk_size=16)))
        dy = {name: jnp.asarray(x, dtype) for name, x in cotangents.items()}
        want = {name: np.asarray(x) for name, x in both(arguments, dy).items()}
        for _ in range(50):
            assert_same_bits({name: np.asarray(x) for name, x in both(arguments, dy).items()}, want)


def digests():
    """Of every result of some calls, by case and dtype."""
    found = {}
    for case in CASES:
        for dtype in ("float32", "bfloat16"):
            out = case_results(case, "cuda", dtype, fast_compile=False)
            found[f"{case} {dtype}"] = hashlib.sha256(b"".join(x.tobytes() for x in out.values())).hexdigest()
    return found


def python(code, **environment):
    path = os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | environment,
        stdout=subprocess.PIPE,
    )


def test_other_processes_with_and_without_command_buffers():
    code = "import json, test_gpu; print(json.dumps(test_gpu.digests()))"
    flags = os.environ.get("XLA_FLAGS", "")
    started = [python(code), python(code, XLA_FLAGS=f"{flags} --xla_gpu_enable_command_buffer=")]
    here = digests()
    for process in started:
        assert json.loads(process.communicate()[0]) == here


# ---- large banks


@pytest.mark.parametrize("width", [1024, 17])
def test_the_last_slots_of_a_large_bank(width):
    # More than 2^31 numbers, and the slots at both ends, against a small bank of those slots only.
    num_slots, kept = 2_200_000 * 1024 // width, 64
    assert num_slots * width > 2**31
    case = Case("large", lead=(1,), tokens=70, slots=2 * kept, width=width, writes=8, reads=8, gates="mild")
    inputs, cotangents = (in_dtype(x, jnp.bfloat16) for x in make_inputs(case))
    cotangents = {name: x.astype(jnp.bfloat16) for name, x in cotangents.items()}
    run = jax.jit(lambda inputs, cotangents: vjp_of(inputs, cotangents, op(chunk_size=16)))
    want = {name: np.asarray(x) for name, x in run(inputs, cotangents).items()}

    ends = np.r_[0:kept, num_slots - kept : num_slots].astype(np.int32)
    here = {name: (x >= 0) & (x < 2 * kept) for name, x in inputs.items() if name.endswith("idx")}

    def moved(name, x):
        return np.where(here[name], ends[np.where(here[name], x, 0)], -1).astype(np.int32)

    def spread(rows):
        return jnp.zeros((1, num_slots, width), jnp.bfloat16).at[:, ends].set(rows)

    def rows_of(bank):
        assert not bank[:, kept : num_slots - kept].any()
        return bank[:, ends]

    large = {name: moved(name, x) if name in here else x for name, x in inputs.items()}
    large["bank"] = spread(inputs["bank"])
    got = run(large, {"y": cotangents["y"], "new_bank": spread(cotangents["new_bank"])})
    got |= {name: rows_of(got[name]) for name in ("new_bank", "d_bank")}
    assert_same_bits({name: np.asarray(x) for name, x in got.items()}, want)

    def decode(inputs):
        token = {name: x if name == "bank" else x[:, 5] for name, x in inputs.items()}
        y, bank = jax.jit(functools.partial(sdm_jax.decode_step, implementation="cuda"))(**token)
        return np.asarray(y), bank

    y, bank = decode(large)
    want_y, want_bank = decode(inputs)
    assert np.array_equal(y, want_y)
    assert np.array_equal(rows_of(bank), want_bank)


# ---- a program made where there is no GPU


def test_a_program_exported_without_a_gpu(tmp_path):
    path = tmp_path / "program"
    code = f"import test_gpu; test_gpu.export({str(path)!r})"
    process = python(code, JAX_PLATFORMS="cpu")
    process.communicate()
    assert process.returncode == 0
    inputs, cotangents = make_inputs(SHAPE["width_64"])
    exported = jax.export.deserialize(path.read_bytes())
    got = exported.call(inputs, cotangents)
    want = jax.jit(lambda inputs, cotangents: vjp_of(inputs, cotangents, op(chunk_size=16)))(inputs, cotangents)
    assert got.keys() == set(RESULTS)
    assert_same_bits(*({name: np.asarray(x[name]) for name in RESULTS} for x in (got, want)))


def export(path):
    assert jax.default_backend() == "cpu"
    fn = jax.jit(lambda inputs, cotangents: vjp_of(inputs, cotangents, op(chunk_size=16)))
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in sdm_jax.target_names()]
    exported = jax.export.export(fn, platforms=["cuda"], disabled_checks=checks)(*make_inputs(SHAPE["width_64"]))
    pathlib.Path(path).write_bytes(exported.serialize())
