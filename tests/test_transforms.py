"""JAX's transformations of `write_read`, and the life of a process that uses it."""

import functools
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FAST_COMPILE, FLOATS, INPUTS, RESULTS, Case, cpu_device, make_inputs, results
from test_in_place import bank_copies as copies_in
from tolerance import assert_close, assert_same_bits, relative_error, tol

import sdm_jax

CASE = Case("transforms", lead=(2,), tokens=20, slots=64, width=3, writes=3, reads=2, gates="mild")
TOKENS = tuple(name for name in INPUTS if name != "bank")


def jit(fn):
    return jax.jit(fn, compiler_options=FAST_COMPILE)


def scalar(implementation, cotangents, **settings):
    """A loss of the readings and the new bank."""

    def loss(floats, inputs):
        y, new_bank = sdm_jax.write_read(**(inputs | floats), implementation=implementation, **settings)
        return jnp.vdot(y, cotangents["y"]) + jnp.vdot(new_bank, cotangents["new_bank"])

    return loss


def floats_of(inputs):
    return {name: inputs[name] for name in FLOATS}


def gradients(out):
    return {name: np.asarray(out[name]) for name in FLOATS}


def wanted(inputs, cotangents, **settings):
    """The same gradients without transformations, from the C++ kernels (checked elsewhere)."""
    want = results(inputs, cotangents, implementation="cpu", **settings)
    return {name: want[f"d_{name}"] for name in FLOATS}


# ---- vmap


def test_vmap_of_all(implementation):
    case = CASE._replace(lead=(4, 2))
    inputs, _ = make_inputs(case)
    op = functools.partial(sdm_jax.write_read, implementation=implementation)
    with cpu_device():
        want = sdm_jax.write_read(**inputs, implementation="cpu")
    got = jit(jax.vmap(lambda x: op(**x)))(inputs)
    nested = jax.vmap(jax.vmap(lambda x: op(**x)))(inputs)
    for out in (got, nested):
        assert relative_error(out[0], want[0]) <= tol("float32")
        assert relative_error(out[1], want[1]) <= tol("float32")


def test_vmap_along_other_axes():
    case = CASE._replace(lead=(4, 2))
    inputs, _ = make_inputs(case)
    want = sdm_jax.write_read(**inputs)
    axes = {name: i % 3 for i, name in enumerate(INPUTS)}
    moved = {name: np.moveaxis(inputs[name], 0, axis) for name, axis in axes.items()}
    got = jax.vmap(lambda x: sdm_jax.write_read(**x), in_axes=(axes,), out_axes=(1, 2))(moved)
    assert_same_bits(
        {"y": np.moveaxis(got[0], 1, 0), "new_bank": np.moveaxis(got[1], 2, 0)},
        dict(zip(RESULTS, want, strict=False)),
    )


def test_vmap_of_tokens_with_one_bank(implementation):
    # Every entry gets a new bank of its own; the gradient of the one bank sums over the entries.
    case = CASE._replace(lead=(4, 2))
    inputs, cotangents = make_inputs(case)
    inputs["bank"][:] = inputs["bank"][0]
    bank, tokens = inputs["bank"][0], {name: inputs[name] for name in TOKENS}
    op = functools.partial(sdm_jax.write_read, implementation=implementation)

    def loss(floats):
        numbers = {name: floats[name] for name in FLOATS if name != "bank"}
        y, new_bank = jax.vmap(lambda x: op(floats["bank"], **x))(tokens | numbers)
        assert new_bank.shape == (4, *bank.shape)
        return jnp.vdot(y, cotangents["y"]) + jnp.vdot(new_bank, cotangents["new_bank"])

    got = gradients(jit(jax.grad(loss))(floats_of(inputs) | {"bank": bank}))
    want = wanted(inputs, cotangents)
    want["bank"] = want["bank"].sum(axis=0)
    assert_close(got, want, "float32")


def test_vmap_of_one_argument():
    # Only the values have the new axis; everything else is repeated.
    inputs, _ = make_inputs(CASE)
    values = np.stack([inputs["v"], -inputs["v"], 2 * inputs["v"]])
    y, new_bank = jax.vmap(lambda v: sdm_jax.write_read(**(inputs | {"v": v})))(values)
    for i in range(3):
        want = sdm_jax.write_read(**(inputs | {"v": values[i]}))
        assert np.array_equal(y[i], want[0])
        assert np.array_equal(new_bank[i], want[1])


@pytest.mark.parametrize("names", [("bank",), ("k_idx", "q_val"), ("g",), ("bank", "v"), TOKENS], ids=str)
def test_vmap_of_some_arguments(names):
    """Any subset of the arguments, along an axis of its own, with everything else repeated."""
    inputs, cotangents = make_inputs(CASE)
    rng = np.random.default_rng(0)
    some = {}
    for name in names:
        others = [rng.permutation(inputs[name]) for _ in range(3)]
        some[name] = np.stack(others, axis=-1)

    def loss(floats, inputs):
        return scalar("cpu", cotangents)(floats, inputs)

    floats = {name: x for name, x in some.items() if name in FLOATS}
    axes = ({name: -1 for name in floats}, {name: -1 for name in some if name not in FLOATS})

    def call(floats, ids):
        return jax.grad(loss)(floats, inputs | ids) if floats else sdm_jax.write_read(**(inputs | ids))

    got = jit(jax.vmap(call, in_axes=axes))(floats, {name: x for name, x in some.items() if name not in FLOATS})
    for i in range(3):
        want = jit(call)(*({n: x[..., i] for n, x in some.items() if (n in FLOATS) == floating} for floating in (1, 0)))
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(x[i], y)


def test_batched_call_is_one_custom_call_in_place():
    """A batched axis becomes streams: no loop, and no copy of a donated bank."""
    inputs, _ = make_inputs(CASE._replace(lead=(4, 2)))
    tokens = {name: inputs[name] for name in TOKENS}
    call = jax.jit(jax.vmap(lambda bank, x: sdm_jax.write_read(bank, **x)), donate_argnums=0)
    text = call.lower(inputs["bank"], tokens).compile().as_text()
    assert text.count('custom_call_target="sdm_forward"') == 1
    assert " while(" not in text
    assert copies_in(text, shape=inputs["bank"].shape) == []


def test_jacobian(implementation):
    inputs, _ = make_inputs(CASE)

    def readings(v):
        return sdm_jax.write_read(**(inputs | {"v": v}), implementation=implementation)[0][:, -1]

    jacobian = jit(jax.jacrev(readings))(inputs["v"])
    assert jacobian.shape == (2, 3, *inputs["v"].shape)
    # The readings are affine in the values.
    change = np.random.default_rng(0).normal(size=inputs["v"].shape).astype(np.float32)
    want = readings(inputs["v"] + change) - readings(inputs["v"])
    assert relative_error(jnp.tensordot(jacobian, change, 3), want) <= 1e-5


def test_control_flow(implementation):
    inputs, cotangents = make_inputs(CASE)
    loss = scalar(implementation, cotangents)
    want = wanted(inputs, cotangents)

    @jit
    def chosen(floats, which):
        branches = (lambda x: jnp.vdot(x["bank"], x["bank"]), lambda x: loss(x, inputs))
        return jax.grad(lambda x: jax.lax.switch(which, branches, x))(floats)

    assert_close(gradients(chosen(floats_of(inputs), 1)), want, "float32")
    assert_close(gradients(chosen(floats_of(inputs), 0)), {**_zeros(want), "bank": 2 * inputs["bank"]}, "float32")

    @jit
    def repeated(bank, tokens, times):
        def step(state):
            return state[0] + 1, sdm_jax.write_read(state[1], **tokens, implementation=implementation)[1]

        return jax.lax.while_loop(lambda state: state[0] < times, step, (0, bank))[1]

    tokens = {name: inputs[name] for name in TOKENS}
    bank = inputs["bank"]
    for _ in range(3):
        bank = jit(lambda b: sdm_jax.write_read(b, **tokens, implementation=implementation)[1])(bank)
    assert relative_error(repeated(inputs["bank"], tokens, 3), bank) <= 1e-6


def _zeros(arrays):
    return {name: np.zeros_like(x) for name, x in arrays.items()}


def test_compiled_ahead_of_time(implementation):
    inputs, cotangents = make_inputs(CASE)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
    gradient = jax.jit(jax.grad(lambda floats, inputs: scalar(implementation, cotangents)(floats, inputs)))
    compiled = gradient.lower(floats_of(shapes), shapes).compile()
    assert_close(gradients(compiled(floats_of(inputs), inputs)), wanted(inputs, cotangents), "float32")


def test_vjp_can_be_called_again(implementation):
    inputs, cotangents = make_inputs(CASE)
    ids = {name: inputs[name] for name in INPUTS if name not in FLOATS}
    _, vjp = jax.vjp(lambda x: sdm_jax.write_read(**(ids | x), implementation=implementation), floats_of(inputs))
    first, second = (vjp((cotangents["y"], cotangents["new_bank"]))[0] for _ in range(2))
    assert_same_bits(first, second)
    assert_close(gradients(first), wanted(inputs, cotangents), "float32")


def test_linearize_says_why_not():
    inputs, _ = make_inputs(CASE)
    v = jnp.asarray(inputs["v"])
    _, tangent = jax.linearize(lambda v: sdm_jax.write_read(**(inputs | {"v": v})), v)
    with pytest.raises((NotImplementedError, TypeError), match=r"jvp|forward-mode"):
        tangent(v)


def test_exported_program_in_another_process(tmp_path):
    """The same bits, with the names that the package publishes."""
    inputs, _ = make_inputs(CASE)
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in sdm_jax.target_names()]
    call = jax.jit(lambda **x: jax.value_and_grad(lambda v: sdm_jax.write_read(**(x | {"v": v}))[0].sum())(x["v"]))
    exported = jax.export.export(call, platforms=["cpu"], disabled_checks=checks)(**inputs)
    (tmp_path / "program").write_bytes(exported.serialize(vjp_order=0))
    np.savez(tmp_path / "inputs.npz", **inputs)
    code = f"""
        import jax, numpy as np, sdm_jax
        program = jax.export.deserialize(bytearray(open({str(tmp_path / "program")!r}, "rb").read()))
        with jax.default_device(jax.devices("cpu")[0]):
            loss, grad = program.call(**np.load({str(tmp_path / "inputs.npz")!r}))
        np.savez({str(tmp_path / "results.npz")!r}, loss=loss, grad=grad)
    """
    run_python(code)
    with cpu_device():
        loss, grad = call(**inputs)
    found = np.load(tmp_path / "results.npz")
    assert_same_bits(dict(found), {"loss": np.asarray(loss), "grad": np.asarray(grad)})


@pytest.mark.parametrize("order", ["vmap_of_grad", "grad_of_vmap"])
def test_gradients_and_vmap(implementation, order):
    case = CASE._replace(lead=(4, 2))
    inputs, cotangents = make_inputs(case)

    def loss(floats, inputs, cotangents):
        return scalar(implementation, cotangents)(floats, inputs)

    fn = jax.vmap(jax.grad(loss)) if order == "vmap_of_grad" else jax.grad(lambda *x: jax.vmap(loss)(*x).sum())
    assert_close(gradients(jit(fn)(floats_of(inputs), inputs, cotangents)), wanted(inputs, cotangents), "float32")


def test_vmap_of_a_shared_bank():
    case = CASE._replace(lead=(3, 2), bank_lead=(3,))
    inputs, cotangents = make_inputs(case)

    def loss(floats, inputs, cotangents):
        return scalar("cpu", cotangents, shared_bank=True)(floats, inputs)

    got = jit(jax.vmap(jax.grad(loss)))(floats_of(inputs), inputs, cotangents)
    assert_close(gradients(got), wanted(inputs, cotangents, shared_bank=True), "float32")


def test_vmap_of_decode_step(implementation):
    inputs, _ = make_inputs(CASE._replace(lead=(4, 2), tokens=1))
    token = {name: x if name == "bank" else x[..., 0, :] for name, x in inputs.items()}
    with cpu_device():
        want = sdm_jax.decode_step(**token, implementation="cpu")
    got = jax.vmap(lambda x: sdm_jax.decode_step(**x, implementation=implementation))(token)
    assert relative_error(got[0], want[0]) <= tol("float32")
    assert relative_error(got[1], want[1]) <= tol("float32")


# ---- checkpoint, scan


@pytest.mark.parametrize("order", ["grad_of_checkpoint", "checkpoint_of_grad", "everything_saveable"])
def test_checkpoint(implementation, order):
    inputs, cotangents = make_inputs(CASE)
    loss = scalar(implementation, cotangents)
    fn = {
        "grad_of_checkpoint": jax.grad(jax.checkpoint(loss)),
        "checkpoint_of_grad": jax.checkpoint(jax.grad(loss)),
        "everything_saveable": jax.grad(jax.checkpoint(loss, policy=jax.checkpoint_policies.everything_saveable)),
    }[order]
    assert_close(gradients(jit(fn)(floats_of(inputs), inputs)), wanted(inputs, cotangents), "float32")


def test_a_checkpointed_forward_does_not_save_the_snapshot():
    case = CASE._replace(tokens=320, width=64)
    inputs, cotangents = make_inputs(case)

    def saved_bytes(loss):
        _, vjp = jax.eval_shape(lambda floats: jax.vjp(lambda f: loss(f, inputs), floats), floats_of(inputs))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(vjp))

    loss = scalar("cpu", cotangents)
    given = sum(x.nbytes for x in inputs.values())
    plan = sdm_jax.plan(**inputs)
    assert saved_bytes(jax.checkpoint(loss)) <= given + sum(x.nbytes for x in cotangents.values())
    assert saved_bytes(loss) >= plan.saved_bytes


@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_segments(implementation, remat):
    # Segments chained through the new bank, which carries gradients too, are one long stream.
    inputs, cotangents = make_inputs(CASE._replace(tokens=48))

    def segments(x):
        return jnp.moveaxis(x.reshape(2, 3, 16, x.shape[-1]), 1, 0)

    def loss(floats):
        def segment(bank, tokens):
            y, bank = sdm_jax.write_read(bank, **tokens, implementation=implementation, chunk_size=16)
            return bank, y

        tokens = {name: segments(x) for name, x in (inputs | floats).items() if name != "bank"}
        bank, y = jax.lax.scan(jax.checkpoint(segment) if remat else segment, floats["bank"], tokens)
        y = jnp.moveaxis(y, 0, 1).reshape(inputs["v"].shape)
        return jnp.vdot(y, cotangents["y"]) + jnp.vdot(bank, cotangents["new_bank"])

    got = jit(jax.grad(loss))(floats_of(inputs))
    assert_close(gradients(got), wanted(inputs, cotangents, chunk_size=16), "float32")


def test_chained_calls(implementation):
    # Two calls, the second on the first one's bank, both read: gradients flow through the bank between.
    inputs, cotangents = make_inputs(CASE._replace(tokens=32))
    half = {name: x if name == "bank" else x[:, :16] for name, x in inputs.items()}
    rest = {name: x if name == "bank" else x[:, 16:] for name, x in inputs.items()}

    def loss(bank):
        y, bank = sdm_jax.write_read(**(half | {"bank": bank}), implementation=implementation)
        z, bank = sdm_jax.write_read(**(rest | {"bank": bank}), implementation=implementation)
        y = jnp.concatenate([y, z], axis=1)
        return jnp.vdot(y, cotangents["y"]) + jnp.vdot(bank, cotangents["new_bank"])

    got = jit(jax.grad(loss))(inputs["bank"])
    assert relative_error(got, wanted(inputs, cotangents)["bank"]) <= tol("float32")


# ---- shapes, pytrees, derivatives that do not exist


def test_eval_shape_and_static_settings():
    inputs, _ = make_inputs(CASE)
    settings = ("chunk_size", "snapshot_quant", "shared_bank", "implementation", "grad_bank_dtype")
    op = jax.jit(sdm_jax.write_read, static_argnames=settings)
    y, new_bank = jax.eval_shape(functools.partial(op, chunk_size=16, snapshot_quant="fp8"), **inputs)
    assert (y.shape, y.dtype) == (inputs["v"].shape, jnp.float32)
    assert (new_bank.shape, new_bank.dtype) == (inputs["bank"].shape, jnp.float32)
    assert not new_bank.weak_type
    got = op(**inputs, chunk_size=16, snapshot_quant="fp8", shared_bank=False, implementation="cpu")
    assert np.isfinite(got[0]).all()


def test_ids_in_a_pytree_get_float0(implementation):
    inputs, cotangents = make_inputs(CASE)

    def loss(inputs):
        y, new_bank = sdm_jax.write_read(**inputs, implementation=implementation)
        return jnp.vdot(y, cotangents["y"]) + jnp.vdot(new_bank, cotangents["new_bank"])

    got = jit(jax.grad(loss, allow_int=True))(inputs)
    for name in ("k_idx", "q_idx"):
        assert got[name].dtype == jax.dtypes.float0
        assert got[name].shape == inputs[name].shape
    assert_close(gradients(got), wanted(inputs, cotangents), "float32")


def test_gradient_of_one_result_only(implementation):
    # The cotangent of the other is a symbolic zero.
    inputs, cotangents = make_inputs(CASE)
    for result, key in ((0, "y"), (1, "new_bank")):

        def loss(floats, result=result, key=key):
            out = sdm_jax.write_read(**(inputs | floats), implementation=implementation)
            return jnp.vdot(out[result], cotangents[key])

        got = gradients(jit(jax.grad(loss))(floats_of(inputs)))
        zeros = {name: np.zeros_like(x) for name, x in cotangents.items()}
        assert_close(got, wanted(inputs, zeros | {key: cotangents[key]}), "float32")


def test_forward_mode_says_why_not(implementation):
    inputs, _ = make_inputs(CASE)
    op = functools.partial(sdm_jax.write_read, implementation=implementation)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda v: op(**(inputs | {"v": v})), (inputs["v"],), (inputs["v"],))


def test_second_derivatives_say_why_not(implementation):
    inputs, cotangents = make_inputs(CASE)
    loss = scalar(implementation, cotangents)
    first = jax.grad(lambda v: loss(floats_of(inputs) | {"v": v}, inputs))
    with pytest.raises(NotImplementedError, match=r"no derivative of its own.*once.*implementation='reference'"):
        jax.grad(lambda v: first(v).sum())(inputs["v"])


def test_second_derivatives_of_the_reference():
    inputs, cotangents = make_inputs(CASE._replace(tokens=3))
    loss = scalar("reference", cotangents)

    def slope(v):
        return jax.grad(lambda beta: loss(floats_of(inputs) | {"v": v, "beta": beta}, inputs).sum())(inputs["beta"])

    # The gradient of the strengths is linear in the values: its derivative along them is its change.
    v = np.nan_to_num(inputs["v"])
    value, change = jit(lambda v, dv: jax.jvp(slope, (v,), (dv,)))(v, v)
    base = jit(slope)(np.zeros_like(v))
    written = ~np.isnan(inputs["beta"])
    assert relative_error(change[written], (value - base)[written]) <= tol("float32")
    assert np.abs(change[written]).max() > 0.1


# ---- a process


def test_many_independent_calls_in_one_program():
    # Each call waits for its own tasks on the threads that all share.
    case = Case("independent", lead=(4,), tokens=64, slots=100, width=300, writes=8, reads=8, gates="mild")
    many = [make_inputs(case, seed)[0] for seed in range(8)]

    @jax.jit
    def run(many):
        def loss(floats, inputs):
            y, new_bank = sdm_jax.write_read(**(inputs | floats), implementation="cpu")
            return y.sum() + new_bank.sum()

        return [jax.grad(loss)(floats_of(x), x) for x in many]

    first = jax.block_until_ready(run(many))
    for _ in range(5):
        for got, want in zip(run(many), first, strict=True):
            assert_same_bits(gradients(got), gradients(want))


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_module_can_go_and_the_call_stays(tmp_path):
    # And the import starts no backend, and works from another folder.
    root = os.path.dirname(os.path.dirname(sdm_jax.__file__))
    done = run_python(
        f"""
        import gc, os, sys
        os.chdir({str(tmp_path)!r})
        import jax, jax.numpy as jnp
        import sdm_jax
        from jax._src import xla_bridge
        assert not xla_bridge.backends_are_initialized()
        ids, row, v = jnp.zeros((1, 4, 2), jnp.int32), jnp.ones((1, 4, 1)), jnp.ones((1, 4, 3))
        args = (jnp.ones((1, 8, 3)), ids, ids + 0.5, v, row, -row, ids, ids + 1.0)
        grad = jax.jit(jax.grad(lambda bank: sdm_jax.write_read(bank, *args[1:])[0].sum()))
        want = grad(args[0])
        op = jax.jit(lambda *x: sdm_jax.write_read(*x)[0])
        jax.block_until_ready(op(*args))
        for name in [name for name in sys.modules if name.split(".")[0] == "sdm_jax"]:
            del sys.modules[name]
        del sdm_jax
        gc.collect()
        assert (grad(args[0]) == want).all()
        print(float(op(*args).sum()))
        """,
        PYTHONPATH=root,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert np.isfinite(float(done.stdout))


def test_exit_right_after_a_call():
    done = run_python(
        """
        import jax.numpy as jnp, sdm_jax
        ids, row, v = jnp.zeros((1, 4, 2), jnp.int32), jnp.ones((1, 4, 1)), jnp.ones((1, 4, 3))
        sdm_jax.write_read(jnp.ones((1, 8, 3)), ids, ids + 0.5, v, row, -row, ids, ids + 1.0)
        """,
        PYTHONPATH=os.path.dirname(os.path.dirname(sdm_jax.__file__)),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_disable_jit(implementation):
    inputs, _ = make_inputs(CASE)
    want = sdm_jax.write_read(**inputs, implementation=implementation)
    with jax.disable_jit():
        got = sdm_jax.write_read(**inputs, implementation=implementation)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)
