"""Many devices: what is computed, and what is communicated."""

import contextlib
import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import cpu_device
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import sdm_jax

P = PartitionSpec
B, H, S, D, T, W, R = 4, 2, 64, 32, 40, 4, 3
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
SETTINGS = dict(chunk_size=16)


def make_inputs(lead=(B, H), seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=(*lead, *shape)).astype(np.float32)

    def ids(count):
        return rng.integers(-1, S, (*lead, T, count)).astype(np.int32)

    bank = normal(S, D)
    ints = dict(k_idx=ids(W), q_idx=ids(R))
    floats = dict(k_val=normal(T, W) / 4, v=normal(T, D), q_val=normal(T, R))
    floats["beta"] = rng.uniform(size=(*lead, T, 1)).astype(np.float32)
    floats["g"] = -rng.uniform(size=(*lead, T, 1)).astype(np.float32)
    return bank, floats, ints


def loss(bank, floats, ints, **settings):
    y, new_bank = sdm_jax.write_read(bank, **floats, **ints, **(SETTINGS | settings))
    return (y**2).sum() + (new_bank**2).sum()


def gradients(**settings):
    return jax.jit(jax.grad(functools.partial(loss, **settings), argnums=(0, 1)))


def mesh_of(names=("data", "model"), shape=(2, 2), kind=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names), devices=jax.devices("cpu")[: np.prod(shape)])


def put(mesh, bank, floats, ints, streams, columns=None):
    """The inputs with their leading axes and columns over mesh axes."""

    def place(x, *last):
        spec = (*streams, *[None] * (x.ndim - len(streams) - len(last)), *last)
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    floats = {name: place(x, *([columns] if name == "v" else [])) for name, x in floats.items()}
    return place(bank, columns), floats, {name: place(x) for name, x in ints.items()}


def communicated(compiled):
    text = compiled.as_text()
    counts = {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES}
    return {name: count for name, count in counts.items() if count}


def copies(compiled, shape):
    """Copies of arrays of a device's part of the bank."""
    size = ",".join(map(str, shape))
    return len(re.findall(rf"= f32\[{size}\]\S* copy\(", compiled.as_text()))


def assert_same(got, wanted, tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, float(np.abs(b).max())))


LAYOUTS = [  # streams over, columns over, collectives of the call and its gradients
    (("data",), None, {}),
    (("data", "model"), None, {}),
    ((None, "data"), None, {}),
    ((("data", "model"),), None, {}),
    ((), "model", {"all-reduce": 1}),
    (("data",), "model", {"all-reduce": 1}),
    ((), ("data", "model"), {"all-reduce": 1}),
]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(("streams", "columns", "collectives"), LAYOUTS, ids=str)
def test_gradients(streams, columns, collectives, kind):
    inputs = make_inputs()
    with cpu_device():
        wanted = gradients()(*inputs)
    mesh = mesh_of(kind=kind)
    with jax.set_mesh(mesh):
        placed = put(mesh, *inputs, streams, columns)
        compiled = gradients().lower(*placed).compile()
        found = compiled(*placed)
    assert communicated(compiled) == collectives
    assert_same(found, wanted, 1e-6)
    d_bank, d_floats = found
    assert d_bank.sharding.is_equivalent_to(placed[0].sharding, d_bank.ndim)
    assert d_floats["v"].sharding.is_equivalent_to(placed[1]["v"].sharding, 4)


@pytest.mark.parametrize("set_mesh", [False, True])
def test_bank_off_the_mesh(set_mesh):
    """Tokens on a mesh of Explicit axes, and a bank that comes from nowhere or from one device."""
    inputs = make_inputs()
    with cpu_device():
        wanted = gradients()(*inputs)
    mesh = mesh_of(kind=AxisType.Explicit)
    with jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
        _, floats, ints = put(mesh, *inputs, ("data",))
        assert_same(gradients()(inputs[0], floats, ints), wanted, 1e-6)
        y, _ = jax.jit(lambda x: sdm_jax.write_read(jnp.zeros_like(inputs[0]), **x))(floats | ints)
    assert y.sharding.is_equivalent_to(floats["v"].sharding, y.ndim)


def test_columns_need_no_communication_forward():
    mesh = mesh_of()
    bank, floats, ints = put(mesh, *make_inputs(), ("data",), "model")
    compiled = jax.jit(lambda *x: sdm_jax.write_read(x[0], **x[1], **x[2])).lower(bank, floats, ints).compile()
    assert communicated(compiled) == {}
    y, new_bank = compiled(bank, floats, ints)
    assert y.sharding.is_equivalent_to(floats["v"].sharding, 4)
    assert new_bank.sharding.is_equivalent_to(bank.sharding, 4)


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
def test_same_bits_as_one_device(implementation):
    """Devices that share no sum compute what one device computes."""
    inputs = make_inputs()
    with cpu_device():
        wanted = gradients(implementation=implementation)(*inputs)
    mesh = mesh_of()
    found = gradients(implementation=implementation)(*put(mesh, *inputs, ("data", "model")))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


def test_donated_bank_is_updated_in_place():
    mesh = mesh_of(("data",), (4,))
    bank, floats, ints = put(mesh, *make_inputs(), ("data",))
    step = jax.jit(lambda *x: sdm_jax.write_read(x[0], **x[1], **x[2], **SETTINGS), donate_argnums=0)
    compiled = step.lower(bank, floats, ints).compile()
    assert copies(compiled, (1, H, S, D)) == 0
    bank = jax.jit(jnp.copy)(bank)  # memory of JAX's own, which can be donated
    before = [shard.data.unsafe_buffer_pointer() for shard in bank.addressable_shards]
    _, new_bank = compiled(bank, floats, ints)
    assert [shard.data.unsafe_buffer_pointer() for shard in new_bank.addressable_shards] == before


def test_scan_over_segments_in_place():
    mesh = mesh_of(("data",), (4,))
    bank, floats, ints = put(mesh, *make_inputs(), ("data",))
    segments = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(B, H, 4, T // 4, -1), 2, 0), floats | ints)

    def step(bank, segment):
        y, bank = sdm_jax.write_read(bank, **segment, **SETTINGS)
        return bank, y

    compiled = jax.jit(lambda b, s: jax.lax.scan(step, b, s), donate_argnums=0).lower(bank, segments).compile()
    assert communicated(compiled) == {}
    assert copies(compiled, (1, H, S, D)) == 0
    wanted = sdm_jax.write_read(np.asarray(bank), **floats, **ints, **SETTINGS)[1]
    np.testing.assert_allclose(compiled(bank, segments)[0], wanted, rtol=0, atol=1e-5)


def learned(parameter, floats, ints):
    """A bank that all of the batch begin with, as in a layer."""
    bank = jnp.broadcast_to(parameter, (floats["v"].shape[0], *parameter.shape))
    y, _ = sdm_jax.write_read(bank, **floats, **ints, **SETTINGS)
    return (y**2).sum()


@pytest.mark.parametrize("kind", ["jit", "grad_of_shard_map", "shard_map_of_grad", "partly_manual"])
def test_gradient_of_a_replicated_bank(kind):
    bank, floats, ints = make_inputs()
    parameter = bank[0]
    gradient = jax.grad(learned, argnums=(0, 1))
    with cpu_device():
        wanted = jax.jit(gradient)(parameter, floats, ints)
    mesh = mesh_of() if kind == "partly_manual" else mesh_of(("data",), (4,))
    specs = (P(), P("data"), P("data"))
    if kind == "jit":
        parameter = jax.device_put(parameter, NamedSharding(mesh, P()))
        _, floats, ints = put(mesh, bank, floats, ints, ("data",))
    elif kind == "grad_of_shard_map":

        def total(*x):
            return jax.lax.psum(learned(*x), "data")

        gradient = jax.grad(jax.shard_map(total, mesh=mesh, in_specs=specs, out_specs=P()), argnums=(0, 1))
    else:
        names = {"axis_names": {"data"}} if kind == "partly_manual" else {}
        gradient = jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=(P(), P("data")), **names)
    compiled = jax.jit(gradient).lower(parameter, floats, ints).compile()
    assert communicated(compiled) == {"all-reduce": 1}
    assert_same(compiled(parameter, floats, ints), wanted, 1e-6)


def test_columns_within_shard_map():
    """Each device has its columns by hand; what the columns share varies over no axis, so gradients are summed."""
    bank, floats, ints = make_inputs()
    with cpu_device():
        wanted = gradients()(bank, floats, ints)
    mesh = mesh_of(("model",), (4,))
    columns = P(None, None, None, "model")
    of_floats = {name: columns if name == "v" else P() for name in floats}

    def total(bank, floats, ints):
        return jax.lax.psum(loss(bank, floats, ints), "model")

    total = jax.shard_map(total, mesh=mesh, in_specs=(columns, of_floats, P()), out_specs=P())
    assert_same(jax.jit(jax.grad(total, argnums=(0, 1)))(bank, floats, ints), wanted, 1e-6)


def test_streams_of_a_shared_bank_stay_together():
    bank, floats, ints = make_inputs(lead=(2, 2))
    bank = bank[:, 0]
    # The streams of one bank name disjoint slots.
    half = np.arange(2)[None, :, None, None]
    ints = {name: np.where(x < 0, x, x % (S // 2) + half * (S // 2)).astype(np.int32) for name, x in ints.items()}
    with cpu_device():
        wanted = gradients(shared_bank=True)(bank, floats, ints)
    mesh = mesh_of()
    placed = put(mesh, bank, floats, ints, ("data",))
    compiled = gradients(shared_bank=True).lower(*placed).compile()
    assert communicated(compiled) == {}
    assert_same(compiled(*placed), wanted, 1e-6)
    _, floats, ints = put(mesh, bank, floats, ints, ("data", "model"))
    assert_same(gradients(shared_bank=True)(placed[0], floats, ints), wanted, 1e-6)


@pytest.mark.parametrize("mode", ["bf16", "fp8", "int4"])
def test_columns_of_other_snapshots(mode):
    """fp8 and int4 rows have one scale, so their columns are brought together first."""
    inputs = make_inputs()
    with cpu_device():
        wanted = gradients(snapshot_quant=mode)(*inputs)
    mesh = mesh_of()
    assert_same(gradients(snapshot_quant=mode)(*put(mesh, *inputs, ("data",), "model")), wanted, 1e-6)


def test_vmap_over_a_sharded_axis():
    bank, floats, ints = make_inputs()
    mesh = mesh_of(("data",), (4,))
    placed = put(mesh, bank, floats, ints, ("data",))
    call = jax.vmap(lambda *x: sdm_jax.write_read(x[0], **x[1], **x[2], **SETTINGS))
    compiled = jax.jit(call).lower(*placed).compile()
    assert communicated(compiled) == {}
    assert_same(compiled(*placed), sdm_jax.write_read(bank, **floats, **ints, **SETTINGS), 1e-6)


@pytest.mark.parametrize("columns", [None, "model"])
def test_decode_step(columns):
    bank, floats, ints = make_inputs()
    floats, ints = jax.tree.map(lambda x: x[..., 0, :], (floats, ints))
    with cpu_device():
        wanted = sdm_jax.decode_step(bank, **floats, **ints)
    mesh = mesh_of()
    placed = put(mesh, bank, floats, ints, ("data",), columns)
    compiled = jax.jit(lambda *x: sdm_jax.decode_step(x[0], **x[1], **x[2])).lower(*placed).compile()
    assert communicated(compiled) == {}
    assert_same(compiled(*placed), wanted, 1e-6)


def test_product_keys():
    scores = np.random.default_rng(0).normal(size=(8, 6, 24)).astype(np.float32)
    mesh = mesh_of(("data",), (4,))
    placed = jax.device_put(scores, NamedSharding(mesh, P("data")))

    def select(scores):
        values, ids = sdm_jax.product_key_topk(scores, (12, 12), 5)
        return jnp.sin(values).sum(), ids

    compiled = jax.jit(jax.value_and_grad(select, has_aux=True)).lower(placed).compile()
    assert communicated(compiled) == {"all-reduce": 1}  # of the sum
    (total, ids), d_scores = compiled(placed)
    (wanted_total, wanted_ids), wanted_d = jax.jit(jax.value_and_grad(select, has_aux=True))(scores)
    np.testing.assert_allclose(total, wanted_total, rtol=1e-5)
    np.testing.assert_array_equal(ids, wanted_ids)
    np.testing.assert_array_equal(d_scores, wanted_d)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_sharded_slots_are_refused(kind):
    bank, floats, ints = make_inputs()
    mesh = mesh_of(kind=kind)
    with jax.set_mesh(mesh):
        bank = jax.device_put(bank, NamedSharding(mesh, P("data", None, "model")))
        with pytest.raises(Exception, match=r"the slots of the bank \(axis 2 .* are sharded over 'model'.*streams"):
            jax.jit(loss)(bank, floats, ints)


def test_streams_that_the_mesh_does_not_divide():
    bank, floats, ints = make_inputs(lead=(6, 2))
    mesh = mesh_of(("data",), (4,))
    sharded = NamedSharding(mesh, P("data"))
    with pytest.raises(ValueError, match=r"axis 0 is partitioned 4 times, but the dimension size is 6"):
        jax.jit(loss, in_shardings=(sharded, sharded, sharded))(bank, floats, ints)
    with pytest.raises(ValueError, match=r"(?s)axis 0.*size 6.*'data'.*size 4"):
        jax.jit(jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=P("data"), out_specs=P("data")))(bank, floats, ints)


def test_first_call_on_another_device():
    code = (
        "import jax, sys, hashlib, numpy as np; sys.path.insert(0, {tests!r})\n"
        "jax.config.update('jax_num_cpu_devices', 2)\n"
        "from test_sharding import gradients, make_inputs\n"
        "with jax.default_device(jax.devices('cpu')[{device}]):\n"
        "    out = jax.tree.leaves(gradients()(*make_inputs()))\n"
        "print(hashlib.sha256(b''.join(np.asarray(x).tobytes() for x in out)).hexdigest())"
    )
    assert len({run_python(code.format(tests=os.path.dirname(__file__), device=i)) for i in (0, 1)}) == 1


def run_python(code, **environment):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment).stdout


@pytest.mark.parametrize("devices", [1, 4])
def test_compilation_cache(devices, tmp_path):
    """A second process compiles nothing again; several devices need one setting for that."""
    code = (
        f"import jax, sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "jax.config.update('jax_num_cpu_devices', 4)\n"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)\n"
        "jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)\n"
        "jax.config.update('jax_remove_custom_partitioning_ptr_from_cache_key', True)\n"
        "from test_sharding import gradients, make_inputs, mesh_of, put\n"
        "hits = []\n"
        "jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))\n"
        f"mesh = mesh_of(('data',), ({devices},))\n"
        "jax.block_until_ready(gradients()(*put(mesh, *make_inputs(), ('data',))))\n"
        "print(sum('cache_misses' in e for e in hits), sum('cache_hits' in e for e in hits))"
    )
    first = run_python(code, JAX_COMPILATION_CACHE_DIR=str(tmp_path)).split()
    second = run_python(code, JAX_COMPILATION_CACHE_DIR=str(tmp_path)).split()
    assert int(first[0]) > 0
    assert second[0] == "0"
    assert int(second[1]) == int(first[0]) + int(first[1])
