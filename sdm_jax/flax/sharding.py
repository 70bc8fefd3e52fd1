"""Where the parameters of a model lie on many devices."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sdm_jax.flax import _settings

# Parameters of `SparseDeltaMemory` that hold something for each head, one head after another: the axis.
_BY_HEAD: dict[tuple[str, ...], int] = {
    ("A_log",): 0,
    ("dt_bias",): 0,
    ("bank",): 0,
    **{(name, "kernel"): 1 for name in ("write_scores", "read_scores", "value", "decay", "strength", "output_gate")},
    **{(name, "bias"): 0 for name in ("write_scores", "read_scores", "value", "decay", "strength", "output_gate")},
    **{(norm, name): 0 for norm in ("write_norm", "read_norm") for name in ("scale", "bias", "mean", "var")},
}


def model_shardings(tree: Any, mesh: Mesh, num_heads: int, axis: str = "model") -> Any:
    """Shardings of a model's parameters, and of what an optimizer keeps for each, over one axis of a mesh.

    The memory's heads are split over the axis: banks, and the projections that make a head's operands. Where the axis
    does not divide the heads, the columns of the banks are split instead. All other parameters, and all that neither
    fits, are on every device.

    Arguments:
        tree: parameters of `SparseDeltaMemory` or `LanguageModel`, or any pytree that holds such ones: arrays or
            shapes.
        mesh: the devices.
        num_heads: heads of the memory.
        axis: the axis of the mesh.

    Returns:
        The tree, a `jax.sharding.NamedSharding` for each array.

    Raises:
        TypeError: `mesh` is no mesh, or `num_heads` no integer.
        ValueError: the mesh has no such axis, or `num_heads` is below 1.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    num_heads = _settings.integer("num_heads", num_heads, 1)
    if axis not in mesh.shape:
        raise ValueError(f"axis must be one of the mesh's {mesh.axis_names}, got {axis!r}")
    size = mesh.shape[axis]
    heads = num_heads % size == 0

    def sharding(path, x):
        names = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        dimension = _BY_HEAD.get(names[-1:], _BY_HEAD.get(names[-2:]))
        if dimension is not None and not heads:
            dimension = 1 if names[-1:] == ("bank",) else None
        if dimension is None or x.shape[dimension] % size:
            return NamedSharding(mesh, PartitionSpec())
        return NamedSharding(mesh, PartitionSpec(*[None] * dimension, axis))

    return jax.tree_util.tree_map_with_path(sharding, tree)
