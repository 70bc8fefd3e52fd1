"""Parameters of the layer under the names of the published PyTorch layer, in both directions (section 6)."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sdm_jax.flax.layer import SparseDeltaMemory


class _Entry(NamedTuple):
    """One array of the layer: where it is there, and its name in PyTorch."""

    path: tuple[str, ...]
    name: str
    transposed: bool = False  # PyTorch's weights are [out, in]


_PROJECTIONS = {
    "read_scores": "Wq_read",
    "write_scores": "Wk_write",
    "value": "Wv_write",
    "output": "Wo",
    "output_gate": "Wog",
    "decay": "a_proj",
    "strength": "b_proj",
}
_NORMS = {"readings_norm": "readings_norm", "read_norm": "query_bn", "write_norm": "key_bn"}
_ENTRIES = (
    *(_Entry((ours, "kernel"), f"{theirs}.weight", True) for ours, theirs in _PROJECTIONS.items()),
    *(_Entry((ours, "bias"), f"{theirs}.bias") for ours, theirs in _PROJECTIONS.items()),
    *(
        _Entry((ours, part), f"{theirs}.{name}")
        for ours, theirs in _NORMS.items()
        for part, name in (("scale", "weight"), ("bias", "bias"), ("mean", "running_mean"), ("var", "running_var"))
    ),
    _Entry(("A_log",), "A_log"),
    _Entry(("dt_bias",), "dt_bias"),
    _Entry(("bank",), "memory"),
)
_COUNTER = "num_batches_tracked"  # of PyTorch's BatchNorm, which nothing here needs


def from_torch_state_dict(
    layer: SparseDeltaMemory, tensors: Mapping[str, Any] | str | Path, prefix: str = ""
) -> nnx.State:
    """The state of `layer` with the arrays of a PyTorch checkpoint of the published layer (section 6).

    `nnx.update(layer, from_torch_state_dict(layer, "layer.safetensors"))` takes it over.

    Arguments:
        layer: a layer with the checkpoint's settings, or an abstract one, as `nnx.eval_shape` gives. It is not
            changed.
        tensors: arrays or tensors by their names, or the path of a `.safetensors` file or of a file that
            `torch.save` wrote (`.pt`, `.pth`, `.bin`; needs PyTorch).
        prefix: what the names of this layer begin with, such as `"layers.3.memory."`; others are left out.

    Returns:
        The state, in the layer's dtypes and shardings. A weight may be named with or without `.weight`.

    Raises:
        TypeError, OSError, ImportError: the tensors cannot be read.
        ValueError: tensors are missing, left over, or of another shape; a line for each.
    """
    if not isinstance(layer, SparseDeltaMemory):
        raise TypeError(f"layer must be a SparseDeltaMemory, got {type(layer).__name__}")
    tensors = _read(tensors)
    for name in tensors:
        if not isinstance(name, str):
            raise TypeError(f"tensors must be named by strings, got the name {name!r}")
    named = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    state = nnx.state(nnx.clone(layer))
    wrong = []
    for entry, variable in _present(state):
        name = entry.name
        if name not in named and name.endswith(".weight") and name.removesuffix(".weight") in named:
            name = name.removesuffix(".weight")
        if name not in named:
            wrong.append(f"{prefix}{entry.name} is missing: the layer has {'.'.join(entry.path)}")
            continue
        value = _as_array(f"{prefix}{name}", named.pop(name))
        shape = variable.shape[::-1] if entry.transposed else variable.shape
        if value.shape != shape:
            wrong.append(f"{prefix}{name} must be {shape} for {'.'.join(entry.path)}, got {value.shape}")
            continue
        array = jnp.asarray(value.T if entry.transposed else value, variable.dtype)
        variable.set_value(jax.device_put(array, variable.get_value().sharding))
    wrong += [
        f"{prefix}{name} is left over: the layer has no such parameter" for name in named if not name.endswith(_COUNTER)
    ]
    if wrong:
        raise ValueError("the tensors do not fit the layer:\n  " + "\n  ".join(wrong))
    return state


def to_torch_state_dict(layer: SparseDeltaMemory, prefix: str = "") -> dict[str, np.ndarray]:
    """The arrays of `layer` by the names of the published PyTorch layer: the way back of `from_torch_state_dict`.

    They are contiguous NumPy arrays, as `safetensors.numpy.save_file` and `torch.from_numpy` take them; bfloat16 ones,
    which PyTorch cannot take from NumPy, come as float32.

    Raises:
        TypeError: `layer` is no layer, or an abstract one.
    """
    if not isinstance(layer, SparseDeltaMemory):
        raise TypeError(f"layer must be a SparseDeltaMemory, got {type(layer).__name__}")
    tensors = {}
    for entry, variable in _present(nnx.state(layer)):
        value = variable.get_value()
        if isinstance(value, jax.ShapeDtypeStruct):
            raise TypeError(f"layer must hold arrays, but {'.'.join(entry.path)} is abstract, {value}")
        value = np.asarray(value)
        if value.dtype == jnp.bfloat16:
            value = value.astype(np.float32)
        tensors[prefix + entry.name] = np.ascontiguousarray(value.T if entry.transposed else value)
        if entry.path[-1] == "var":
            tensors[prefix + entry.name.replace("running_var", _COUNTER)] = np.zeros((), np.int64)
    return tensors


def _present(state: nnx.State) -> list[tuple[_Entry, Any]]:
    """The entries that the layer has, each with its variable."""
    variables = dict(nnx.to_flat_state(state))
    return [(entry, variables[entry.path]) for entry in _ENTRIES if entry.path in variables]


def _read(tensors) -> Mapping[str, Any]:
    if isinstance(tensors, Mapping):
        return tensors
    if not isinstance(tensors, str | Path):
        raise TypeError(f"tensors must be a mapping or a path, got {type(tensors).__name__}")
    path = Path(tensors)
    if path.is_dir():
        raise IsADirectoryError(f"{path} must be a file, but is a directory")
    if path.suffix == ".safetensors":
        try:
            from safetensors import SafetensorError
            from safetensors.flax import load_file
        except ImportError:
            raise ImportError("reading .safetensors needs safetensors: pip install 'sdm_jax[flax]'") from None
        try:
            return load_file(path)
        except SafetensorError as error:
            raise OSError(f"{path} is no readable .safetensors file: {error}") from None
    if path.suffix in (".pt", ".pth", ".bin"):
        try:
            import torch
        except ImportError:
            raise ImportError(f"reading {path} needs PyTorch, which is not installed: pip install torch") from None
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise OSError(f"{path} is no readable PyTorch file: {error}") from None
        if not isinstance(loaded, Mapping):
            raise TypeError(f"{path} must hold a state dict, got {type(loaded).__name__}")
        return loaded
    raise ValueError(f"{path} must be a .safetensors, .pt, .pth or .bin file")


def _as_array(name: str, value: Any) -> np.ndarray:
    if hasattr(value, "detach"):  # a tensor; NumPy has no bfloat16 of PyTorch's
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() and value.element_size() < 4 else value
    array = np.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating point, got {array.dtype}")
    return array
