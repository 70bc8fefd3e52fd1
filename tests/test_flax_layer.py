"""`SparseDeltaMemory` against section 6 of the specification."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from sdm_jax import reference
from sdm_jax.flax import (
    BankParam,
    GateParam,
    SDMState,
    SparseDeltaMemory,
    count_parameters,
    weight_decay_mask,
)
from sdm_jax.flax.layer import ACTIVATIONS
from sdm_jax.product_key import product_key_topk

SMALL = {"num_heads": 2, "slots_per_head": 36, "num_writes": 4, "num_reads": 5}


def make(dim=8, seed=0, **settings):
    return SparseDeltaMemory(dim, **({"rngs": nnx.Rngs(seed)} | SMALL | settings))


def three_zeros(key, shape, dtype):
    return jnp.zeros(3, dtype)


def features(batch=2, tokens=50, dim=8, dtype=jnp.float32, seed=1):
    return jax.random.normal(jax.random.key(seed), (batch, tokens, dim), dtype)


run = jax.jit(lambda layer, x, state=None: layer(x, state))


def by_the_words(layer, x, bank):
    """The layer's readings from `bank [B, H, S, D]`, written down as section 6 does."""
    batch, tokens, _ = x.shape
    heads, width = layer.num_heads, layer.head_dim

    def split(a):  # [B, T, H n] -> [B, H, T, n]
        return a.reshape(batch, tokens, heads, -1).transpose(0, 2, 1, 3)

    def select(projection, norm, activation, scale, count):
        scores = x @ projection.kernel[...]
        if norm is not None:
            mean, var = scores.mean((0, 1), keepdims=True), scores.var((0, 1), keepdims=True)
            scores = (scores - mean) / jnp.sqrt(var + 1e-5)
        values, ids = product_key_topk(split(scores), layer.factors, count)
        if activation == "softmax":
            weights = jnp.exp(scale * values) / jnp.exp(scale * values).sum(-1, keepdims=True)
        elif activation == "l2":
            weights = values / jnp.sqrt((values**2).sum(-1, keepdims=True) + 1e-6 / scale**2)
        else:
            weights = getattr(jax.nn, activation)(scale * values)
        return weights, ids

    k_val, k_idx = select(
        layer.write_scores, layer.write_norm, layer.write_activation, layer.write_scale, layer.num_writes
    )
    q_val, q_idx = select(layer.read_scores, layer.read_norm, layer.read_activation, layer.read_scale, layer.num_reads)
    v = split(x @ layer.value.kernel[...])
    beta = split(1 / (1 + jnp.exp(-(x @ layer.strength.kernel[...]))))
    step = jnp.log1p(jnp.exp(x @ layer.decay.kernel[...] + layer.dt_bias[...].reshape(1, 1, -1)))
    g = split(-jnp.exp(layer.A_log[...]).reshape(1, 1, -1) * step)
    if layer.key_weighted_decay:
        g = g * k_val
    y, bank = reference.write_read(bank, k_idx, k_val, v, beta, g, q_idx, q_val)
    y = y.transpose(0, 2, 1, 3)
    if layer.readings_norm is not None:
        y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-5)
    y = y.reshape(batch, tokens, heads * width)
    if layer.output_gate is not None:
        y = y / (1 + jnp.exp(-(x @ layer.output_gate.kernel[...])))
    return y @ layer.output.kernel[...], bank


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {
            "query_batchnorm": True,
            "key_weighted_decay": True,
            "normalize_readings": False,
            "write_activation": "l2",
            "read_scale": 0.5,
        },
        {
            "product_key_factors": (3, 4, 3),
            "num_heads": 1,
            "output_gate": False,
            "learned_bank": False,
            "read_activation": "relu",
            "write_scale": 2.0,
        },
    ],
    ids=["defaults", "batchnorm-key_weighted_decay-l2", "three_factors-zero_bank-relu"],
)
def test_is_the_specification(settings):
    with jax.enable_x64(True):
        layer = make(param_dtype=jnp.float64, **settings)
        x = features(dtype=jnp.float64)
        y, state = run(layer, x)
        shape = (layer.num_heads, 36, layer.head_dim)
        bank = jnp.zeros(shape) if layer.bank is None else layer.bank[...].reshape(shape)
        expected, bank = jax.jit(by_the_words)(layer, x, jnp.broadcast_to(bank, (2, *bank.shape)))
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(state.bank, bank, rtol=0, atol=1e-12)
        assert state.tokens == 50


def gated_delta_rule(layer, x, state):
    """Gated DeltaNet of one head with a `[d, D]` state, token by token."""
    keys, queries = (x @ projection.kernel[...] for projection in (layer.write_scores, layer.read_scores))
    keys, queries = (a / jnp.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (keys, queries))
    values = x @ layer.value.kernel[...]
    strength = jax.nn.sigmoid(x @ layer.strength.kernel[...])
    step = jax.nn.softplus(x @ layer.decay.kernel[...] + layer.dt_bias[...].reshape(1, 1, 1))
    alpha = jnp.exp(-jnp.exp(layer.A_log[...]).reshape(1, 1, 1) * step)

    def token(state, inputs):
        q, k, v, b, a = inputs
        state = a[:, :, None] * state
        error = v - jnp.einsum("bk,bkd->bd", k, state)
        state = state + jnp.einsum("bk,bd->bkd", k, b * error)
        return state, jnp.einsum("bk,bkd->bd", q, state)

    inputs = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), (queries, keys, values, strength, alpha))
    state, y = jax.lax.scan(token, state, inputs)
    return jnp.swapaxes(y, 0, 1) @ layer.output.kernel[...], state


def test_dense_limit_is_the_gated_delta_rule():
    """All slots written and read with L2 weights: values, gradients, and token by token."""
    width, tokens = 16, 70
    with jax.enable_x64(True):
        layer = SparseDeltaMemory(
            6,
            slots_per_head=width,
            product_key_factors=(width,),
            num_writes=width,
            num_reads=width,
            write_activation="l2",
            read_activation="l2",
            normalize_readings=False,
            output_gate=False,
            learned_bank=False,
            param_dtype=jnp.float64,
            rngs=nnx.Rngs(0),
        )
        x = features(2, tokens, 6, jnp.float64)
        graph, params = nnx.split(layer)

        def ours(params, x, bank):
            y, state = nnx.merge(graph, params)(x, SDMState(bank[:, None], jnp.int32(0)))
            return y, state.bank[:, 0]

        def theirs(params, x, bank):
            return gated_delta_rule(nnx.merge(graph, params), x, bank)

        def loss(f):
            def weighted(params, x, bank):
                y, bank = f(params, x, bank)
                return jnp.sin(y).sum() + jnp.cos(bank).sum(), (y, bank)

            return jax.jit(jax.value_and_grad(weighted, argnums=(0, 1, 2), has_aux=True))

        zeros = jnp.zeros((2, width, 6), jnp.float64)
        ours, theirs = loss(ours), loss(theirs)
        for bank in (zeros, jax.random.normal(jax.random.key(2), zeros.shape, jnp.float64)):
            got, expected = ours(params, x, bank), theirs(params, x, bank)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-11), got, expected)

            (_, (y, _)), _ = expected
            state = SDMState(bank[:, None], jnp.int32(0))
            for t in range(tokens):
                y_t, state = run(layer, x[:, t : t + 1], state)
                np.testing.assert_allclose(y_t, y[:, t : t + 1], rtol=0, atol=1e-11)


def test_pieces_equal_one_pass():
    layer = make(chunk_size=16)
    x = features(tokens=40)
    y, whole = run(layer, x)
    for pieces in [(40,), (17, 1, 22), (1,) * 40]:
        state, ys, start = layer.init_state(2), [], 0
        for length in pieces:
            piece, state = run(layer, x[:, start : start + length], state)
            ys.append(piece)
            start += length
        np.testing.assert_allclose(jnp.concatenate(ys, axis=1), y, rtol=0, atol=2e-5)
        np.testing.assert_allclose(state.bank, whole.bank, rtol=0, atol=2e-5)
        assert state.tokens == 40


def test_every_split_equals_one_pass():
    """A prefill of any length, then the rest at once: to rounding of float64."""
    with jax.enable_x64(True):
        layer = make(
            chunk_size=16, query_batchnorm=True, key_weighted_decay=True, use_bias=True, param_dtype=jnp.float64
        )
        layer.eval()
        x = features(tokens=20, dtype=jnp.float64)
        y, whole = run(layer, x)
        for split in range(21):
            first, state = run(layer, x[:, :split], layer.init_state(2))
            last, state = run(layer, x[:, split:], state)
            np.testing.assert_allclose(jnp.concatenate([first, last], axis=1), y, rtol=0, atol=1e-12)
            np.testing.assert_allclose(state.bank, whole.bank, rtol=0, atol=1e-12)
            assert state.tokens == 20


@pytest.mark.parametrize("tokens", [1, 20])
def test_a_donated_state_stays_in_place(tokens):
    layer = make(16, slots_per_head=1024)
    step = jax.jit(lambda layer, x, state: layer(x, state), donate_argnums=2)
    state = jax.tree.map(jnp.copy, layer.init_state(2))
    x = features(tokens=tokens, dim=16)
    hlo = step.lower(layer, x, state).compile().as_text()
    assert "f32[2,2,1024,8]" in hlo
    assert not re.findall(r"f32\[2,2,1024,8\]\S* copy\(", hlo)
    address = state.bank.unsafe_buffer_pointer()
    _, state = step(layer, x, state)
    assert state.bank.unsafe_buffer_pointer() == address


def test_state_is_saved_and_restored(tmp_path):
    layer = make(dtype="bfloat16")
    x = features(tokens=30)
    _, state = run(layer, x[:, :20])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: layer.init_state(2)))
    assert isinstance(restored, SDMState)
    (y, after), (want_y, want) = run(layer, x[:, 20:], restored), run(layer, x[:, 20:], state)
    np.testing.assert_array_equal(y, want_y)
    jax.tree.map(np.testing.assert_array_equal, after, want)
    assert after.tokens == 30


def test_gradient_of_learned_bank_sums_over_the_batch():
    layer = make()
    x = features(batch=3)

    @nnx.jit
    def bank_gradient(layer, x):
        return nnx.grad(lambda layer: jnp.sin(layer(x)[0]).sum(), argnums=nnx.DiffState(0, BankParam))(layer)

    (together,) = jax.tree.leaves(bank_gradient(layer, x))
    apart = sum(jax.tree.leaves(bank_gradient(layer, x[i : i + 1]))[0] for i in range(3))
    assert together.shape == (2 * 36, 4)
    np.testing.assert_allclose(together, apart, rtol=0, atol=1e-4)


def test_no_copy_of_the_banks():
    """The banks of the batch are a broadcast of the parameter that the op takes over in place."""
    layer = make(16, slots_per_head=1024)
    graph, params = nnx.split(layer)

    @jax.jit
    def gradients(params, x):
        return jax.value_and_grad(lambda params: nnx.merge(graph, params)(x)[0].sum())(params)

    hlo = gradients.lower(params, features(dim=16)).compile().as_text()
    entry = hlo[hlo.index("\nENTRY ") :]
    assert "f32[2,2,1024,8]" in entry
    assert not re.findall(r"f32\[2,2,1024,8\]\S* copy\(", entry)


def test_batchnorm_statistics():
    layer = make(query_batchnorm=True)
    x = features(batch=4, tokens=64)
    call = nnx.jit(lambda layer, x, state=None: layer(x, state))
    for _ in range(80):
        y_train, _ = call(layer, x)
    scores = layer.write_scores(x)
    np.testing.assert_allclose(layer.write_norm.mean[...], scores.mean((0, 1)), rtol=0, atol=1e-3)
    before = jax.tree.map(jnp.copy, nnx.state(layer))
    layer.eval()
    y_eval, _ = call(layer, x)
    np.testing.assert_allclose(y_eval, y_train, rtol=0, atol=1e-2)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(layer), before)
    y_first, state = call(layer, x[:, :63])
    y_last, _ = call(layer, x[:, 63:], state)
    np.testing.assert_allclose(jnp.concatenate([y_first, y_last], 1), y_eval, rtol=0, atol=1e-4)


def test_initial_values():
    dim, heads = 512, 64
    layer = make(dim, num_heads=heads, slots_per_head=64, use_bias=True)
    for projection in (layer.write_scores, layer.value, layer.decay, layer.strength, layer.output):
        kernel = np.asarray(projection.kernel[...])
        assert np.abs(kernel).max() <= 3 * dim**-0.5
        assert np.std(kernel) == pytest.approx(dim**-0.5, rel=0.05)
        assert not projection.bias[...].any()
    a = np.exp(layer.A_log[...])
    assert 0 < a.min() < 2
    assert 14 < a.max() <= 16
    assert np.exp(make(A_init_range=(0.0, 0.0)).A_log[...]) == pytest.approx(1e-4)
    dt = np.log1p(np.exp(layer.dt_bias[...]))
    assert 0.99e-3 < dt.min() < 3e-3
    assert 0.03 < dt.max() < 0.101


def test_parameters_can_be_told_apart():
    layer = make(query_batchnorm=True)
    params = nnx.state(layer, nnx.Param)
    banks, gates, others = nnx.split_state(params, BankParam, GateParam, ...)
    assert [x.shape for x in jax.tree.leaves(banks)] == [(2 * 36, 4)]
    assert set(gates) == {"A_log", "dt_bias"}
    assert {"write_scores", "write_norm", "output"} <= set(others)
    active = 2 * 8 * 24 + 8 * 8 * 3 + 2 * 8 * 2 + 4 * 24 + 2 * 4 + 4
    assert count_parameters(layer) == count_parameters(params) == (active, 2 * 36 * 4)
    with pytest.raises(TypeError, match=r"node must be an nnx.Module or nnx.State, got dict"):
        count_parameters({})


def test_weight_decay_is_for_matrices():
    params = nnx.state(make(query_batchnorm=True, use_bias=True), nnx.Param)
    optimizer = optax.adamw(1.0, weight_decay=0.5, mask=weight_decay_mask)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    after = optax.apply_updates(params, updates)
    decayed = {
        jax.tree_util.keystr(path)
        for (path, x), y in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(after), strict=True)
        if (x != y).any()
    }
    projections = ("write_scores", "read_scores", "value", "decay", "strength", "output_gate", "output")
    assert decayed == {f"['{name}']['kernel'].value" for name in projections}


def test_weight_decay_mask_goes_by_names():
    """Layers stacked by `nnx.vmap` have one more axis; trees of bare arrays have no kinds."""
    settings = {"query_batchnorm": True, "use_bias": True}
    stack = nnx.vmap(lambda rngs: make(rngs=rngs, **settings))(nnx.Rngs(0).split(3))
    assert stack.value.bias.ndim == 2
    for params in (
        nnx.state(stack, nnx.Param),
        nnx.to_pure_dict(nnx.state(stack, nnx.Param)),
        nnx.to_pure_dict(nnx.state(make(**settings), nnx.Param)),
        make(use_bias=True),
    ):
        mask = jax.tree.leaves_with_path(weight_decay_mask(params))
        assert len(mask) >= 19
        for path, decays in mask:
            assert decays == ("kernel" in jax.tree_util.keystr(path)), path


def test_weight_decay_mask_in_an_optimizer_of_nnx():
    layer = make()
    optimizer = nnx.Optimizer(layer, optax.adamw(1e-2, weight_decay=0.5, mask=weight_decay_mask), wrt=nnx.Param)
    before = jax.tree.map(np.array, nnx.state(layer, nnx.Param))
    optimizer.update(layer, jax.tree.map(jnp.zeros_like, before))
    after = nnx.state(layer, nnx.Param)
    for name in ("A_log", "dt_bias", "bank"):
        np.testing.assert_array_equal(after[name][...], before[name][...])
    assert (after["value"]["kernel"][...] != before["value"]["kernel"][...]).any()


def test_partitioning_metadata():
    """As `nnx.Linear` has it: through the initializers, or as metadata of the parameters."""
    normal = nnx.initializers.normal()
    columns, rows = (None, "model"), ("model", None)
    with jax.set_mesh(jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))):
        by_init = make(
            kernel_init=nnx.with_partitioning(normal, columns),
            out_kernel_init=nnx.with_partitioning(normal, rows),
            bias_init=nnx.with_partitioning(nnx.initializers.zeros, ("model",)),
            bank_init=nnx.with_partitioning(normal, rows),
            use_bias=True,
        )
        by_metadata = make(
            kernel_metadata={"out_sharding": columns},
            out_kernel_metadata={"out_sharding": rows},
            bias_metadata={"out_sharding": ("model",)},
            bank_metadata={"out_sharding": rows, "note": "bank"},
            use_bias=True,
        )
    for layer in (by_init, by_metadata):
        specs = nnx.get_partition_spec(nnx.state(layer, nnx.Param))
        assert specs["value"]["kernel"].get_value() == jax.sharding.PartitionSpec(*columns)
        assert specs["output"]["kernel"].get_value() == jax.sharding.PartitionSpec(*rows)
        assert specs["value"]["bias"].get_value() == jax.sharding.PartitionSpec("model")
        assert specs["bank"].get_value() == jax.sharding.PartitionSpec(*rows)
    assert by_metadata.bank.note == "bank"


def test_bfloat16():
    layer = make(dtype="bfloat16")
    x = features()
    y, state = run(layer, x)
    assert y.dtype == state.bank.dtype == jnp.bfloat16
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(nnx.state(layer)))
    # Rounded scores may select other slots, so only most of the readings are near.
    assert jnp.median(jnp.abs(y - run(make(), x)[0])) < 0.05
    gradients = jax.jit(jax.grad(lambda layer: layer(x)[0].astype(jnp.float32).sum()))(layer)
    assert all(x.dtype == jnp.float32 and jnp.isfinite(x).all() for x in jax.tree.leaves(gradients))
    wide = layer.init_state(2, jnp.float32)
    y, state = run(layer, x, wide)
    assert state.bank.dtype == jnp.float32
    assert y.dtype == jnp.bfloat16


@pytest.mark.parametrize(("heads", "batch"), [(1, 1), (2, 3)])
def test_clone_steps_with_a_donated_state(heads, batch):
    layer = make(num_heads=heads)
    clone = nnx.clone(layer)
    step = jax.jit(lambda layer, x, state: layer(x, state), donate_argnums=2)
    x = features(batch=batch, tokens=1)
    ys = []
    for module in (layer, clone):
        state = module.init_state(batch)
        for _ in range(3):
            y, state = step(module, x, state)
        ys.append(y)
    np.testing.assert_array_equal(*ys)
    assert np.isfinite(layer.init_state(batch).bank).all()  # the parameter was not donated with it


def test_transformations():
    layer = make()
    graph, params = nnx.split(layer)
    x = features(batch=4, tokens=20)

    def loss(params, x):
        return jnp.sin(nnx.merge(graph, params)(x)[0]).sum()

    plain = jax.jit(jax.grad(loss))(params, x)
    remat = jax.jit(jax.grad(jax.checkpoint(loss)))(params, x)
    mapped = jax.jit(lambda params, x: jax.vmap(jax.grad(loss), (None, 0))(params, x[:, None]))(params, x)
    for other in (remat, jax.tree.map(lambda g: g.sum(0), mapped)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4), plain, other)


@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 8)], ids=str)
def test_empty(shape):
    layer = make(query_batchnorm=True)
    statistics = jax.tree.map(np.array, nnx.state(layer, nnx.BatchStat))
    y, state = layer(jnp.zeros(shape))
    assert y.shape == shape
    assert state.tokens == shape[1]
    np.testing.assert_array_equal(state.bank, layer.init_state(shape[0]).bank)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(layer, nnx.BatchStat), statistics)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"dim": 0}, ValueError, "dim must be at least 1, got 0; the nearest valid value is 1"),
        (
            {"num_heads": 3},
            ValueError,
            r"num_heads must divide dim \(8\), got 3; the nearest valid value is 2",
        ),
        ({"num_heads": 2.0}, TypeError, "num_heads must be an integer, got 2.0; the nearest valid value is 2"),
        ({"slots_per_head": 40}, ValueError, "slots_per_head must be a square number, got 40; the nearest.* is 36"),
        ({"product_key_factors": (4, 8)}, ValueError, "slots_per_head must be the product.*nearest.* is 32"),
        ({"product_key_factors": (6, 6.0)}, TypeError, "product_key_factors must be a sequence of integers"),
        ({"num_writes": 0}, ValueError, "num_writes must be in 1..36 .*nearest valid value is 1"),
        ({"num_reads": 37}, ValueError, "num_reads must be in 1..36 .*nearest valid value is 36"),
        ({"slots_per_head": 4096, "num_reads": 300}, ValueError, "num_reads.*limit is 256.*value is 256"),
        ({"write_activation": "softmx"}, ValueError, "write_activation must be one of.*value is 'softmax'"),
        ({"read_activation": None}, ValueError, "read_activation must be one of"),
        ({"write_scale": "2"}, TypeError, "write_scale must be a number"),
        ({"read_scale": float("nan")}, ValueError, "read_scale must be finite"),
        ({"output_gate": 1}, TypeError, "output_gate must be True or False, got 1"),
        ({"query_batchnorm": None}, TypeError, "query_batchnorm must be True or False"),
        ({"learned_bank": np.zeros(2)}, TypeError, "learned_bank must be True or False"),
        (
            {"A_init_range": (4.0, 1.0)},
            ValueError,
            r"A_init_range must be.*nearest valid value is \(1.0, 4.0\)",
        ),
        ({"A_init_range": 3}, TypeError, "A_init_range must be a pair"),
        (
            {"snapshot_quant": "int8"},
            ValueError,
            "snapshot_quant must be one of.*nearest valid value is 'int4'",
        ),
        ({"grad_bank_dtype": "bfloat16"}, TypeError, "grad_bank_dtype must be float32"),
        (
            {"dtype": "float64"},
            ValueError,
            "dtype float64 needs jax_enable_x64; the nearest valid value is float32",
        ),
        (
            {"chunk_size": 8},
            ValueError,
            "chunk_size must be in 16..256, got 8; the nearest valid value is 16",
        ),
        ({"implementation": "gpu"}, ValueError, "implementation must be one of None, 'cpu'.*value is 'cpu'"),
        ({"dtype": "float16"}, TypeError, "dtype must be float32, bfloat16, float64, got float16"),
        ({"param_dtype": "int8"}, TypeError, "param_dtype must be float32.*got int8"),
        ({"kernel_init": 3}, TypeError, "kernel_init must be a function.*got 3"),
        ({"out_kernel_init": "normal"}, TypeError, "out_kernel_init must be a function"),
        ({"bias_init": None}, TypeError, "bias_init must be a function.*got None"),
        ({"bank_init": jnp.zeros(3)}, TypeError, "bank_init must be a function"),
        ({"kernel_metadata": ("model",)}, TypeError, "kernel_metadata must be a mapping"),
        ({"bank_metadata": {1: 2}}, TypeError, "bank_metadata must be a mapping from names"),
        ({"num_writes": True}, TypeError, "num_writes must be an integer, got True"),
        ({"param_dtype": None}, TypeError, "param_dtype must be float32, bfloat16, float64, got None"),
        ({"kernel_init": three_zeros}, ValueError, r"kernel_init must give .* \(8, 24\), got shape \(3,\)"),
        ({"out_kernel_init": three_zeros}, ValueError, r"out_kernel_init must give .* \(8, 8\), got shape \(3,\)"),
        ({"bias_init": three_zeros, "use_bias": True}, ValueError, r"bias_init must give .* \(24,\), got shape \(3,\)"),
        ({"bank_init": three_zeros}, ValueError, r"bank_init must give .* \(72, 4\), got shape \(3,\)"),
        ({"bank_init": lambda *_: 1.0}, ValueError, r"bank_init must give .* got shape"),
        ({"rngs": nnx.Rngs()}, ValueError, "rngs must have a stream params"),
        ({"rngs": nnx.Rngs(dropout=0)}, ValueError, "rngs must have a stream params"),
        ({"rngs": 0}, TypeError, r"rngs must be flax.nnx.Rngs, such as nnx.Rngs\(0\), got 0"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_bad_settings(settings, error, message):
    with pytest.raises(error, match=message):
        make(**settings)


def test_flags_of_numpy_are_taken():
    layer = make(use_bias=np.True_, output_gate=np.False_, rngs=nnx.Rngs(params=0))
    assert layer.value.bias is not None
    assert layer.output_gate is None
    assert nnx.graphdef(layer) == nnx.graphdef(make(use_bias=True, output_gate=False))


def test_float64_bank_has_no_other_gradient():
    with (
        jax.enable_x64(True),
        pytest.raises(
            ValueError, match=r"grad_bank_dtype must be None for a float64 bank.*nearest valid value is None"
        ),
    ):
        make(grad_bank_dtype="float32", dtype="float64")


def test_abstract_layer_has_no_state():
    layer = nnx.eval_shape(make)
    with pytest.raises(TypeError, match="the layer's bank is abstract"):
        layer.init_state(2)
    assert jax.eval_shape(lambda layer: layer.init_state(2), layer).bank.shape == (2, 2, 36, 4)
    assert nnx.eval_shape(lambda: make(learned_bank=False)).init_state(2).bank.shape == (2, 2, 36, 4)


X = np.zeros((2, 5, 8), np.float32)
BANK = np.zeros((2, 2, 36, 4), np.float32)


@pytest.mark.parametrize(
    ("x", "state", "error", "message"),
    [
        (X[0], None, ValueError, r"x must be \[batch, tokens, 8\], got shape \(5, 8\)"),
        (X[..., :7], None, ValueError, r"x must be \[batch, tokens, 8\], got shape \(2, 5, 7\)"),
        (X.tolist(), None, TypeError, r"x must be an array \[batch, tokens, 8\], got list"),
        (None, None, TypeError, "x must be an array.*got NoneType"),
        (X.astype(int), None, TypeError, "x must have a floating-point dtype, got int64"),
        (X.astype(complex), None, TypeError, "x must have a floating-point dtype, got complex128"),
        (X, (BANK, 0), TypeError, "state must be an SDMState, as init_state gives it, or None, got tuple"),
        (X, SDMState(BANK[:1], np.int32(0)), TypeError, "state.tokens must be an array, got int32"),
        (X, SDMState(None, np.array(0)), TypeError, "state.bank must be an array, got NoneType"),
        (X, SDMState(BANK.astype("float16"), np.array(0)), TypeError, "state.bank must be float32.*got float16"),
        (X, SDMState(BANK[:1], np.array(0)), ValueError, r"state.bank must be \(2, 2, 36, 4\).*got \(1, 2, 36, 4\)"),
        (X, SDMState(BANK, np.zeros(2, int)), TypeError, "state.tokens must be an integer scalar"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_calls(x, state, error, message):
    with pytest.raises(error, match=message):
        make()(x, state)


def test_bad_state():
    with pytest.raises(TypeError, match="dtype must be"):
        make().init_state(2, jnp.float16)
    with pytest.raises(ValueError, match="batch must be at least 0"):
        make().init_state(-1)


def test_every_activation_is_finite():
    x = jnp.asarray(np.concatenate([np.linspace(-30, 30, 24), np.zeros(12)]).reshape(3, 12), jnp.float32)
    for activation in ACTIVATIONS.values():
        assert np.isfinite(jax.jit(activation)(x, 2.0)).all()
