"""Programs for a GPU as any machine can lower them: what they call, and what they refuse."""

import collections
import functools
import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from cases import FLOATS, SHAPE, in_dtype, make_inputs

import sdm_jax
from sdm_jax import _primitive

CASE = SHAPE["width_64"]
TOKEN = {name: x if name == "bank" else x[:, 0] for name, x in make_inputs(CASE)[0].items()}


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(_primitive, "has_cuda_module", lambda: True)
    monkeypatch.setattr(_primitive, "gpu_refusal", lambda: "")


@pytest.fixture
def kernels_for_others(monkeypatch):
    reason = "the GPU has compute capability 75, the CUDA module was built for 80, 90"
    monkeypatch.setattr(_primitive, "has_cuda_module", lambda: True)
    monkeypatch.setattr(_primitive, "gpu_refusal", lambda: reason)
    _primitive._warn_no_kernels.cache_clear()


@pytest.fixture
def no_kernels(monkeypatch):
    monkeypatch.setattr(_primitive, "has_cuda_module", lambda: False)
    _primitive._warn_no_kernels.cache_clear()


def op(implementation=None):
    # A function of its own for each use: JAX keeps what it lowered.
    return functools.partial(sdm_jax.write_read, implementation=implementation, chunk_size=16)


def program(fn, inputs):
    return jax.jit(fn).trace(**inputs).lower(lowering_platforms=("cuda",)).as_text()


def calls(text):
    """Custom calls of the package in a program, by name."""
    return collections.Counter(re.findall(r"custom_call @(sdm_\w+)", text))


def gradient(fn):
    def run(**inputs):
        def loss(floats):
            y, bank = fn(**(inputs | floats))
            return y.sum() + bank.sum()

        return jax.grad(loss)({name: inputs[name] for name in FLOATS})

    return run


@pytest.mark.parametrize("implementation", [None, "cuda"])
def test_calls_of_the_kernels(kernels, implementation):
    # XLA makes a command buffer of five commands in a row or more.
    inputs, _ = make_inputs(CASE)
    forward = calls(program(op(implementation), inputs))
    assert forward.keys() == {"sdm_forward_stage"}
    assert forward.total() >= 5
    both = calls(program(gradient(op(implementation)), inputs))
    assert both.keys() == {"sdm_forward_stage", "sdm_backward_stage"}
    assert min(both.values()) >= 5
    step = functools.partial(sdm_jax.decode_step, implementation=implementation)
    assert calls(program(step, TOKEN)) == {"sdm_decode": 1}


def test_float64_is_not_for_the_kernels(kernels):
    with jax.enable_x64(True):
        inputs = in_dtype(make_inputs(CASE)[0], "float64")
        assert not calls(program(op(), inputs))
        with pytest.raises(sdm_jax.UnsupportedConfigurationError, match="float64 bank; float32 and bfloat16"):
            program(op("cuda"), inputs)


@pytest.mark.parametrize(
    ("case", "message"),
    [("no_kernels", "without its CUDA module.*SDM_CUDA=ON"), ("kernels_for_others", "has compute capability 75")],
)
def test_without_kernels_plain_jax_serves_with_one_warning(request, case, message):
    request.getfixturevalue(case)
    inputs, _ = make_inputs(CASE)
    with pytest.warns(UserWarning, match=message) as caught:
        assert not calls(program(op(), inputs))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not calls(program(gradient(op()), inputs))
        assert not calls(program(sdm_jax.decode_step, TOKEN))


def test_what_was_asked_for_does_not_warn(no_kernels):
    inputs, _ = make_inputs(CASE)
    assert not calls(program(op("xla"), inputs))
    with pytest.raises(sdm_jax.UnsupportedConfigurationError, match="needs the CUDA module"):
        program(op("cuda"), inputs)
    with pytest.raises(sdm_jax.UnsupportedConfigurationError, match="='cpu' cannot serve a computation for cuda"):
        program(op("cpu"), inputs)


def test_a_gpu_that_the_kernels_were_not_built_for(kernels_for_others):
    inputs, _ = make_inputs(CASE)
    with pytest.raises(
        sdm_jax.UnsupportedConfigurationError, match=r"compute capability 75, .* built for 80, 90.*'xla'"
    ):
        program(op("cuda"), inputs)


def test_export_for_both_platforms(kernels):
    inputs, _ = make_inputs(CASE)
    names = {*sdm_jax.target_names(), "sdm_forward_stage"}
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
    export = jax.export.export(jax.jit(op()), platforms=["cpu", "cuda"], disabled_checks=checks)
    exported = jax.export.deserialize(export(**inputs).serialize())
    assert calls(exported.mlir_module()).keys() == {"sdm_forward", "sdm_forward_stage"}
    if jax.default_backend() == "cpu":
        want = jax.jit(op())(**inputs)
        for got, x in zip(exported.call(**inputs), want, strict=True):
            assert jnp.array_equal(got, x)
