"""Checks of arguments and settings. Each failure is one Python error, raised while the call is traced."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sdm_jax._layout import BANK_DTYPES, SNAPSHOT_MODES, Sizes

IMPLEMENTATIONS = ("cpu", "cuda", "xla", "reference")
MAX_ENTRIES = 256
CHUNK_SIZES = (16, 256)
MAX_ROWS = 2**31


class UnsupportedConfigurationError(ValueError):
    """A configuration that the asked-for implementation cannot serve. The message says why, and what is supported."""


class Settings(NamedTuple):
    """Checked settings of a call; hashable."""

    chunk_size: int = 64
    snapshot_quant: str = "none"
    grad_bank_dtype: str | None = None
    shared_bank: bool = False
    implementation: str | None = None


def integer(name: str, value: Any, low: int, high: int) -> int:
    """An integer setting as a Python int; TypeError or ValueError if it is none or out of `[low, high]`."""
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    try:
        result = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}.") from None
    if not low <= result <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], got {result}.")
    return result


def choice(name: str, value: Any, choices: tuple[str, ...], optional: bool = False) -> Any:
    """A setting that is one of a few strings (or None, when `optional`)."""
    if value is None and optional:
        return None
    listed = ", ".join(map(repr, choices)) + (" or None" if optional else "")
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {listed}, got {value!r}.")
    if value not in choices:
        raise ValueError(f"{name} must be one of {listed}, got {value!r}.")
    return str(value)


def flag(name: str, value: Any) -> bool:
    """A boolean setting."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return bool(value)


def settings(
    bank_dtype: Any,
    *,
    chunk_size: Any = 64,
    snapshot_quant: Any = "none",
    grad_bank_dtype: Any = None,
    shared_bank: Any = False,
    implementation: Any = None,
) -> Settings:
    """Checks the settings of `write_read` for a bank of the given dtype."""
    if grad_bank_dtype is not None:
        try:
            grad = jnp.dtype(grad_bank_dtype).name
        except TypeError:
            raise TypeError(f"grad_bank_dtype must be None or float32, got {grad_bank_dtype!r}.") from None
        if grad != "float32" or jnp.dtype(bank_dtype) == jnp.float64:
            raise ValueError(
                f"grad_bank_dtype must be None (the bank's dtype) or, for a float32 or bfloat16 bank, float32; "
                f"got {grad} for a {jnp.dtype(bank_dtype).name} bank."
            )
        grad_bank_dtype = grad
    return Settings(
        chunk_size=integer("chunk_size", chunk_size, *CHUNK_SIZES),
        snapshot_quant=choice("snapshot_quant", snapshot_quant, SNAPSHOT_MODES),
        grad_bank_dtype=grad_bank_dtype,
        shared_bank=flag("shared_bank", shared_bank),
        implementation=choice("implementation", implementation, IMPLEMENTATIONS, optional=True),
    )


def is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _axes(lead: tuple[int, ...], *tail: Any) -> str:
    return "[" + ", ".join(map(str, (*lead, *tail))) + "]"


def arguments(
    bank: Any,
    k_idx: Any,
    k_val: Any,
    v: Any,
    beta: Any,
    g: Any,
    q_idx: Any,
    q_val: Any,
    *,
    chunk_size: int,
    shared_bank: bool,
    token_axis: bool = True,
) -> Sizes:
    """Checks types, dtypes and shapes of the arguments (sections 1 and 2 of the specification).

    `token_axis=False`: one token a stream, the arguments lack the axis T.
    """
    named = {
        "bank": bank,
        "k_idx": k_idx,
        "k_val": k_val,
        "v": v,
        "beta": beta,
        "g": g,
        "q_idx": q_idx,
        "q_val": q_val,
    }
    for name, value in named.items():
        if not is_array(value):
            raise TypeError(f"{name} must be an array, got {type(value).__name__}.")
    if jnp.dtype(bank.dtype).name not in BANK_DTYPES:
        raise TypeError(f"bank must be {', '.join(BANK_DTYPES)}; got {jnp.dtype(bank.dtype).name}.")
    for name in ("k_idx", "q_idx"):
        if not jnp.issubdtype(named[name].dtype, jnp.integer):
            raise TypeError(f"{name} must have an integer dtype, got {jnp.dtype(named[name].dtype).name}.")
    for name in ("k_val", "v", "beta", "g", "q_val"):
        if not jnp.issubdtype(named[name].dtype, jnp.floating):
            raise TypeError(f"{name} must have a floating-point dtype, got {jnp.dtype(named[name].dtype).name}.")

    token_axes = ("T",) if token_axis else ()
    least = 1 + len(token_axes)
    tails = {"k_idx": "W", "k_val": "W", "v": "D", "beta": "1", "g": "1 or W", "q_idx": "R", "q_val": "R"}
    if bank.ndim < 2:
        raise ValueError(f"bank must have shape [..., S, D], got {_axes(bank.shape)}.")
    for name, tail in tails.items():
        if named[name].ndim < least:
            raise ValueError(
                f"{name} must have shape [..., {', '.join((*token_axes, tail))}], got {_axes(named[name].shape)}."
            )

    *bank_lead, num_slots, width = bank.shape
    lead = tuple(k_idx.shape[:-least])
    if shared_bank:
        if tuple(bank_lead) != lead[: len(bank_lead)]:
            raise ValueError(
                f"with shared_bank=True the leading axes of bank, {_axes(tuple(bank_lead))}, must be the first of "
                f"those of k_idx, {_axes(lead)}."
            )
    elif tuple(bank_lead) != lead:
        hint = ""
        if tuple(bank_lead) == lead[: len(bank_lead)]:
            hint = " To let several streams use one bank, in which no two name one slot, pass shared_bank=True."
        raise ValueError(
            f"bank has leading axes {_axes(tuple(bank_lead))} but k_idx has {_axes(lead)}; they must be equal.{hint}"
        )
    num_writes, num_reads = k_idx.shape[-1], q_idx.shape[-1]
    for name, what, count in (("k_idx", "W", num_writes), ("q_idx", "R", num_reads)):
        if not 1 <= count <= MAX_ENTRIES:
            raise ValueError(
                f"{name} has {count} entries a token on its last axis ({what}); 1 to {MAX_ENTRIES} are supported."
            )
    for what, count in (("slots (S)", num_slots), ("columns (D)", width)):
        if count < 1:
            raise ValueError(f"bank has no {what}: its shape is {_axes(bank.shape)}.")
    tokens = tuple(k_idx.shape[-least:-1])
    sizes = {
        "k_val": (num_writes,),
        "v": (width,),
        "beta": (1,),
        "g": (1, num_writes),
        "q_idx": (num_reads,),
        "q_val": (num_reads,),
    }
    for name, columns in sizes.items():
        shape = tuple(named[name].shape)
        want = _axes((*lead, *tokens), " or ".join(map(str, dict.fromkeys(columns))))
        if len(shape) != len(lead) + least:
            raise ValueError(
                f"{name} must have {len(lead) + least} axes, {want} as k_idx and bank say; got {_axes(shape)}."
            )
        for axis, (got, need) in enumerate(zip(shape[:-1], (*lead, *tokens), strict=True)):
            if got != need:
                what = "T" if token_axis and axis == len(lead) else "a leading axis"
                raise ValueError(
                    f"{name} has {got} on axis {axis} ({what}), but k_idx has {need}; {name} must be {want}."
                )
        if shape[-1] not in columns:
            raise ValueError(
                f"{name} has {shape[-1]} on its last axis ({tails[name]}), but needs "
                f"{' or '.join(map(str, dict.fromkeys(columns)))}; {name} must be {want}."
            )
    result = Sizes(
        bank_lead=tuple(bank_lead),
        lead=lead,
        num_tokens=tokens[0] if token_axis else 1,
        num_slots=num_slots,
        width=width,
        num_writes=num_writes,
        num_reads=num_reads,
        gates=g.shape[-1],
        chunk=max(1, min(chunk_size, tokens[0] if token_axis else 1)),
    )
    rows = num_slots * int(np.prod(bank_lead, dtype=object))
    if rows >= MAX_ROWS:
        raise UnsupportedConfigurationError(
            f"bank has {rows} rows over all its leading axes; fewer than 2^31 are supported."
        )
    padded = result.num_streams * result.num_chunks * result.chunk
    if padded >= MAX_ROWS:
        raise UnsupportedConfigurationError(
            f"the tokens of all streams, with T padded to whole chunks, are {padded}; fewer than 2^31 are supported."
        )
    return result


def clean_ids(ids: Any, num_slots: int) -> Any:
    """Ids as int32. What is out of range and would not survive the cast becomes -1 first."""
    if jnp.dtype(ids.dtype).itemsize < 4 or ids.dtype == jnp.int32:
        return jnp.asarray(ids, jnp.int32)
    xp = np if isinstance(ids, np.ndarray) else jnp  # NumPy: JAX would cut 64 bits off without jax_enable_x64
    valid = (ids >= 0) & (ids < num_slots)
    return jnp.asarray(xp.where(valid, ids, 0).astype(np.int32) - xp.where(valid, 0, 1).astype(np.int32))


def _first(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(mask)[0])


def check_inputs(
    bank: Any,
    k_idx: Any,
    k_val: Any,
    v: Any,
    beta: Any,
    g: Any,
    q_idx: Any,
    q_val: Any,
    *,
    shared_bank: bool = False,
    allow_repeats: bool = True,
) -> None:
    """Looks at the values of a call's arguments, outside of jit, and raises at the first that is suspicious.

    **Arguments:** those of `sdm_jax.write_read`, as concrete arrays.

    - `allow_repeats`: whether a token may name a slot in several of its writes.

    **Raises:** ValueError or TypeError that says what was found and where: a bad shape or dtype; an id
    outside `[0, S)` other than -1, the padding value; a repeated write id, when `allow_repeats=False`; a
    slot that two streams of a shared bank name; NaN or infinity in `bank`, or in a weight, value, strength or gate that
    section 1 of the specification looks at. A gate of -inf (an exact erase) passes.
    """
    named = {
        "bank": bank,
        "k_idx": k_idx,
        "k_val": k_val,
        "v": v,
        "beta": beta,
        "g": g,
        "q_idx": q_idx,
        "q_val": q_val,
    }
    for name, value in named.items():
        if isinstance(value, jax.core.Tracer):
            raise TypeError(f"check_inputs looks at values, so it cannot run under a transformation; {name} is traced.")
    sizes = arguments(*named.values(), chunk_size=CHUNK_SIZES[0], shared_bank=flag("shared_bank", shared_bank))
    valid = {}
    for name in ("k_idx", "q_idx"):
        ids = np.asarray(named[name])
        valid[name] = (ids >= 0) & (ids < sizes.num_slots)
        bad = ~valid[name] & (ids != -1)
        if bad.any():
            where = _first(bad)
            raise ValueError(
                f"{name}{list(where)} is {ids[where]}, outside [0, {sizes.num_slots}) and not the padding value -1."
            )
    if not allow_repeats:
        repeated = _repeats(np.where(valid["k_idx"], np.asarray(k_idx), -1))
        if repeated.any():
            where = _first(repeated)
            raise ValueError(f"k_idx{list(where)} is {np.asarray(k_idx)[where]}, which its token has named before.")
    if shared_bank:
        _check_disjoint(sizes, np.asarray(k_idx), np.asarray(q_idx), valid)

    writes = valid["k_idx"].any(axis=-1, keepdims=True)
    looked_at = {
        "bank": np.array(True),
        "k_val": valid["k_idx"],
        "v": writes,
        "beta": writes,
        "g": valid["k_idx"] if sizes.gates == sizes.num_writes > 1 else writes,
        "q_val": valid["q_idx"],
    }
    for name, mask in looked_at.items():
        values = np.asarray(named[name]).astype(np.float64)
        bad = ~np.isfinite(values) & mask
        if name == "g":
            bad &= values != -np.inf
        if bad.any():
            where = _first(bad)
            raise ValueError(f"{name}{list(where)} is {values[where]}.")


def _repeats(ids: np.ndarray) -> np.ndarray:
    """Which entries name a slot that an earlier entry of their token names. Ids below 0 do not count."""
    order = np.argsort(ids, axis=-1, kind="stable")
    ordered = np.take_along_axis(ids, order, axis=-1)
    again = np.zeros(ids.shape, bool)
    again[..., 1:] = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    result = np.zeros(ids.shape, bool)
    np.put_along_axis(result, order, again, axis=-1)
    return result


def _check_disjoint(sizes: Sizes, k_idx: np.ndarray, q_idx: np.ndarray, valid: dict[str, np.ndarray]) -> None:
    """No two streams of a shared bank name one slot."""
    banks = int(np.prod(sizes.bank_lead, dtype=np.int64))
    per_bank = sizes.num_streams // max(banks, 1)
    for b in range(banks):
        owner = np.full(sizes.num_slots, -1)
        for stream in range(per_bank):
            for name, ids in (("k_idx", k_idx), ("q_idx", q_idx)):
                here = (b * per_bank + stream,)
                mine = ids.reshape(sizes.num_streams, -1)[here][valid[name].reshape(sizes.num_streams, -1)[here]]
                taken = mine[(owner[mine] >= 0) & (owner[mine] != stream)]
                if taken.size:
                    raise ValueError(
                        f"slot {taken[0]} of shared bank {b} is named by its streams {owner[taken[0]]} and {stream} "
                        f"({name}); the streams of a shared bank must use disjoint slots."
                    )
                owner[mine] = stream


def count_repeated_writes(k_idx: Any, num_slots: int | None = None) -> Any:
    """Counts the write entries beyond the first of their slot in a token (section 1 of the specification).

    **Arguments:**

    - `k_idx`: integer ids `[*B, T, W]`.
    - `num_slots`: S; ids outside `[0, S)` are dropped entries and do not count. None: only negative ids are.

    **Returns:** int32 `[*B]`, the number of such entries of each stream. Works under `jit` and `vmap`.
    """
    if not is_array(k_idx) or not jnp.issubdtype(k_idx.dtype, jnp.integer):
        raise TypeError(
            f"k_idx must be an integer array [..., T, W], got {getattr(k_idx, 'dtype', type(k_idx).__name__)}."
        )
    if k_idx.ndim < 2:
        raise ValueError(f"k_idx must have shape [..., T, W], got {_axes(k_idx.shape)}.")
    limit = MAX_ROWS - 1 if num_slots is None else integer("num_slots", num_slots, 1, MAX_ROWS - 1)
    ordered = jnp.sort(clean_ids(k_idx, limit), axis=-1)
    valid = (ordered >= 0) & (ordered < limit)
    again = (ordered[..., 1:] == ordered[..., :-1]) & valid[..., 1:]
    return again.sum(axis=(-2, -1), dtype=jnp.int32)
