"""`value_and_grad_inplace` against `jax.value_and_grad`, and where the bank's memory goes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from test_in_place import bank_copies as copies_in

import sdm_jax

P, S, D, T, W, R = 2, 512, 64, 48, 4, 3


def make(dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=(P, *shape)), dtype)

    def ids(count):
        return jnp.asarray(rng.integers(-1, S, (P, T, count)), jnp.int32)

    tokens = dict(k_idx=ids(W), k_val=normal(T, W) / 4, v=normal(T, D), q_idx=ids(R), q_val=normal(T, R))
    tokens["beta"] = jnp.asarray(rng.uniform(size=(P, T, 1)), jnp.float32)
    tokens["g"] = -jnp.asarray(rng.uniform(size=(P, T, 1)), jnp.float32)
    return normal(S, D), jnp.asarray(rng.normal(size=(D, D)) / 8, dtype), tokens


def chain(calls, implementation=None, **settings):
    """A loss over so many calls; each one's values come from the readings before it."""

    def loss(bank, weights, tokens):
        total = 0.0
        v = tokens["v"]
        for _ in range(calls):
            y, bank = sdm_jax.write_read(
                bank, **(tokens | {"v": v @ weights}), implementation=implementation, **settings
            )
            v = jnp.tanh(y)
            total = total + (y.astype(jnp.float32) ** 2).mean()
        return total, bank

    return loss


def only_loss(loss):
    return lambda *x: loss(*x)[0]


def bank_copies(compiled, streams=P):
    return len(copies_in(compiled.as_text(), shape=(streams, S, D)))


@pytest.mark.parametrize("implementation", ["cpu", "xla"])
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_equals_value_and_grad(calls, implementation):
    bank, weights, tokens = make()
    loss = chain(calls, implementation)
    found, restored, grads = jax.jit(sdm_jax.value_and_grad_inplace(loss, argnums=(0, 1)))(bank, weights, tokens)
    wanted, wanted_grads = jax.jit(jax.value_and_grad(only_loss(loss), argnums=(0, 1)))(bank, weights, tokens)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(restored, bank)
    for a, b in zip(grads, wanted_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("calls", [1, 3])
def test_no_copy_of_the_bank(calls):
    bank, weights, tokens = make()
    step = jax.jit(sdm_jax.value_and_grad_inplace(chain(calls), argnums=(0, 1)), donate_argnums=0)
    compiled = step.lower(bank, weights, tokens).compile()
    assert bank_copies(compiled) == 0
    plain = jax.jit(jax.value_and_grad(only_loss(chain(calls)), argnums=(0, 1)), donate_argnums=0)
    assert bank_copies(plain.lower(bank, weights, tokens).compile()) >= calls
    # One call more needs no bank more.
    more = jax.jit(sdm_jax.value_and_grad_inplace(chain(calls + 1), argnums=(0, 1)), donate_argnums=0)
    temporaries = [
        x.memory_analysis().temp_size_in_bytes for x in (compiled, more.lower(bank, weights, tokens).compile())
    ]
    saved = sdm_jax.plan(bank, **tokens).saved_bytes
    assert temporaries[1] - temporaries[0] < saved + bank.nbytes
    bank = jax.jit(jnp.copy)(bank)
    before, bits = bank.unsafe_buffer_pointer(), np.array(bank)
    for _ in range(3):
        _, bank, _ = compiled(bank, weights, tokens)
        assert bank.unsafe_buffer_pointer() == before
        np.testing.assert_array_equal(bank, bits)


def test_restored_bit_for_bit():
    """NaN payloads, infinities and negative zeros come back too."""
    bank, weights, tokens = make()
    bits = np.array(bank).view(np.uint32)
    bits[:, :5, 0] = [0x7FC00123, 0xFFC12345, 0x7F800000, 0x80000000, 0x00000001]
    bank = jnp.asarray(bits.view(np.float32))
    _, restored, _ = jax.jit(sdm_jax.value_and_grad_inplace(chain(2)))(bank, weights, tokens)
    np.testing.assert_array_equal(np.asarray(restored).view(np.uint32), bits)


def test_bfloat16_bank():
    bank, weights, tokens = make(jnp.bfloat16)
    loss = chain(2, grad_bank_dtype=jnp.float32)
    found, restored, grads = jax.jit(sdm_jax.value_and_grad_inplace(loss, argnums=(0, 1)))(bank, weights, tokens)
    wanted, wanted_grads = jax.jit(jax.value_and_grad(only_loss(loss), argnums=(0, 1)))(bank, weights, tokens)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_array_equal(restored, bank)
    for a, b in zip(grads, wanted_grads, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=0.02, atol=0.02)


def test_eager_and_arguments():
    """argnums like jax.grad's, pytrees, keyword arguments, what is no array, aux."""
    bank, weights, tokens = make()

    def loss(bank, parameters, name, tokens, *, scale):
        assert name == "linear"
        y, bank = sdm_jax.write_read(bank, **(tokens | {"v": tokens["v"] @ parameters["w"] + parameters["b"]}))
        return ((y**2).mean() * scale, {"readings": y}), bank

    parameters = {"w": weights, "b": jnp.zeros(D)}
    call = sdm_jax.value_and_grad_inplace(loss, argnums=[-3], has_aux=True)
    (value, aux), restored, (grads,) = call(bank, parameters, "linear", tokens, scale=2.0)

    def plain(parameters):
        return loss(bank, parameters, "linear", tokens, scale=2.0)[0]

    (wanted, wanted_aux), wanted_grads = jax.value_and_grad(plain, has_aux=True)(parameters)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    np.testing.assert_array_equal(aux["readings"], wanted_aux["readings"])
    np.testing.assert_array_equal(restored, bank)
    assert set(grads) == {"w", "b"}
    for name in grads:
        np.testing.assert_allclose(grads[name], wanted_grads[name], rtol=0, atol=1e-6)


def test_python_numbers_stay_numbers():
    """Settings of the calls within, which no tracer could be; also where they are static arguments of `jax.jit`."""
    bank, _, tokens = make()

    def loss(bank, tokens, chunk_size, double=False):
        y, bank = sdm_jax.write_read(bank, **tokens, chunk_size=chunk_size)
        return (y**2).mean() * (2 if double else 1), bank

    call = sdm_jax.value_and_grad_inplace(loss)
    value, _, grad = call(bank, tokens, 16, double=True)
    again, _, same = jax.jit(call, static_argnames=("chunk_size", "double"))(bank, tokens, chunk_size=16)
    np.testing.assert_allclose(value, 2 * again, rtol=1e-6)
    np.testing.assert_allclose(grad, 2 * same, rtol=0, atol=1e-6)


def test_through_jit():
    bank, weights, tokens = make()

    @jax.jit
    def half(bank, weights, tokens):
        y, bank = sdm_jax.write_read(bank, **(tokens | {"v": tokens["v"] @ weights}))
        return y, bank

    def loss(bank, weights, tokens):
        y, bank = half(bank, weights, tokens)
        z, bank = half(bank, weights, tokens)
        return (y * z).mean(), bank

    found, restored, grads = jax.jit(sdm_jax.value_and_grad_inplace(loss, argnums=1))(bank, weights, tokens)
    wanted, wanted_grads = jax.value_and_grad(only_loss(loss), argnums=1)(bank, weights, tokens)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_array_equal(restored, bank)
    np.testing.assert_allclose(grads, wanted_grads, rtol=0, atol=1e-6 * float(jnp.abs(wanted_grads).max()))


def test_sharded_bank():
    bank, weights, tokens = make()
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2])
    wanted = jax.jit(sdm_jax.value_and_grad_inplace(chain(2), argnums=(0, 1)))(bank, weights, tokens)
    streams = NamedSharding(mesh, PartitionSpec("data"))
    bank, tokens = jax.device_put((bank, tokens), streams)
    weights = jax.device_put(weights, NamedSharding(mesh, PartitionSpec()))
    step = jax.jit(sdm_jax.value_and_grad_inplace(chain(2), argnums=(0, 1)), donate_argnums=0)
    compiled = step.lower(bank, weights, tokens).compile()
    assert bank_copies(compiled, P // 2) == 0
    assert "all-gather" not in compiled.as_text()
    found = compiled(bank, weights, tokens)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * max(1.0, float(jnp.abs(b).max())))


def test_truncated_back_propagation_over_a_long_stream():
    """Gradients of one segment with the bank in place, then on to the next, which begins where this one ends."""
    bank, weights, _ = make()
    segments = [make(seed=i)[2] for i in range(3)]
    loss = chain(1)

    def step(bank, weights, segment):
        value, bank, d_weights = sdm_jax.value_and_grad_inplace(loss, argnums=1)(bank, weights, segment)
        _, bank = loss(bank, weights, segment)
        return value, bank, weights - 0.1 * d_weights

    in_place = jax.jit(step, donate_argnums=0)
    compiled = in_place.lower(bank, weights, segments[0]).compile()
    assert bank_copies(compiled) == 0
    plain_bank, plain_weights = bank, weights
    bank = jax.jit(jnp.copy)(bank)
    for segment in segments:
        value, bank, weights = compiled(bank, weights, segment)
        (wanted, new_bank), d_weights = jax.value_and_grad(loss, argnums=1, has_aux=True)(
            plain_bank, plain_weights, segment
        )
        plain_bank, plain_weights = new_bank, plain_weights - 0.1 * d_weights
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
        np.testing.assert_allclose(bank, plain_bank, rtol=0, atol=1e-5)
        np.testing.assert_allclose(weights, plain_weights, rtol=0, atol=1e-5)


def use(bank, tokens, **settings):
    return sdm_jax.write_read(bank, **tokens, **settings)


def forked(bank, tokens):
    y, _ = use(bank, tokens)
    z, two = use(bank, tokens)
    return (y * z).mean(), two


def read_twice(bank, tokens):
    y, new_bank = use(bank, tokens)
    return y.mean() + (new_bank**2).mean(), new_bank


def read_elsewhere(bank, tokens):
    y, new_bank = use(bank * 2, tokens)
    return y.mean(), new_bank


def dropped(bank, tokens):
    y, _ = use(bank, tokens)
    return y.mean(), jnp.zeros_like(bank)


def old_one_returned(bank, tokens):
    y, _ = use(bank, tokens)
    return y.mean(), bank


def scanned(bank, tokens):
    bank, y = jax.lax.scan(lambda b, _: use(b, tokens)[::-1], bank, None, length=2)
    return y.mean(), bank


def checkpointed(bank, tokens):
    y, bank = jax.checkpoint(use)(bank, tokens)
    return y.mean(), bank


def unused(bank, tokens):
    y, new_bank = use(jnp.zeros_like(bank), tokens)
    return y.mean(), new_bank


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (forked, ValueError, "uses one bank more than once .in custom_vjp_call, custom_vjp_call"),
        (read_twice, ValueError, "uses one bank more than once"),
        (read_elsewhere, ValueError, "hands its bank to mul"),
        (dropped, ValueError, "drops its bank"),
        (old_one_returned, ValueError, "more than once"),
        (scanned, ValueError, "hands its bank to scan"),
        (checkpointed, ValueError, "hands its bank to (checkpoint|remat)"),
        (unused, ValueError, "drops its bank"),
        (lambda b, t: use(b, t, implementation="reference"), TypeError, "scalar as the loss"),
        (lambda b, t: use(b, t, snapshot_quant="bf16"), TypeError, "scalar as the loss"),
        (lambda b, t: use(b, t)[0].mean(), TypeError, r"must return \(loss, bank\)"),
        (lambda b, t: (use(b, t)[0].mean(), b[0]), TypeError, "with a bank"),
        (
            lambda b, t: (lambda y, b: (y.mean(), b))(*use(b, t, snapshot_quant="int4")),
            ValueError,
            "snapshot_quant='int4' rounds",
        ),
        (
            lambda b, t: (lambda y, b: (y.mean(), b))(*use(b, t, implementation="reference")),
            ValueError,
            "not 'reference'",
        ),
    ],
)
def test_what_it_cannot_follow(loss, error, message):
    bank, _, tokens = make()
    with pytest.raises(error, match=message):
        jax.jit(sdm_jax.value_and_grad_inplace(loss))(bank, tokens)


def test_bad_arguments():
    bank, weights, tokens = make()
    with pytest.raises(TypeError, match="argnums must be an integer"):
        sdm_jax.value_and_grad_inplace(chain(1), argnums=1.5)
    with pytest.raises(ValueError, match="argnums 3 is out of range: there are 3"):
        sdm_jax.value_and_grad_inplace(chain(1), argnums=3)(bank, weights, tokens)
    with pytest.raises(TypeError, match="argument 2 holds int32"):
        sdm_jax.value_and_grad_inplace(chain(1), argnums=2)(bank, weights, tokens)
    with pytest.raises(TypeError, match="bank must be an array of floating-point"):
        sdm_jax.value_and_grad_inplace(chain(1))(jnp.zeros((2, 3, 4), jnp.int32), weights, tokens)


@functools.partial(jax.jit, donate_argnums=0)
def twice(bank, weights, tokens):
    """Gradients of two losses one after another, in one buffer."""
    a, bank, grad_a = sdm_jax.value_and_grad_inplace(chain(1), argnums=1)(bank, weights, tokens)
    b, bank, grad_b = sdm_jax.value_and_grad_inplace(chain(2), argnums=1)(bank, weights, tokens)
    return a + b, bank, grad_a + grad_b


def test_several_in_one_program():
    bank, weights, tokens = make()
    compiled = twice.lower(bank, weights, tokens).compile()
    assert bank_copies(compiled) == 0
    found, restored, grads = compiled(jax.jit(jnp.copy)(bank), weights, tokens)

    def plain(weights):
        return chain(1)(bank, weights, tokens)[0] + chain(2)(bank, weights, tokens)[0]

    wanted, wanted_grads = jax.value_and_grad(plain)(weights)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_array_equal(restored, bank)
    np.testing.assert_allclose(grads, wanted_grads, rtol=0, atol=1e-6 * float(jnp.abs(wanted_grads).max()))
