"""The whole calls of a GPU: each is emitted as several custom calls in a row.

XLA captures a run of at least five commands into a command buffer, which it then replays without the
host, so no call here has fewer parts. The parts hand on their arrays in place; the operands and results
are those of ffi/cuda/stages.h, in the same order.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sdm_jax import _layout
from sdm_jax._layout import Sizes, accumulate_dtype

# Phase 1 and the solve of a call that saves nothing run for this many chunks (of all streams) side by
# side: enough to fill a GPU, and its working memory does not grow with the length of the stream.
SLAB_TASKS = 1024

# Custom calls that the steps of a call are split into.
STEP_CALLS = 3


class Stage(enum.IntFlag):
    """The stages of the forward, as in cuda/launch.h."""

    PHASE1 = 1
    SOLVE = 2
    GATHER = 4
    DUAL = 8
    MOVE = 16
    STEPS = GATHER | DUAL | MOVE
    ALL = PHASE1 | SOLVE | STEPS


class BackwardStage(enum.IntFlag):
    """The stages of the backward, as in cuda/launch.h."""

    PREPARE = 1
    STEPS = 2
    SQUARES = 4
    ADD_PARTS = 8
    PHASE1 = 16


def _struct(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def _like(x: Any) -> jax.ShapeDtypeStruct:
    return _struct(x.shape, x.dtype)


def _ranges(first: int, count: int, parts: int) -> list[tuple[int, int]]:
    """At most `parts` ranges (first, count) of about the same length."""
    parts = max(1, min(parts, count))
    ends = [first + count * i // parts for i in range(parts + 1)]
    return [(a, b - a) for a, b in itertools.pairwise(ends)]


def apart(arrays: Sequence[Any], in_place: Collection[int] = ()) -> list[Any]:
    """Operands or results of a custom call, but for those at the positions `in_place`, behind a barrier.

    XLA for GPUs may pull the slices that make operands (in a scan over segments, for one) into a custom call,
    and the update of a larger array that takes a result. Such a call is no part of a command buffer: the host
    launches it in every round of the scan. And what the result's array receives no longer lies where it was made.
    """
    others = [i for i in range(len(arrays)) if i not in in_place]
    held = iter(jax.lax.optimization_barrier(tuple(arrays[i] for i in others)))
    return [x if i in in_place else next(held) for i, x in enumerate(arrays)]


def _run(
    target: str,
    calls: Sequence[dict[str, int]],
    in_place: Sequence[Any],
    operands: Sequence[Any],
    arrays: Sequence[Any],
    **attributes: Any,
) -> tuple[list[Any], list[Any]]:
    """Emits custom calls in a row. `in_place` and, after the first call, `arrays` go from call to call."""
    state: list[Any] = []
    in_place = list(in_place)
    operands = apart(operands)
    for call in calls:
        taken = [*in_place, *operands, *state]
        aliases = {i: i for i in range(len(in_place))}
        aliases |= {len(in_place) + len(operands) + i: len(in_place) + i for i in range(len(state))}
        emit = jax.ffi.ffi_call(target, [*map(_like, in_place), *arrays], input_output_aliases=aliases)
        out = list(emit(*taken, fresh=int(not state), **call, **attributes))
        in_place, state = out[: len(in_place)], out[len(in_place) :]
    return in_place, state


def held_chunks(sizes: Sizes, save: bool) -> int:
    """Chunks whose Phase-1 results a forward holds at a time."""
    return sizes.num_chunks if save else min(sizes.num_chunks, max(1, SLAB_TASKS // max(1, sizes.num_streams)))


def forward_parts(sizes: Sizes, save: bool) -> list[dict[str, int]]:
    """The stages, chunks and first held chunk of each custom call of a forward."""
    held, total = held_chunks(sizes, save), sizes.num_chunks
    slabs = -(-total // held)

    def part(stages: Stage, first: int, count: int, first_held: int) -> dict[str, int]:
        return {"stages": int(stages), "first": first, "count": count, "first_held": first_held}

    if slabs >= 5:
        groups = [(a * held, min(total, (a + n) * held) - a * held) for a, n in _ranges(0, slabs, 6)]
        return [part(Stage.ALL, first, count, first) for first, count in groups]
    parts = []
    for begin in range(0, total, held):
        count = min(held, total - begin)
        parts += [part(stage, begin, count, begin) for stage in (Stage.PHASE1, Stage.SOLVE)]
        steps = _ranges(begin, count, STEP_CALLS)
        if len(steps) < STEP_CALLS and slabs == 1:
            stages = (Stage.GATHER, Stage.DUAL, Stage.MOVE)
            parts += [part(stage, *steps[0], begin) for stage in stages]
            steps = steps[1:]
        parts += [part(Stage.STEPS, *step, begin) for step in steps]
    return parts


def forward_arrays(sizes: Sizes, bank_dtype: Any, snapshot_quant: str, save: bool) -> list[jax.ShapeDtypeStruct]:
    """The arrays that the parts of a forward hand on, beside the bank: y, what is saved, workspaces."""
    acc = accumulate_dtype(bank_dtype)
    held = held_chunks(sizes, save)
    squares = _struct((*sizes.lead, held, sizes.chunk, sizes.chunk), acc)
    one_chunk = _struct((*sizes.lead, sizes.chunk, sizes.width), acc)
    y = _struct((*sizes.lead, sizes.num_tokens, sizes.width), bank_dtype)
    if save:
        saved = _layout.saved_struct(sizes, bank_dtype, snapshot_quant)
        kept = [*saved.chunks, *saved[1:]]
    else:
        kept = [*_layout.chunks_struct(sizes, acc, held), squares, one_chunk]
    records = _struct((*sizes.lead, held, 4 * sizes.chunk_writes), jnp.int32)
    return [y, *kept, squares, one_chunk, one_chunk, records]  # qx, inter, u, records


def forward(bank, k_idx, k_val, v, beta, g, q_idx, q_val, *, chunk, snapshot_quant, save):
    sizes = Sizes.of(bank, k_idx, g, q_idx, chunk)
    (new_bank,), arrays = _run(
        "sdm_forward_stage",
        forward_parts(sizes, save),
        [bank],
        [k_idx, k_val, v, beta, g, q_idx, q_val],
        forward_arrays(sizes, bank.dtype, snapshot_quant, save),
        chunk=chunk,
        held=held_chunks(sizes, save),
        save=int(save),
        snapshot_quant=snapshot_quant,
    )
    y, *kept = apart(arrays[:-4] if save else arrays[:1])
    return [y, new_bank, *kept]


def backward_parts(sizes: Sizes) -> list[dict[str, int]]:
    """The stages and chunks of each custom call of a backward."""
    total = sizes.num_chunks

    def part(stages: BackwardStage, first: int = 0, count: int = total) -> dict[str, int]:
        return {"stages": int(stages), "first": first, "count": count}

    steps = [part(BackwardStage.STEPS, *step) for step in reversed(_ranges(0, total, STEP_CALLS))]
    last = (BackwardStage.SQUARES, BackwardStage.ADD_PARTS, BackwardStage.PHASE1)
    return [part(BackwardStage.PREPARE), *steps, *map(part, last)]


def slice_columns(sizes: Sizes) -> int:
    """Columns of a slice of the movers, as cuda/geometry.h has it."""
    return 128 if sizes.width % 128 == 0 and (sizes.chunk > 64 or sizes.width >= 512) else 64


def column_parts(sizes: Sizes) -> int:
    """Column ranges whose sums the backward's movers keep apart: the slices."""
    return -(-sizes.width // slice_columns(sizes))


def backward_arrays(sizes: Sizes, acc: Any) -> list[jax.ShapeDtypeStruct]:
    """The arrays that the parts of a backward hand on, beside the bank and its gradient."""
    lead, n, c, tokens = sizes.lead, sizes.num_chunks, sizes.chunk, sizes.num_tokens
    parts = column_parts(sizes)
    shapes = [
        (*lead, tokens, sizes.num_writes),  # dk_val
        (*lead, tokens, sizes.width),  # dv
        (*lead, tokens, 1),  # dbeta
        (*lead, tokens, sizes.gates),  # dg
        (*lead, tokens, sizes.num_reads),  # dq_val
        *[(*lead, n, c, c)] * 3,  # da, dqk, qx
    ]
    records = [(*lead, n, 4 * sizes.chunk_writes), (*lead, n, 4 * sizes.chunk_reads)]
    sums = [
        (parts, *lead, tokens, sizes.num_writes),  # dk_eff
        (parts, *lead, tokens, sizes.num_writes),  # dk_carry
        (parts, *lead, tokens, sizes.num_reads),  # dq_eff
        (parts, *lead, n, sizes.write_slots),  # ddecay
        (*lead, c, sizes.width),  # carried
    ]
    return [
        *(_struct(x, acc) for x in shapes),
        *(_struct(x, jnp.int32) for x in records),
        *(_struct(x, acc) for x in sums),
    ]


def backward(bank, d_bank, dy, k_idx, k_val, beta, g, q_idx, q_val, *saved, chunk, snapshot_quant):
    sizes = Sizes.of(bank, k_idx, g, q_idx, chunk)
    in_place, arrays = _run(
        "sdm_backward_stage",
        backward_parts(sizes),
        [bank, d_bank],
        [dy, k_idx, k_val, beta, g, q_idx, q_val, *saved],
        backward_arrays(sizes, beta.dtype),
        chunk=chunk,
        parts=column_parts(sizes),
        snapshot_quant=snapshot_quant,
    )
    return [*in_place, *apart(arrays[:5])]
