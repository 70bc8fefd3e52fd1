"""Gradients against finite differences of the very function, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FAST_COMPILE, FLOATS, Case, cpu_device, in_dtype, make_inputs

import sdm_jax

# 18 tokens are a whole chunk and a short one. Plain JAX takes its token form for 64 slots, its chunked for 9.
SIZES = Case("", lead=(), tokens=18, width=2, writes=3, reads=2, gates="mild")
TOKEN = SIZES._replace(name="gate_per_token", slots=64)
WRITE = SIZES._replace(name="gate_per_write", slots=9, gate_per_write=True)
SHARED = SIZES._replace(name="shared", lead=(2,), bank_lead=(), slots=20)
RUNS = [("cpu", TOKEN), ("cpu", WRITE), ("cpu", SHARED), ("xla", TOKEN), ("xla", WRITE), ("reference", WRITE)]


def differences(function, inputs, name, step):
    """Central differences of a scalar function for every element of one argument that is not NaN."""
    values = inputs[name]
    out = np.zeros(values.shape)
    for at in np.ndindex(values.shape):
        if not np.isnan(values[at]):
            moved = []
            for sign in (1, -1):
                changed = values.copy()
                changed[at] += sign * step
                moved.append(float(function(inputs | {name: changed})))
            out[at] = (moved[0] - moved[1]) / (2 * step)
    return out


@pytest.mark.parametrize(("implementation", "case"), RUNS, ids=str)
def test_finite_differences(implementation, case):
    inputs, cotangents = make_inputs(case)
    inputs, cotangents = in_dtype(inputs, "float64"), {n: x.astype(np.float64) for n, x in cotangents.items()}
    k_idx = inputs["k_idx"]
    valid = (k_idx >= 0) & (k_idx < case.slots)
    assert not valid.all()
    ordered = np.sort(np.where(valid, k_idx, -1), axis=-1)
    assert ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()

    def loss(inputs):
        y, new_bank = sdm_jax.write_read(**inputs, implementation=implementation, **case.settings)
        return jnp.vdot(y, cotangents["y"]) + jnp.vdot(new_bank, cotangents["new_bank"])

    with jax.enable_x64(True), cpu_device():
        floats = {name: inputs[name] for name in FLOATS}
        gradients = jax.jit(jax.grad(lambda x: loss(inputs | x)), compiler_options=FAST_COMPILE)(floats)
        value = jax.jit(loss, compiler_options=FAST_COMPILE)
        for name in FLOATS:
            want = differences(value, inputs, name, 1e-5)
            np.testing.assert_allclose(gradients[name], want, rtol=0, atol=2e-8, err_msg=name)
