"""How a primitive runs on many devices: every device does the streams, and the columns, that it holds.

Streams (leading axes) never meet. Columns meet in sums only: with the columns split over devices a forward
needs no communication, and a backward adds up the gradients of what the columns share. All other axes of an
operand are needed whole on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax._src import dispatch
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from sdm_jax.checks import UnsupportedConfigurationError

COLUMNS = "d"
SLOTS = "s"


class Axes(NamedTuple):
    """The axes behind the streams of each operand and result, a word an array and a letter an axis.

    Written `"sd tw -> td +tw"`: `d` are the columns and `s` a bank's slots, other letters only count. A result that is
    a sum over columns has a `+` in front.
    """

    operands: Sequence[str]
    results: Sequence[str]

    @staticmethod
    def parse(text: str) -> Axes:
        operands, results = text.split("->")
        return Axes(operands.split(), results.split())


class _Layout:
    """The streams and columns of one call."""

    def __init__(self, axes: Axes, operands: Sequence[Any]):
        self.axes = axes
        self.words = [*axes.operands, *(word.removeprefix("+") for word in axes.results)]
        # Streams that share a bank stay together: only the axes that every operand has are split.
        self.split = min(len(x.shape) - len(word) for x, word in zip(operands, axes.operands, strict=True))

    def rule(self, arrays: Sequence[Any]) -> str:
        """The sharding rule of Shardy: factors that arrays have in common, and factors of their own."""
        texts = []
        for number, (word, x) in enumerate(zip(self.words, arrays, strict=True)):
            lead = len(x.shape) - len(word)
            own = [f"x{number}_{i}" for i in range(lead + len(word))]
            for i in range(self.split):
                own[i] = f"p{i}"
            for i, letter in enumerate(word):
                if letter == COLUMNS:
                    own[lead + i] = COLUMNS
            texts.append(" ".join(own))
        count = len(self.axes.operands)
        return ", ".join(texts[:count]) + " -> " + ", ".join(texts[count:])

    def choose(self, mesh: Any, specs: Iterable[Any], arrays: Sequence[Any]) -> tuple[list[Any], Any]:
        """Mesh axes of the streams and of the columns, from those that the arrays come with or are wanted in."""
        streams: list[Any] = [None] * self.split
        columns: Any = None
        taken: set[str] = set()

        def take(dimension, size, now):
            """The mesh axes of a dimension, if they are free and divide it."""
            names = dimension if isinstance(dimension, tuple) else (dimension,)
            if now is not None or dimension is None or not names or taken.intersection(names):
                return now
            if size % math.prod(mesh.shape[name] for name in names):
                return now
            taken.update(names)
            return dimension

        specs = [(*spec, *[None] * (len(x.shape) - len(spec))) for spec, x in zip(specs, arrays, strict=True)]
        words = self.words[: len(arrays)]
        for spec, x in zip(specs, arrays, strict=True):
            for i in range(self.split):
                streams[i] = take(spec[i], x.shape[i], streams[i])
        for spec, x, word in zip(specs, arrays, words, strict=True):
            lead = len(x.shape) - len(word)
            for i, letter in enumerate(word):
                if letter == COLUMNS:
                    columns = take(spec[lead + i], x.shape[lead + i], columns)
                if letter == SLOTS and spec[lead + i] is not None:
                    raise UnsupportedConfigurationError(
                        f"the slots of the bank (axis {lead + i} of {tuple(x.shape)}) are sharded over "
                        f"{spec[lead + i]!r}; any token may name any slot, so a bank is sharded over its leading axes "
                        "(streams, such as batch and heads) or its columns (the last axis)"
                    )
        return streams, columns

    def spec(self, streams: Sequence[Any], columns: Any, word: str, ndim: int) -> PartitionSpec:
        rest = [columns if letter == COLUMNS else None for letter in word]
        return PartitionSpec(*streams, *[None] * (ndim - self.split - len(word)), *rest)


def result_types(axes: Axes, operands: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Types of a primitive's results: shapes and dtypes of `results`, sharded as the types of the operands say.

    An operand without a mesh is on every device of the others'.
    """
    layout = _Layout(axes, operands)
    placed = next((x for x in operands if not x.sharding.mesh.empty), operands[0])
    streams, columns = layout.choose(placed.sharding.mesh, [x.sharding.spec for x in operands], operands)
    types = []
    for word, r in zip(layout.words[len(operands) :], results, strict=True):
        sharding = placed.sharding.update(spec=layout.spec(streams, columns, word, len(r.shape)))
        types.append(placed.update(shape=r.shape, dtype=r.dtype, weak_type=False, sharding=sharding))
    return types


def needs_devices(primitive: Any) -> None:
    """Lets the lowering of a primitive know the devices, as `custom_partitioning` needs; JAX has no public way."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def runs_on_many(ctx: Any) -> bool:
    """Whether the partitioner will split what is lowered in `ctx`: not on one device, nor within `jax.shard_map`."""
    if getattr(ctx.module_context.axis_context, "num_devices", None) == 1:
        return False
    mesh = ctx.avals_in[0].sharding.mesh
    return mesh.empty or not mesh.are_all_axes_manual


def vary_alike(arrays: Sequence[Any]) -> list[Any]:
    """The arrays, each varying over all mesh axes of a `jax.shard_map` that any of them varies over."""
    varying = [_varying(x) for x in arrays]
    together = frozenset().union(*varying)
    return [
        jax.lax.pcast(x, tuple(sorted(together - own)), to="varying") if together - own else x
        for x, own in zip(arrays, varying, strict=True)
    ]


def partitioned(f: Callable[..., Sequence[Any]], axes: Axes, operands: Sequence[Any]) -> Callable[..., Sequence[Any]]:
    """`f` as a function that runs on each device's part of the streams and columns."""
    layout = _Layout(axes, operands)

    def partition(mesh, operands, results):
        arrays = [*operands, *results]
        streams, columns = layout.choose(mesh, (_spec(x) for x in arrays), arrays)
        specs = [layout.spec(streams, columns, w, len(x.shape)) for w, x in zip(layout.words, arrays, strict=True)]
        shardings = [NamedSharding(mesh, spec) for spec in specs]

        def on_device(*parts):
            # The parts have no sharding of their own, also where the axes of the mesh are Explicit.
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                outs = f(*parts)
                if columns is None:
                    return tuple(outs)
                return tuple(
                    jax.lax.psum(x, columns) if word[0] == "+" else x
                    for x, word in zip(outs, axes.results, strict=True)
                )

        return mesh, on_device, tuple(shardings[len(operands) :]), tuple(shardings[: len(operands)])

    call = custom_partitioning(lambda *x: tuple(f(*x)))
    results = jax.eval_shape(lambda *x: tuple(f(*x)), *operands)
    call.def_partition(partition=partition, sharding_rule=layout.rule([*operands, *results]))
    return call


def _spec(x: Any) -> Any:
    return getattr(x.sharding, "spec", ())


def _varying(x: Any) -> frozenset[str]:
    """Mesh axes that an array in a `jax.shard_map` varies over; JAX has no public name for them."""
    return getattr(getattr(jax.typeof(x), "mat", None), "varying", frozenset())
