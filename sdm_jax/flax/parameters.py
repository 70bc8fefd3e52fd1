"""Kinds of parameters: which of them weight decay is for, and how many there are of each."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from flax import nnx

_NOT_DECAYED = ("A_log", "dt_bias", "bank", "bias", "scale")


class BankParam(nnx.Param):
    """The learned initial bank: most of the parameters, of which a token touches few."""


class GateParam(nnx.Param):
    """A parameter of the forget gate (`A_log`, `dt_bias`), which weight decay would push to a meaningless value."""


class ParameterCount(NamedTuple):
    """Numbers of parameters."""

    active: int
    """Those that every token passes through."""
    bank: int
    """Those of initial banks, of which a token touches a few rows."""


def count_parameters(node: Any) -> ParameterCount:
    """Counts the parameters of a module or its state, those of initial banks apart; a TypeError for anything else."""
    if not isinstance(node, nnx.Module | nnx.State):
        raise TypeError(f"node must be an nnx.Module or nnx.State, got {type(node).__name__}")
    params = node if isinstance(node, nnx.State) else nnx.state(node)
    banks, others, _ = nnx.split_state(params, BankParam, nnx.Param, ...)
    return ParameterCount(*(sum(x.size for x in jax.tree.leaves(part)) for part in (others, banks)))


def weight_decay_mask(params: Any) -> Any:
    """A mask for `optax.adamw(..., mask=weight_decay_mask)`: True for the matrices that every token passes through.

    False for parameters of the forget gate (`GateParam`: `A_log`, `dt_bias`), for initial banks (`BankParam`:
    decay would act on all rows, and a batch touches few), for biases and scales of norms, and for all with fewer than
    two axes. Names decide as well as kinds, so that layers stacked by `nnx.vmap` and trees of bare arrays are served.

    Arguments:
        params: a tree of parameters by their names: `nnx.state(model, nnx.Param)`, or a pure one, as
            `nnx.to_pure_dict` gives and `nnx.Optimizer` passes.

    Returns:
        The same pytree with a bool for each array.
    """

    def decays(path, variable):
        key = path[-1] if path else None
        name = getattr(key, "key", getattr(key, "name", None))  # of a dict's entry or a module's attribute
        return variable.ndim >= 2 and not isinstance(variable, BankParam | GateParam) and name not in _NOT_DECAYED

    return jax.tree_util.tree_map_with_path(decays, params, is_leaf=lambda node: isinstance(node, nnx.Variable))
