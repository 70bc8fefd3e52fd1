"""`decode_step`: `write_read` one token at a time."""

import functools

import jax
import numpy as np
import pytest
from cases import FEW_SLOTS, GATES, IDS, SHAPE, Case, case_oracle, in_dtype, make_inputs, results
from tolerance import assert_close, assert_same_bits, relative_error, tol

import sdm_jax

CASES = [
    *(SHAPE[name] for name in ("one_stream", "two_axes", "shared_by_some", "width_1", "width_130", "few_slots")),
    GATES[-1],
    *IDS[1:4],
]


@functools.cache
def jitted(implementation, shared_bank):
    return jax.jit(functools.partial(sdm_jax.decode_step, implementation=implementation, shared_bank=shared_bank))


def token_of(inputs, t):
    return {name: x if name == "bank" else x[..., t, :] for name, x in inputs.items()}


def decode(inputs, implementation, shared_bank=False):
    """All tokens, one step after another."""
    step, bank, readings = jitted(implementation, shared_bank), inputs["bank"], []
    for t in range(inputs["v"].shape[-2]):
        y, bank = step(**(token_of(inputs, t) | {"bank": bank}))
        readings.append(np.asarray(y))
    return {"y": np.stack(readings, axis=-2), "new_bank": np.asarray(bank)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_on_the_cpu(case):
    got = decode(make_inputs(case)[0], "cpu", case.shared)
    want = case_oracle(case)
    assert_close(got, {name: want[name] for name in got}, "float32")


def test_steps(implementation):
    case = FEW_SLOTS._replace(name="decode", gate_per_write=True)
    got = decode(make_inputs(case)[0], implementation)
    want = case_oracle(case)
    assert_close(got, {name: want[name] for name in got}, "float32")


def test_steps_of_a_float64_bank():
    case = SHAPE["width_3"]
    with jax.enable_x64(True):
        got = decode(in_dtype(make_inputs(case)[0], "float64"), "cpu")
    want = case_oracle(case)
    assert_close(got, {name: want[name] for name in got}, "float64")


def test_steps_of_a_bfloat16_bank(implementation):
    # A step rounds the rows it writes: so does the token loop with chunks of one token.
    case = FEW_SLOTS._replace(name="decode", gate_per_write=True)
    inputs = in_dtype(make_inputs(case)[0], "bfloat16")
    got, want = decode(inputs, implementation), decode(inputs, "reference")
    assert {x.dtype.name for x in got.values()} == {"bfloat16"}
    assert_close(got, want, "bfloat16")


def test_gradients(implementation):
    # One step against a stream of one token.
    case = FEW_SLOTS._replace(name="decode", tokens=1, gate_per_write=True, lead=(6,))
    inputs, cotangents = make_inputs(case)
    cotangents = cotangents | {"y": cotangents["y"][..., 0, :]}
    got = results(token_of(inputs, 0), cotangents, fn=sdm_jax.decode_step, implementation=implementation)
    want = case_oracle(case)
    want = {name: x if name.endswith("bank") else x[..., 0, :] for name, x in want.items()}
    assert_close(got, want, "float32")


def test_gradients_through_many_steps():
    case = Case("decode", lead=(2, 2), bank_lead=(2,), tokens=12, slots=20, width=3)
    inputs, cotangents = make_inputs(case)
    want = results(inputs, cotangents, implementation="cpu", shared_bank=True)

    def loss(bank):
        step, readings = jitted("cpu", True), []
        for t in range(case.tokens):
            y, bank = step(**(token_of(inputs, t) | {"bank": bank}))
            readings.append(y)
        y = jax.numpy.stack(readings, axis=-2)
        return jax.numpy.vdot(y, cotangents["y"]) + jax.numpy.vdot(bank, cotangents["new_bank"])

    assert relative_error(jax.grad(loss)(inputs["bank"]), want["d_bank"]) <= tol("float32")


def test_a_differentiated_step_has_the_same_bits(implementation):
    case = FEW_SLOTS._replace(name="decode", gate_per_write=True)
    token = token_of(make_inputs(case)[0], 5)
    want = jitted(implementation, False)(**token)

    @jax.jit
    def differentiated(bank):
        step = functools.partial(sdm_jax.decode_step, implementation=implementation)
        out, vjp = jax.vjp(lambda bank: step(**(token | {"bank": bank})), bank)
        return out, vjp(out)

    got, _ = differentiated(token["bank"])
    assert relative_error(got[0], want[0]) <= 1e-6
    assert relative_error(got[1], want[1]) <= 1e-6


def test_streams_that_write_nothing(implementation):
    case = FEW_SLOTS._replace(name="decode", gate_per_write=True)
    token = token_of(make_inputs(case)[0], 2)  # every write of token 2 is dropped, its numbers are NaN
    assert np.isnan(token["v"]).all()
    y, new_bank = jitted(implementation, False)(**token)
    assert np.array_equal(new_bank, token["bank"])
    assert np.isfinite(y).all()


def test_no_streams():
    case = Case("empty", lead=(0, 2), tokens=1, gates="mild")
    token = token_of(make_inputs(case)[0], 0)
    y, new_bank = sdm_jax.decode_step(**token)
    assert_same_bits({"y": y, "new_bank": new_bank}, {"y": np.zeros((0, 2, 17), np.float32), "new_bank": token["bank"]})
