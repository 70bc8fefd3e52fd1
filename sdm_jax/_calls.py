"""The primitives of the package: one for each custom call, with the shapes of its results.

The operands and results of a custom call are those of its handler in ffi/handlers.h, in the same order;
extra results are workspaces. Registration needs no backend.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdm_jax import _cuda_calls, _layout, _xla, _xla_product_key
from sdm_jax._layout import Chunks, Saved, Sizes, accumulate_dtype
from sdm_jax._primitive import define, has_cuda_module

try:
    from sdm_jax import _cpu  # type: ignore[attr-defined]
except ImportError as error:
    raise ImportError(
        "sdm_jax was imported without its compiled module, as from a source tree that was not built. Install it with "
        "`pip install -e .` there, or with `pip install .` and import it from another folder."
    ) from error

_ISAS = ("baseline", "avx2", "avx512")
if (_asked := os.environ.get("SDM_CPU_ISA", _ISAS[0])) not in _ISAS:
    raise ValueError(f"the environment variable SDM_CPU_ISA is {_asked!r}, needs to be one of {', '.join(_ISAS)}")
_targets = {"cpu": _cpu.targets()}
if has_cuda_module():
    from sdm_jax import _cuda  # type: ignore[attr-defined]

    _targets["CUDA"] = _cuda.targets()
for _platform, _handlers in _targets.items():
    for _name, _handler in _handlers.items():
        jax.ffi.register_ffi_target(_name, _handler, platform=_platform)


def target_names() -> tuple[str, ...]:
    """Names of all custom calls, for `jax.export.DisabledSafetyCheck.custom_call`."""
    return tuple(sorted(set().union(*_targets.values())))


def _struct(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def _like(x: Any) -> jax.ShapeDtypeStruct:
    return _struct(x.shape, x.dtype)


def _call(
    target: str,
    results: Sequence[Any],
    operands: Sequence[Any],
    aliases: dict[int, int] | None = None,
    **attributes,
):
    if aliases is None:
        return jax.ffi.ffi_call(target, list(results))(*operands, **attributes)
    operands = _cuda_calls.apart(operands, aliases)
    emit = jax.ffi.ffi_call(target, list(results), input_output_aliases=aliases)
    return _cuda_calls.apart(list(emit(*operands, **attributes)), aliases.values())


# Axes of the fields of Chunks (see _sharding.py).
_CHUNKS_AXES = "ncc ncc tw tw tr nu nu ne nu nv nv ne t"


def _with_whole_rows(axes: str, snapshot_quant: str) -> str:
    """With no columns apart where a snapshot row needs them all, for its scale."""
    return axes.replace("d", "x") if _layout.has_scales(snapshot_quant) else axes


# ---- the steps one by one


def _phase1_sizes(k_idx, g, q_idx, chunk, num_slots):
    lead, tokens = k_idx.shape[:-2], k_idx.shape[-2]
    return Sizes(
        bank_lead=lead,
        lead=lead,
        num_tokens=tokens,
        num_slots=num_slots,
        width=0,
        num_writes=k_idx.shape[-1],
        num_reads=q_idx.shape[-1],
        gates=g.shape[-1],
        chunk=chunk,
    )


def phase1_results(k_idx, k_val, g, q_idx, q_val, *, chunk, num_slots):
    return _layout.chunks_struct(_phase1_sizes(k_idx, g, q_idx, chunk, num_slots), g.dtype)


phase1 = define(
    "sdm_phase1",
    phase1_results,
    cpu=lambda *x, **params: _call("sdm_phase1", phase1_results(*x, **params), x, **params),
    xla=lambda *x, platform, **params: _xla.phase1(*x, **params),
    axes=f"tw tw tg tr tr -> {_CHUNKS_AXES}",
)


def _solve_results(a, qk, beta, writes):
    return _like(a), _like(a)


solve = define(
    "sdm_solve",
    _solve_results,
    cpu=lambda *x: _call("sdm_solve", _solve_results(*x), x),
    xla=lambda *x, platform: _xla.solve(*x),
    axes="ncc ncc tg t -> ncc ncc",
)


def _gather_results(bank, k_idx, k_eff, q_idx, q_eff):
    row = _struct((*k_idx.shape[:-1], bank.shape[-1]), k_eff.dtype)
    return row, row


gather = define(
    "sdm_gather",
    _gather_results,
    cpu=lambda *x: _call("sdm_gather", _gather_results(*x), x),
    xla=lambda *x, platform: _xla.gather(*x),
    axes="sd tw tw tr tr -> td td",
)


def _take_snapshot_results(bank, slots, *, snapshot_quant):
    row, dtype, scaled = _layout.snapshot_row(snapshot_quant, bank.dtype, bank.shape[-1])
    lead, count = slots.shape[:-1], slots.shape[-1]
    return _struct((*slots.shape, row), dtype), _struct((*lead, count if scaled else 0), jnp.float32)


take_snapshot = define(
    "sdm_take_snapshot",
    _take_snapshot_results,
    cpu=lambda *x, **params: _call("sdm_take_snapshot", _take_snapshot_results(*x, **params), x, **params),
    xla=lambda *x, platform, snapshot_quant: _xla.take_snapshot(*x, mode=snapshot_quant),
    axes=lambda snapshot_quant: _with_whole_rows("sd u -> ud u", snapshot_quant),
)


def _dual_matmul_results(x, qx, beta, writes, v, retrieved, inter):
    return _like(retrieved), _like(retrieved), _like(v)


dual_matmul = define(
    "sdm_dual_matmul",
    _dual_matmul_results,
    # The last result is a workspace.
    cpu=lambda *x: _call("sdm_dual_matmul", (*_dual_matmul_results(*x), _like(x[5])), x)[:-1],
    xla=lambda *x, platform: _xla.dual_matmul(*x),
    axes="cc cc tg t td td td -> td td td",
)


def _mover_results(bank, slots, starts, order, k_carry, decay, delta):
    return (_like(bank),)


mover = define(
    "sdm_mover",
    _mover_results,
    cpu=lambda *x: _call("sdm_mover", _mover_results(*x), x, {0: 0}),
    xla=lambda *x, platform: (_xla.mover(*x),),
    axes="sd u u e tw u td -> sd",
)


def _gather_gradient_results(d_bank, k_idx, k_carry):
    return (_struct((*k_idx.shape[:-1], d_bank.shape[-1]), k_carry.dtype),)


gather_gradient = define(
    "sdm_gather_gradient",
    _gather_gradient_results,
    cpu=lambda *x: _call("sdm_gather_gradient", _gather_gradient_results(*x), x),
    xla=lambda *x, platform: (_xla.gather_gradient(*x),),
    axes="sd tw tw -> td",
)


def _du_matmul_results(a, qk, x, beta, writes, dy, carried, error, delta):
    return _like(carried), _like(beta), _like(a), _like(a)


def _du_matmul_cpu(*x):
    # `carried` becomes a workspace, the first result.
    return _call("sdm_du_matmul", (_like(x[6]), *_du_matmul_results(*x)), x, {6: 0})[1:]


def _du_matmul_cuda(*x):
    # The last result is a workspace too.
    return _call("sdm_du_matmul", (_like(x[6]), *_du_matmul_results(*x), _like(x[1])), x, {6: 0})[1:-1]


du_matmul = define(
    "sdm_du_matmul",
    _du_matmul_results,
    cpu=_du_matmul_cpu,
    cuda=_du_matmul_cuda,
    xla=lambda *x, platform: _xla.du_matmul(*x),
    axes="cc cc cc tg t td td td td -> td +tg +cc +cc",
)


def _write_mover_results(
    bank, d_bank, slots, starts, order, decay, k_eff, snapshot, scale, delta, dv, *, snapshot_quant
):
    return _like(bank), _like(d_bank), _like(k_eff), _like(k_eff), _like(decay)


write_mover_backward = define(
    "sdm_write_mover",
    _write_mover_results,
    cpu=lambda *x, **params: _call("sdm_write_mover", _write_mover_results(*x, **params), x, {0: 0, 1: 1}, **params),
    xla=lambda *x, platform, snapshot_quant: _xla.write_mover_backward(*x, mode=snapshot_quant),
    axes=lambda snapshot_quant: _with_whole_rows("sd sd u u e u tw ud u td td -> sd sd +tw +tw +u", snapshot_quant),
)


def _read_mover_results(bank, d_bank, read_slots, read_starts, read_order, q_eff, dy):
    return _like(d_bank), _like(q_eff)


read_mover_backward = define(
    "sdm_read_mover",
    _read_mover_results,
    cpu=lambda *x: _call("sdm_read_mover", _read_mover_results(*x), x, {1: 0}),
    xla=lambda *x, platform: _xla.read_mover_backward(*x),
    axes="sd sd v v e tr td -> sd +tr",
)


def _phase1_backward_results(k_idx, k_val, g, q_idx, q_val, *rest, chunk, num_slots):
    return _struct(k_val.shape, g.dtype), _like(g), _struct(q_val.shape, g.dtype)


def _phase1_backward_xla(k_idx, k_val, g, q_idx, q_val, *rest, platform, **params):
    chunks, gradients = Chunks(*rest[: len(Chunks._fields)]), rest[len(Chunks._fields) :]
    return _xla.phase1_backward(k_idx, k_val, g, q_idx, q_val, chunks, *gradients, **params)


def _phase1_backward_cuda(*x, **params):
    # The last result is a workspace.
    results = (*_phase1_backward_results(*x, **params), _struct(x[0].shape, x[2].dtype))
    return _call("sdm_phase1_backward", results, x, **params)[:-1]


# Operands: the five inputs, the fields of Chunks, da, dqk, dk_eff, dk_carry, dq_eff, ddecay.
phase1_backward = define(
    "sdm_phase1_backward",
    _phase1_backward_results,
    cpu=lambda *x, **params: _call("sdm_phase1_backward", _phase1_backward_results(*x, **params), x, **params),
    cuda=_phase1_backward_cuda,
    xla=_phase1_backward_xla,
    axes=f"tw tw tg tr tr {_CHUNKS_AXES} ncc ncc tw tw tr nu -> tw tg tr",
)


# ---- the whole operation


def _flatten(saved: Saved) -> tuple[Any, ...]:
    return (*saved.chunks, *saved[1:])


def unflatten(leaves: Sequence[Any]) -> Saved:
    """`Saved` from its arrays in order."""
    count = len(Chunks._fields)
    return Saved(Chunks(*leaves[:count]), *leaves[count:])


def _xla_form(platform: str) -> str:
    # Small rows scattered one token after another are fast on a CPU; elsewhere large steps are.
    return "token" if platform == "cpu" else "chunked"


def _forward_results(bank, k_idx, k_val, v, beta, g, q_idx, q_val, *, chunk, snapshot_quant, save):
    sizes = Sizes.of(bank, k_idx, g, q_idx, chunk)
    outputs = [_like(v), _like(bank)]
    if save:
        outputs += _flatten(_layout.saved_struct(sizes, bank.dtype, snapshot_quant))
    return outputs


def forward_workspace(sizes: Sizes, bank_dtype: Any, save: bool) -> list[jax.ShapeDtypeStruct]:
    """Arrays that the forward's custom call needs beside its operands and results."""
    acc = accumulate_dtype(bank_dtype)
    n = sizes.num_chunks if save else sizes.slab_chunks
    squares = _struct((*sizes.lead, n, sizes.chunk, sizes.chunk), acc)
    rows = _struct((*sizes.lead, sizes.chunk, sizes.width), acc)
    arrays = [squares, rows, rows]  # qx; retrieved and u; inter
    if not save:
        # What a differentiated call saves is needed here for one slab of chunks.
        slab = _struct((*sizes.lead, min(sizes.num_tokens, n * sizes.chunk), sizes.width), acc)
        arrays = [*_layout.chunks_struct(sizes, acc, n), squares, slab, slab, *arrays]
    return arrays


def _forward_cpu(*x, chunk, snapshot_quant, save):
    bank, k_idx, _, v, _, g, q_idx, _ = x
    sizes = Sizes.of(bank, k_idx, g, q_idx, chunk)
    outputs = _forward_results(*x, chunk=chunk, snapshot_quant=snapshot_quant, save=save)
    new_bank, y, *rest = _call(
        "sdm_forward",
        [_like(bank), _like(v), *outputs[2:], *forward_workspace(sizes, bank.dtype, save)],
        x,
        {0: 0},
        chunk=chunk,
        parts=sizes.column_parts,
        save=int(save),
        snapshot_quant=snapshot_quant,
    )
    return [y, new_bank, *rest[: len(outputs) - 2]]


# Axes of the arrays of Saved.
_SAVED_AXES = f"{_CHUNKS_AXES} ncc td td nud nu"


def _forward_axes(*, snapshot_quant, save, **params):
    del params
    if not save:
        return "sd tw tw td tg tg tr tr -> td sd"
    return _with_whole_rows(f"sd tw tw td tg tg tr tr -> td sd {_SAVED_AXES}", snapshot_quant)


def _backward_axes(*, snapshot_quant, **params):
    del params
    return _with_whole_rows(f"sd sd td tw tw tg tg tr tr {_SAVED_AXES} -> sd sd +tw td +tg +tg +tr", snapshot_quant)


# Operands: those of write_read, in their dtypes of the computation. Results: y, the new bank, and, with
# `save`, the arrays of Saved.
forward = define(
    "sdm_forward",
    _forward_results,
    cpu=_forward_cpu,
    cuda=_cuda_calls.forward,
    xla=lambda *x, platform, **params: _xla.forward(*x, form=_xla_form(platform), **params),
    axes=_forward_axes,
)


def _backward_results(bank, d_bank, dy, k_idx, k_val, beta, g, q_idx, q_val, *saved, chunk, snapshot_quant):
    acc = beta.dtype
    return [
        _like(bank),
        _like(d_bank),
        _struct(k_val.shape, acc),
        _struct(dy.shape, acc),
        _like(beta),
        _like(g),
        _struct(q_val.shape, acc),
    ]


def backward_workspace(sizes: Sizes, acc: Any) -> list[jax.ShapeDtypeStruct]:
    """Arrays that the backward's custom call needs: sums over each column range, and one chunk's rows."""
    lead, n, c, tokens = sizes.lead, sizes.num_chunks, sizes.chunk, sizes.num_tokens
    shapes = [
        (*lead, tokens, 1),  # dbeta
        (*lead, n, c, c),  # da
        (*lead, n, c, c),  # dqk
        (*lead, tokens, sizes.num_writes),  # dk_eff
        (*lead, tokens, sizes.num_writes),  # dk_carry
        (*lead, tokens, sizes.num_reads),  # dq_eff
        (*lead, n, sizes.write_slots),  # ddecay
    ]
    return [*(_struct((sizes.column_parts, *s), acc) for s in shapes), _struct((*lead, c, sizes.width), acc)]


def _backward_cpu(*x, chunk, snapshot_quant):
    bank, d_bank, dy, k_idx, k_val, beta, g, q_idx, q_val = x[:9]
    acc = beta.dtype
    sizes = Sizes.of(bank, k_idx, g, q_idx, chunk)
    results = [
        _like(bank),
        _like(d_bank),
        _struct(k_val.shape, acc),
        _struct(dy.shape, acc),
        _like(g),
        _struct(q_val.shape, acc),
        *backward_workspace(sizes, acc),
    ]
    restored, d_bank, dk_val, dv, dg, dq_val, dbeta, *_ = _call(
        "sdm_backward",
        results,
        x,
        {0: 0, 1: 1},
        chunk=chunk,
        parts=sizes.column_parts,
        snapshot_quant=snapshot_quant,
    )
    return [restored, d_bank, dk_val, dv, dbeta[0], dg, dq_val]


def _backward_xla(bank, d_bank, dy, k_idx, k_val, beta, g, q_idx, q_val, *saved, platform, **params):
    form = _xla_form(platform)
    return _xla.backward(bank, d_bank, dy, k_idx, k_val, beta, g, q_idx, q_val, unflatten(saved), form=form, **params)


# Operands: the new bank, its gradient, dy, the inputs but for v, the arrays of Saved. Results: the
# restored bank and the gradients of bank, k_val, v, beta, g, q_val.
backward = define(
    "sdm_backward",
    _backward_results,
    cpu=_backward_cpu,
    cuda=_cuda_calls.backward,
    xla=_backward_xla,
    axes=_backward_axes,
)


def _decode_results(bank, k_idx, k_val, v, beta, g, q_idx, q_val):
    return _like(v), _like(bank)


def _decode_cpu(*x):
    new_bank, y = _call("sdm_decode", [_like(x[0]), _like(x[3])], x, {0: 0})
    return y, new_bank


def _decode_xla(*x, platform):
    bank, *tokens = x
    y, bank = _xla.forward(
        bank,
        *(t[..., None, :] for t in tokens),
        chunk=1,
        snapshot_quant="none",
        save=False,
        form=_xla_form(platform),
    )
    return y[..., 0, :], bank


decode = define("sdm_decode", _decode_results, cpu=_decode_cpu, xla=_decode_xla, axes="sd w w d g g r r -> d sd")


# Most factors that the CUDA kernels take, as in cuda/sdm.h.
_MOST_CUDA_FACTORS = 32


def _product_key_call(target, results, plain, axes):
    """Custom calls on product keys, for the CPU and for a GPU; `plain` serves the factors that a GPU's does not."""

    def on_cpu(*x, factors, k):
        call = jax.ffi.ffi_call(target, results(*x, factors=factors, k=k))
        return call(*x, factors=np.asarray(factors, np.int64), k=k)

    def on_cuda(*x, factors, k):
        if len(factors) > _MOST_CUDA_FACTORS:
            return plain(*x, factors=factors, k=k, platform="cuda")
        return on_cpu(*x, factors=factors, k=k)

    return define(target, results, cpu=on_cpu, cuda=on_cuda, xla=plain, axes=axes)


def _product_key_topk_results(scores, *, factors, k):
    del factors
    row = (*scores.shape[:-1], k)
    return [_struct(row, scores.dtype), _struct(row, jnp.int32)]


def _product_key_topk_backward_results(d_values, ids, *, factors, k):
    del ids, k
    return [_struct((*d_values.shape[:-1], sum(factors)), d_values.dtype)]


product_key_topk = _product_key_call(
    "sdm_product_key_topk", _product_key_topk_results, _xla_product_key.select, "c -> k k"
)
product_key_topk_backward = _product_key_call(
    "sdm_product_key_topk_backward", _product_key_topk_backward_results, _xla_product_key.select_backward, "k k -> c"
)
