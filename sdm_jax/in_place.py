"""Gradients of a training step whose bank stays in one buffer from beginning to end."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from sdm_jax.write_read import CallSettings, backward_with_bank, forward_with_residuals


def value_and_grad_inplace(
    loss_fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Like `jax.value_and_grad`, but the bank travels through the step and back without a copy.

    A differentiated `write_read` keeps its new bank for the backward, which restores the initial bank in it. Where
    calls are chained, or the bank is an argument of the step, `jax.grad` has to copy the bank for that. Here the bank
    goes through the calls of `loss_fn` one after another, comes back from their backward in the reverse order, and is
    returned as it came in, bit for bit. Under `jax.jit` with the bank donated no copy of a bank's size is made
    (sections 4 and 5 of the specification).

    **Arguments:**

    - `loss_fn`: `loss_fn(bank, *args, **kwargs) -> (loss, bank)`, or `((loss, aux), bank)` with `has_aux`. It hands
      its bank from one `sdm_jax.write_read` to the next, any number of them, and returns the last one's; nothing else
      may read it. `jax.jit` within is fine; other control flow around those calls is not.
    - `argnums`: of `loss_fn`, one or more, 0 being the bank; what to differentiate with respect to.
    - `has_aux`: whether `loss_fn` returns more than the loss.

    **Returns:** a function `(bank, *args, **kwargs) -> (loss, bank, grads)`, or `((loss, aux), bank, grads)`: the loss
    (a scalar), the initial bank, and the gradients, shaped as `jax.value_and_grad` gives them.

    **Raises:** while tracing, TypeError or ValueError where `loss_fn` or `argnums` do not fit, where the bank is read
    twice, dropped, or read by anything but `write_read`, and where a call keeps rounded snapshots, which could not
    restore the bank.
    """
    single = not isinstance(argnums, Sequence)
    try:
        numbers = [operator.index(argnums)] if single else [operator.index(n) for n in argnums]  # type: ignore
    except TypeError:
        raise TypeError(f"argnums must be an integer or a sequence of integers, got {argnums!r}") from None

    @functools.wraps(loss_fn)
    def value_and_grad(bank, *args, **kwargs):
        bank = jnp.asarray(bank)
        if not jnp.issubdtype(bank.dtype, jnp.floating):
            raise TypeError(f"bank must be an array of floating-point numbers, got {bank.dtype}")
        count = 1 + len(args)
        for n in numbers:
            if not -count <= n < count:
                raise ValueError(f"argnums {n} is out of range: there are {count} positional arguments")
        chosen = [n % count for n in numbers]

        leaves, tree = jax.tree.flatten((args, kwargs))
        # The argument of each leaf; None for keyword arguments.
        owners: list[int | None] = [n for n, x in enumerate(args, 1) for _ in jax.tree.leaves(x)]
        owners += [None] * (len(leaves) - len(owners))
        # Python numbers stay what they are where they are not differentiated.
        arrays = (jax.Array, np.ndarray, np.generic)
        traced = [
            i
            for i, (x, n) in enumerate(zip(leaves, owners, strict=True))
            if isinstance(x, arrays) or (n in chosen and isinstance(x, (float, int)))
        ]

        def of_leaves(bank, *values):
            filled = list(leaves)
            for i, x in zip(traced, values, strict=True):
                filled[i] = x
            args, kwargs = jax.tree.unflatten(tree, filled)
            return loss_fn(bank, *args, **kwargs)

        values = [leaves[i] for i in traced]
        jaxpr, shapes = jax.make_jaxpr(of_leaves, return_shape=True)(bank, *values)
        _check_results(shapes, bank, has_aux)

        # Positions among `values` of the leaves of each chosen argument.
        owner = [owners[i] for i in traced]
        wanted = sorted({i for i, n in enumerate(owner) if n in chosen})
        for i in wanted:
            if not jnp.issubdtype(jnp.result_type(values[i]), jnp.floating):
                raise TypeError(
                    f"argument {owner[i]} holds {jnp.result_type(values[i])} values; only floating-point ones can be "
                    "differentiated"
                )

        def forward(bank, track, *floats):
            filled = list(values)
            for i, x in zip(wanted, floats, strict=True):
                filled[i] = x
            outs, track, (position,) = _follow(jaxpr.jaxpr, jaxpr.consts, [bank, *filled], 0, track)
            if position != len(outs) - 1:
                raise ValueError("loss_fn must return (loss, bank) with the bank of its last write_read")
            loss, *aux, new_bank = outs
            return (loss, track), (aux, new_bank)

        # The value of `track` means nothing: what matters is its cotangent, in which the bank comes back.
        (loss, _), vjp, (aux, new_bank) = jax.vjp(
            forward, bank, bank, *(jnp.asarray(values[i]) for i in wanted), has_aux=True
        )
        d_bank, restored, *d_values = vjp((jnp.ones_like(loss), new_bank))

        found = dict(zip(wanted, d_values, strict=True))
        grads = []
        for n in chosen:
            if n == 0:
                grads.append(d_bank)
                continue
            structure = jax.tree.structure(args[n - 1])
            grads.append(jax.tree.unflatten(structure, [found[i] for i, own in enumerate(owner) if own == n]))
        if has_aux:
            loss = (loss, jax.tree.unflatten(jax.tree.structure(shapes[0][1]), aux))
        return loss, restored, grads[0] if single else tuple(grads)

    return value_and_grad


def _check_results(shapes, bank, has_aux):
    form = "((loss, aux), bank)" if has_aux else "(loss, bank)"
    fits = isinstance(shapes, tuple) and len(shapes) == 2
    if fits and has_aux:
        fits = isinstance(shapes[0], tuple) and len(shapes[0]) == 2
    if not fits:
        raise TypeError(f"loss_fn must return {form}, got {jax.tree.map(lambda x: x.shape, shapes)}")
    loss = shapes[0][0] if has_aux else shapes[0]
    if getattr(loss, "shape", None) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(f"loss_fn must return {form} with a floating-point scalar as the loss, got {loss}")
    new_bank = shapes[1]
    if getattr(new_bank, "shape", None) != bank.shape or new_bank.dtype != bank.dtype:
        raise TypeError(f"loss_fn must return {form} with a bank {bank.shape} {bank.dtype}, got {new_bank}")


# ---- a call whose bank comes back through the cotangent of `track`


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _advance(settings: CallSettings, bank, track, *tokens):
    y, new_bank = forward_with_residuals(settings, bank, *tokens, save=False)[0]
    return y, new_bank, track


def _advance_fwd(settings: CallSettings, bank, track, *tokens):
    (y, new_bank), (_, *saved) = forward_with_residuals(settings, bank, *tokens, save=True)
    return (y, new_bank, track), saved  # without the new bank


def _advance_bwd(settings: CallSettings, saved, cotangents):
    dy, d_new_bank, new_bank = cotangents
    restored, (d_bank, *d_tokens) = backward_with_bank(settings, (new_bank, *saved), (dy, d_new_bank))
    return d_bank, restored, *d_tokens


_advance.defvjp(_advance_fwd, _advance_bwd)


# ---- following the bank through a program


class _Use(NamedTuple):
    """Where the bank goes next: an equation, or the results."""

    equation: Any
    positions: list[int]


def _uses(jaxpr, variable) -> list[_Use]:
    def positions(variables):
        return [i for i, x in enumerate(variables) if x is variable]

    uses = [_Use(e, positions(e.invars)) for e in jaxpr.eqns]
    uses.append(_Use(None, positions(jaxpr.outvars)))
    return [use for use in uses if use.positions]


def _only_use(jaxpr, variable) -> _Use:
    uses = _uses(jaxpr, variable)
    if not uses:
        raise ValueError(
            "loss_fn drops its bank: each bank must go to the next write_read, and the last must be returned"
        )
    if len(uses) > 1 or len(uses[0].positions) > 1:
        readers = ", ".join("the results" if use.equation is None else use.equation.primitive.name for use in uses)
        raise ValueError(
            f"loss_fn uses one bank more than once (in {readers}): where banks fork there is no place to keep both. "
            "Use jax.value_and_grad, which copies the bank"
        )
    return uses[0]


def _settings_of(equation) -> CallSettings | None:
    """Those of the `write_read` that an equation is, if it is one."""
    if equation.primitive.name != "custom_vjp_call":
        return None
    inner = equation.params["call_jaxpr"]
    calls = [e for e in getattr(inner, "jaxpr", inner).eqns if e.primitive.name == "sdm_forward"]
    if len(calls) != 1:
        return None
    if [x.aval.shape for x in calls[0].invars] != [x.aval.shape for x in equation.invars]:
        return None  # its batch axes are put in place within
    return calls[0].params["note"]


def _follow(jaxpr, consts, args, bank_index, track):
    """Evaluates a program, its `write_read`s of the bank with `track` beside it.

    Returns its results, the last `track`, and the positions of the last bank among the results.
    """
    values: dict[Any, Any] = {}

    def read(x):
        return x.val if isinstance(x, Literal) else values[x]

    values |= zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True)
    bank = jaxpr.invars[bank_index]
    use = _only_use(jaxpr, bank)
    for equation in jaxpr.eqns:
        operands = [read(x) for x in equation.invars]
        with equation.ctx.manager:
            if equation is use.equation:
                results, track, position = _through(equation, operands, use.positions[0], track)
                bank = equation.outvars[position]
                use = _only_use(jaxpr, bank)
            else:
                results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
                results = results if equation.primitive.multiple_results else [results]
        values |= zip(equation.outvars, results, strict=True)
    return [read(x) for x in jaxpr.outvars], track, use.positions


def _through(equation, operands, position, track):
    """The equation that takes the bank, at `position` of its operands."""
    settings = _settings_of(equation)
    if settings is not None and position == 0:
        if settings.snapshot_quant != "none":
            raise ValueError(
                f"snapshot_quant={settings.snapshot_quant!r} rounds the rows that restore the bank; "
                "value_and_grad_inplace needs 'none'"
            )
        bank, *tokens = operands
        y, bank, track = _advance(settings, bank, track, *tokens)
        return [y, bank], track, 1
    if equation.primitive.name in ("jit", "pjit", "closed_call"):
        inner = equation.params["jaxpr" if "jaxpr" in equation.params else "call_jaxpr"]
        consts = getattr(inner, "consts", [])
        results, track, (found,) = _follow(getattr(inner, "jaxpr", inner), consts, operands, position, track)
        return results, track, found
    raise ValueError(
        f"loss_fn hands its bank to {equation.primitive.name}; value_and_grad_inplace can follow it through write_read "
        "(not 'reference') and jax.jit only. Use jax.value_and_grad for other control flow, and for other readers"
    )
