"""Import of the published PyTorch layer's parameters, and the way back."""

import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.flax import save_file

from sdm_jax.flax import SparseDeltaMemory, from_torch_state_dict, to_torch_state_dict

DIM, HEADS, SLOTS, COLUMNS = 12, 2, 36, 2 * 12
WIDTH = DIM // HEADS
PROJECTIONS = ("Wq_read", "Wk_write", "Wv_write", "Wo", "Wog", "a_proj", "b_proj")


def make(seed=0, **settings):
    settings = {"query_batchnorm": True, "use_bias": True} | settings
    return SparseDeltaMemory(
        DIM, num_heads=HEADS, slots_per_head=SLOTS, num_writes=4, num_reads=4, rngs=nnx.Rngs(seed), **settings
    )


def published(bias=True):
    """Arrays by the names and shapes that PyTorch gives them: weights are `[out, in]`."""
    rng = np.random.default_rng(0)
    projections = {"Wq_read": COLUMNS, "Wk_write": COLUMNS, "Wv_write": DIM, "Wo": DIM, "Wog": DIM}
    shapes = {f"{name}.weight": (out, DIM) for name, out in {**projections, "a_proj": HEADS, "b_proj": HEADS}.items()}
    if bias:
        shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items()}
    shapes |= {"A_log": (HEADS,), "dt_bias": (HEADS,), "memory": (HEADS * SLOTS, WIDTH)}
    shapes |= {"readings_norm.weight": (WIDTH,), "readings_norm.bias": (WIDTH,)}
    for norm in ("query_bn", "key_bn"):
        shapes |= {f"{norm}.{part}": (COLUMNS,) for part in ("weight", "bias", "running_mean", "running_var")}
    tensors = {name: rng.random(shape, np.float32) for name, shape in shapes.items()}
    return tensors | {f"{norm}.num_batches_tracked": np.zeros((), np.int64) for norm in ("query_bn", "key_bn")}


def test_names():
    layer, tensors = make(), published()
    before = jax.tree.map(np.array, nnx.state(layer))
    state = from_torch_state_dict(layer, tensors)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(layer), before)
    nnx.update(layer, state)
    for variable, name in [
        (layer.read_scores.kernel, "Wq_read.weight"),
        (layer.write_scores.kernel, "Wk_write.weight"),
        (layer.value.kernel, "Wv_write.weight"),
        (layer.output.kernel, "Wo.weight"),
        (layer.output_gate.kernel, "Wog.weight"),
        (layer.decay.kernel, "a_proj.weight"),
        (layer.strength.kernel, "b_proj.weight"),
        (layer.strength.bias, "b_proj.bias"),
        (layer.A_log, "A_log"),
        (layer.dt_bias, "dt_bias"),
        (layer.bank, "memory"),
        (layer.readings_norm.scale, "readings_norm.weight"),
        (layer.readings_norm.bias, "readings_norm.bias"),
        (layer.read_norm.scale, "query_bn.weight"),
        (layer.read_norm.var, "query_bn.running_var"),
        (layer.write_norm.mean, "key_bn.running_mean"),
    ]:
        want = tensors[name].T if name.split(".")[0] in PROJECTIONS else tensors[name]
        np.testing.assert_array_equal(variable[...], want, err_msg=name)
    x = jax.random.normal(jax.random.key(1), (2, 20, DIM))
    layer.eval()
    assert np.isfinite(layer(x)[0]).all()


def test_and_back():
    tensors = published()
    layer = make()
    nnx.update(layer, from_torch_state_dict(layer, tensors))
    back = to_torch_state_dict(layer)
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(back[name], value)
        assert back[name].dtype == value.dtype
        assert back[name].flags.c_contiguous


@pytest.mark.parametrize(
    "settings",
    [{"use_bias": False}, {"query_batchnorm": False, "output_gate": False}, {"learned_bank": False}],
    ids=str,
)
def test_only_what_the_layer_has(settings):
    one, other = make(**settings), make(seed=1, **settings)
    tensors = to_torch_state_dict(one, "memory.")
    assert len(tensors) < len(published())
    state = from_torch_state_dict(other, {**tensors, "embedding.weight": np.zeros(3)}, prefix="memory.")
    jax.tree.map(np.testing.assert_array_equal, state, nnx.state(one))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_safetensors(tmp_path, dtype):
    tensors = {name: jnp.asarray(x, dtype) for name, x in published().items() if x.ndim}
    save_file(tensors, tmp_path / "layer.safetensors")
    state = from_torch_state_dict(make(param_dtype=dtype), tmp_path / "layer.safetensors")
    np.testing.assert_array_equal(state["bank"][...], tensors["memory"])
    assert state["bank"].dtype == dtype
    bare = {name.removesuffix(".weight") if name[0] == "W" else name: x for name, x in tensors.items()}
    other = from_torch_state_dict(make(param_dtype=dtype), bare)
    jax.tree.map(np.testing.assert_array_equal, state, other)
    exported = to_torch_state_dict(make(param_dtype=dtype))
    assert {x.dtype.name for x in exported.values()} == {"float32", "int64"}


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
def test_torch_file(tmp_path):
    import torch

    tensors = published()
    torch.save({name: torch.from_numpy(x) for name, x in tensors.items()}, tmp_path / "layer.pt")
    state = from_torch_state_dict(make(), tmp_path / "layer.pt")
    np.testing.assert_array_equal(state["bank"][...], tensors["memory"])
    (tmp_path / "damaged.pt").write_bytes(b"not tensors")
    with pytest.raises(OSError, match=r"damaged.pt is no readable PyTorch file"):
        from_torch_state_dict(make(), tmp_path / "damaged.pt")


def test_abstract_layer():
    tensors = published()
    layer = nnx.eval_shape(make)
    with pytest.raises(TypeError, match=r"layer must hold arrays, but read_scores\.kernel is abstract"):
        to_torch_state_dict(layer)
    state = from_torch_state_dict(layer, tensors)
    jax.tree.map(np.testing.assert_array_equal, state, from_torch_state_dict(make(), tensors))
    nnx.update(layer, state)
    np.testing.assert_array_equal(to_torch_state_dict(layer)["memory"], tensors["memory"])


def test_every_mismatch_has_a_line():
    tensors = published()
    del tensors["dt_bias"]
    tensors["memory"] = tensors["memory"].reshape(HEADS, SLOTS, WIDTH)
    tensors["Wv_write.weight"] = tensors["Wv_write.weight"][:5]
    tensors["short_conv.weight"] = np.zeros(4)
    with pytest.raises(ValueError, match="the tensors do not fit the layer") as error:
        from_torch_state_dict(make(), {f"mix.{name}": x for name, x in tensors.items()}, "mix.")
    assert sorted(str(error.value).splitlines()[1:]) == [
        "  mix.Wv_write.weight must be (12, 12) for value.kernel, got (5, 12)",
        "  mix.dt_bias is missing: the layer has dt_bias",
        "  mix.memory must be (72, 6) for bank, got (2, 36, 6)",
        "  mix.short_conv.weight is left over: the layer has no such parameter",
    ]


def test_what_cannot_be_read(tmp_path, monkeypatch):
    (tmp_path / "layer.safetensors").write_bytes(b"not tensors")
    (tmp_path / "layer.pt").write_bytes(b"")
    (tmp_path / "folder.safetensors").mkdir()
    monkeypatch.setitem(sys.modules, "torch", None)
    for tensors, error, message in [
        (tmp_path / "layer.safetensors", OSError, "is no readable .safetensors file"),
        (tmp_path / "none.safetensors", OSError, "none.safetensors"),
        (tmp_path / "layer.npz", ValueError, "must be a .safetensors, .pt, .pth or .bin file"),
        (tmp_path / "layer.pt", ImportError, "needs PyTorch, which is not installed"),
        (tmp_path / "folder.safetensors", IsADirectoryError, "folder.safetensors must be a file, but is a directory"),
        ({1: 2}, TypeError, "tensors must be named by strings, got the name 1"),
        (3, TypeError, "tensors must be a mapping or a path, got int"),
        ({**published(), "memory": np.zeros(3, int)}, TypeError, "memory must be floating point, got int64"),
    ]:
        with pytest.raises(error, match=message):
            from_torch_state_dict(make(), tensors)
    for function in (from_torch_state_dict, to_torch_state_dict):
        with pytest.raises(TypeError, match="layer must be a SparseDeltaMemory, got dict"):
            function({}, {})
