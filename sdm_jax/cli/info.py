"""`python -m sdm_jax info`: versions, devices, and what a configuration needs."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from typing import Any

import jax
import jax.numpy as jnp

import sdm_jax
from sdm_jax._primitive import has_cuda_module
from sdm_jax.cli import _flags, _model
from sdm_jax.cli._errors import need_modules


def add_parser(subparsers: Any) -> None:
    """Adds the command and its flags."""
    parser = subparsers.add_parser(
        "info",
        help="versions, devices, and what a configuration needs",
        description="Prints versions and devices, and of the model that the flags describe (those of train): which "
        "implementation would serve, how many parameters it has, and the memory that it needs.",
    )
    flags = _flags.Flags(parser)
    flags.group("configuration")
    flags.add("--config", None, "YAML file of flags by their names; those given here come first", metavar="FILE")
    flags.add(
        "--from",
        None,
        "folder of a run whose settings to take where no flag is given",
        type=_flags.path,
        metavar="DIR",
    )
    flags.add("--tokenizer", "bytes", "bytes, or MODULE:OBJECT, as in train", metavar="NAME")
    flags.add("--batch-size", 2, "pieces of text that are computed together", type=_flags.positive_integer, metavar="N")
    flags.add("--length", 512, "tokens of a piece", type=_flags.positive_integer, metavar="N")
    _model.add_flags(flags)
    parser.set_defaults(run=lambda arguments: run(flags.given(arguments), flags.defaults))


def run(given: dict[str, Any], defaults: dict[str, Any]) -> int:
    """Prints everything; returns the exit status."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
    versions = [f"{name} {_version(name)}" for name in packages]
    print(f"sdm_jax {sdm_jax.__version__}, {', '.join(versions)}, Python {platform.python_version()}")
    print(f"kernels: CPU, {'CUDA' if has_cuda_module() else 'no CUDA'}")
    devices = jax.devices()
    kinds = sorted({device.device_kind for device in devices})
    print(f"devices: {len(devices)} of {devices[0].platform} ({', '.join(kinds)})", flush=True)

    need_modules("the rest of info", "flax", "optax", "orbax")
    saved = {}
    if "from" in given:
        from sdm_jax.cli._checkpoint import Checkpoints

        with Checkpoints(given["from"], create=False) as checkpoints:
            saved = checkpoints.settings()
    _configuration(argparse.Namespace(**{**defaults, **saved, **given}))
    return 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _configuration(settings: argparse.Namespace) -> None:
    from flax import nnx

    from sdm_jax.cli import _text
    from sdm_jax.flax import LanguageModel, SparseDeltaMemory, count_parameters

    _, vocab_size = _text.load_tokenizer(settings.tokenizer)
    config = _model.model_config(settings, vocab_size)
    try:
        model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    except (TypeError, ValueError) as error:
        raise _model.name_the_flag(error, settings) from error
    batch, length = settings.batch_size, settings.length
    count = count_parameters(model)
    parameters = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    print(
        f"model: {settings.layers}, {vocab_size} tokens, {count.active:,} parameters and {count.bank:,} in initial "
        f"banks\n"
        f"training, {batch} pieces of {length} tokens: {_size(parameters)} of parameters, as much of gradients, "
        f"{_size(2 * parameters)} of AdamW's moments",
    )
    for i, block in enumerate(model.blocks):
        layer = block.mixer
        if isinstance(layer, SparseDeltaMemory):
            _memory_layer(i, layer, batch, length)
    cache = jax.eval_shape(lambda model: model.init_cache(batch, length), model)
    print(f"decoding, {batch} texts of up to {length} tokens: {_size(_bytes(cache))} of states and caches")


def _memory_layer(place: int, layer: Any, batch: int, length: int) -> None:
    """What one call of a memory layer would do and need."""
    bank = jax.eval_shape(lambda layer: layer.init_state(batch).bank, layer)
    x = jax.ShapeDtypeStruct((batch, length, layer.dim), layer.dtype)
    backend = jax.default_backend()
    plan = sdm_jax.plan(
        bank,
        *jax.eval_shape(lambda layer, x: layer.operands(x), layer, x),
        platform="cuda" if backend == "gpu" else backend,
        chunk_size=layer.chunk_size,
        snapshot_quant=layer.snapshot_quant,
        grad_bank_dtype=layer.grad_bank_dtype,
        implementation=layer.implementation,
    )
    shape = " x ".join(map(str, bank.shape))
    print(
        f"layer {place} (sdm), served by {plan.implementation!r}: {plan.steps} chunks of {plan.chunk} tokens\n"
        f"  banks {shape} {jnp.dtype(bank.dtype).name}: {_size(_bytes(bank))}\n"
        f"  kept for the backward: {_size(plan.saved_bytes)}, of which the snapshot {_size(plan.snapshot_bytes)}\n"
        f"  working memory: forward {_size(plan.saving_forward_working_bytes)}, backward "
        f"{_size(plan.backward_working_bytes)}, without differentiation {_size(plan.forward_working_bytes)}"
    )


def _bytes(tree: Any) -> int:
    return sum(x.size * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def _size(number: int | None) -> str:
    """Bytes for people."""
    if number is None:
        return "as the compiler decides"
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024  # type: ignore[assignment]
    return f"{number:.4g} GiB"
