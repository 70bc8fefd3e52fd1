"""Static sizes of a call, and the named arrays that its steps hand to each other.

Everything here is a function of shapes, dtypes and settings only, never of the platform: all
implementations share one layout, because the platform is not known while a call is traced.
The symbols are those of section 3 of the specification.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

SNAPSHOT_MODES = ("none", "bf16", "fp8", "int4")
BANK_DTYPES = ("float32", "bfloat16", "float64")

# A call that nobody differentiates keeps the results of Phase 1 for this many tokens at a time,
# so its working memory does not grow with the length of the stream.
SLAB_TOKENS = 1024

# Columns that one CPU task takes through the whole stream, so that the rows of a chunk stay in cache.
COLUMNS_PER_TASK = 128


def accumulate_dtype(dtype: Any) -> jnp.dtype:
    """The dtype that sums over rows of a `dtype` bank are carried in: float32, or float64 for float64."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of one `write_read` call.

    `bank_lead` are the leading axes of the bank, `lead` those of the tokens; they are equal unless
    several streams share a bank, when `bank_lead` is a prefix of `lead`.
    """

    bank_lead: tuple[int, ...]
    lead: tuple[int, ...]
    num_tokens: int  # T
    num_slots: int  # S
    width: int  # D
    num_writes: int  # W
    num_reads: int  # R
    gates: int  # columns of `g`: 1 (one a token) or W (one a write)
    chunk: int  # C: tokens of a chunk, never more than T

    @property
    def num_streams(self) -> int:  # P
        return math.prod(self.lead)

    @property
    def num_chunks(self) -> int:  # N
        return -(-self.num_tokens // self.chunk)

    @property
    def slab_chunks(self) -> int:
        """Chunks whose Phase-1 results an undifferentiated call holds at a time."""
        return min(self.num_chunks, max(1, SLAB_TOKENS // self.chunk))

    @property
    def chunk_writes(self) -> int:  # C W
        return self.chunk * self.num_writes

    @property
    def chunk_reads(self) -> int:  # C R
        return self.chunk * self.num_reads

    @property
    def write_slots(self) -> int:  # U: most distinct slots that a chunk can write
        return min(self.chunk_writes, self.num_slots)

    @property
    def read_slots(self) -> int:  # V: most distinct slots that a chunk can read
        return min(self.chunk_reads, self.num_slots)

    @property
    def column_parts(self) -> int:
        """Ranges of columns that CPU tasks work on side by side; sums over columns add up range by range."""
        return -(-self.width // COLUMNS_PER_TASK)

    @staticmethod
    def of(bank: Any, k_idx: Any, g: Any, q_idx: Any, chunk_size: int) -> Sizes:
        """Sizes from arguments whose shapes have been checked."""
        *bank_lead, num_slots, width = bank.shape
        *lead, num_tokens, num_writes = k_idx.shape
        return Sizes(
            bank_lead=tuple(bank_lead),
            lead=tuple(lead),
            num_tokens=num_tokens,
            num_slots=num_slots,
            width=width,
            num_writes=num_writes,
            num_reads=q_idx.shape[-1],
            gates=g.shape[-1],
            chunk=max(1, min(chunk_size, num_tokens)),
        )


class Chunks(NamedTuple):
    """Results of Phase 1 for `N` chunks. `acc` is the accumulation dtype of the bank.

    Positions of entries count within their chunk: write entry `t * W + w`, read entry `t * R + r`.
    """

    a: Any  # [*B, N, C, C] acc, strictly lower triangular, zero elsewhere
    qk: Any  # [*B, N, C, C] acc, lower triangular, zero elsewhere
    k_eff: Any  # [*B, T, W] acc: weight times decay since the chunk's start (0 for dropped entries)
    k_carry: Any  # [*B, T, W] acc: weight times decay until the chunk's end (0 for dropped entries)
    q_eff: Any  # [*B, T, R] acc: read weight times decay since the chunk's start (0 for dropped)
    slots: Any  # [*B, N, U] int32: the distinct slots written, ascending, then -1
    starts: Any  # [*B, N, U + 1] int32: where a slot's entries start in `order`; then the number of valid entries
    order: Any  # [*B, N, C * W] int32: positions of the valid write entries by slot, then token, then w; then -1
    decay: Any  # [*B, N, U] acc: decay of a slot over the whole chunk; 1 beyond the distinct slots
    read_slots: Any  # [*B, N, V] int32: the distinct slots read, ascending, then -1
    read_starts: Any  # [*B, N, V + 1] int32, like `starts`
    read_order: Any  # [*B, N, C * R] int32, like `order`
    writes: Any  # [*B, T] int32: valid write entries of a token; 0 means its v, beta and g are never looked at


class Saved(NamedTuple):
    """What a differentiated call keeps beside its inputs and the new bank."""

    chunks: Chunks
    x: Any  # [*B, N, C, C] acc: the solve's result, lower triangular with ones on the diagonal
    error: Any  # [*B, T, D] acc: v - retrieved
    delta: Any  # [*B, T, D] acc
    snapshot: Any  # [*B, N, U, snapshot width] rows of `chunks.slots` as they were before the chunk
    scale: Any  # [*B, N, U] float32, one scale a row, or [*B, N, 0] in the modes without scales


def has_scales(mode: str) -> bool:
    """Whether a snapshot mode keeps a scale for each row."""
    return mode in ("fp8", "int4")


def snapshot_row(mode: str, bank_dtype: Any, width: int) -> tuple[int, jnp.dtype, bool]:
    """Width and dtype of a stored snapshot row, and whether it has a scale (section 5)."""
    if mode == "fp8":
        return width, jnp.dtype(jnp.float8_e4m3fn), True
    if mode == "int4":
        return -(-width // 2), jnp.dtype(jnp.uint8), True
    return width, jnp.dtype(jnp.bfloat16 if mode == "bf16" else bank_dtype), False


def _struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def chunks_struct(sizes: Sizes, acc: Any, num_chunks: int | None = None) -> Chunks:
    """Shapes and dtypes of Phase 1's results, for all chunks or for the first `num_chunks`."""
    n = sizes.num_chunks if num_chunks is None else num_chunks
    lead, c = sizes.lead, sizes.chunk
    tokens = min(sizes.num_tokens, n * c)
    u, v = sizes.write_slots, sizes.read_slots
    i32 = jnp.int32
    return Chunks(
        a=_struct((*lead, n, c, c), acc),
        qk=_struct((*lead, n, c, c), acc),
        k_eff=_struct((*lead, tokens, sizes.num_writes), acc),
        k_carry=_struct((*lead, tokens, sizes.num_writes), acc),
        q_eff=_struct((*lead, tokens, sizes.num_reads), acc),
        slots=_struct((*lead, n, u), i32),
        starts=_struct((*lead, n, u + 1), i32),
        order=_struct((*lead, n, sizes.chunk_writes), i32),
        decay=_struct((*lead, n, u), acc),
        read_slots=_struct((*lead, n, v), i32),
        read_starts=_struct((*lead, n, v + 1), i32),
        read_order=_struct((*lead, n, sizes.chunk_reads), i32),
        writes=_struct((*lead, tokens), i32),
    )


def saved_struct(sizes: Sizes, bank_dtype: Any, snapshot_quant: str) -> Saved:
    """Shapes and dtypes of what a differentiated call keeps."""
    acc = accumulate_dtype(bank_dtype)
    lead, n, c = sizes.lead, sizes.num_chunks, sizes.chunk
    row, row_dtype, scaled = snapshot_row(snapshot_quant, bank_dtype, sizes.width)
    return Saved(
        chunks=chunks_struct(sizes, acc),
        x=_struct((*lead, n, c, c), acc),
        error=_struct((*lead, sizes.num_tokens, sizes.width), acc),
        delta=_struct((*lead, sizes.num_tokens, sizes.width), acc),
        snapshot=_struct((*lead, n, sizes.write_slots, row), row_dtype),
        scale=_struct((*lead, n, sizes.write_slots if scaled else 0), jnp.float32),
    )


def num_bytes(tree: Any) -> int:
    """Bytes of all arrays or shape structs of a pytree."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
