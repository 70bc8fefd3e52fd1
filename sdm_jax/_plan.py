"""`plan`: what a call will do and need, from shapes alone."""

from __future__ import annotations

from typing import Any, NamedTuple

from sdm_jax import _calls, _layout, checks
from sdm_jax._layout import accumulate_dtype
from sdm_jax._primitive import choose_implementation


class Plan(NamedTuple):
    """Static facts about one `write_read` call. Bytes are None where the compiler decides (`"xla"`, `"reference"`) or
    no figure is kept (`"cuda"`)."""

    implementation: str
    """The implementation that serves on the platform."""
    steps: int
    """Chunks of each stream, `ceil(T / chunk_size)`, taken one after another."""
    chunk: int
    """Tokens of a chunk: `chunk_size`, or T if that is less."""
    saved_bytes: int
    """Kept for the backward by a differentiated call, beside its inputs and the new bank (section 5)."""
    snapshot_bytes: int
    """The part of `saved_bytes` that `snapshot_quant` changes."""
    forward_working_bytes: int | None
    """Working memory of a call that nobody differentiates, beside its operands and results."""
    saving_forward_working_bytes: int | None
    """Working memory of the forward of a differentiated call, beside `saved_bytes`."""
    backward_working_bytes: int | None
    """Working memory of the backward, beside its operands and the gradients."""


def plan(
    bank: Any,
    k_idx: Any,
    k_val: Any,
    v: Any,
    beta: Any,
    g: Any,
    q_idx: Any,
    q_val: Any,
    *,
    platform: str = "cpu",
    **settings: Any,
) -> Plan:
    """Says how `write_read` would run on arguments of the given shapes; computes nothing.

    **Arguments:** those of `sdm_jax.write_read`, as arrays or as `jax.ShapeDtypeStruct`, and its settings.

    - `platform`: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`.

    **Returns:** a `Plan`. **Raises:** as `write_read`.
    """
    platform = checks.choice("platform", platform, ("cpu", "cuda", "rocm", "tpu"))
    checked = checks.settings(getattr(bank, "dtype", "float32"), **settings)
    operands = (bank, k_idx, k_val, v, beta, g, q_idx, q_val)
    sizes = checks.arguments(*operands, chunk_size=checked.chunk_size, shared_bank=checked.shared_bank)
    if checked.implementation == "reference":
        implementation = "reference"
    else:
        implementation = choose_implementation(platform, checked.implementation, bank.dtype)
    saved = _layout.saved_struct(sizes, bank.dtype, checked.snapshot_quant)
    working: list[int | None] = [None, None, None]
    if implementation == "cpu":
        working = [
            _layout.num_bytes(_calls.forward_workspace(sizes, bank.dtype, save=False)),
            _layout.num_bytes(_calls.forward_workspace(sizes, bank.dtype, save=True)),
            _layout.num_bytes(_calls.backward_workspace(sizes, accumulate_dtype(bank.dtype))),
        ]
    return Plan(
        implementation=implementation,
        steps=sizes.num_chunks,
        chunk=sizes.chunk,
        saved_bytes=_layout.num_bytes(saved),
        snapshot_bytes=_layout.num_bytes((saved.snapshot, saved.scale)),
        forward_working_bytes=working[0],
        saving_forward_working_bytes=working[1],
        backward_working_bytes=working[2],
    )
