"""The flags of a model, and the model that they describe."""

from __future__ import annotations

import argparse
import math
from typing import Any

from sdm_jax.checks import IMPLEMENTATIONS
from sdm_jax.cli import _flags
from sdm_jax.cli._errors import CommandError

# The flags of the memory, by the settings of `SparseDeltaMemory`.
_MEMORY = {
    "num_heads": "memory_heads",
    "slots_per_head": "slots",
    "num_writes": "writes",
    "num_reads": "reads",
    **{
        name: name
        for name in (
            "product_key_factors",
            "write_activation",
            "read_activation",
            "write_scale",
            "read_scale",
            "normalize_readings",
            "output_gate",
            "query_batchnorm",
            "key_weighted_decay",
            "learned_bank",
            "snapshot_quant",
            "grad_bank_dtype",
            "chunk_size",
            "implementation",
        )
    },
}
# These change how the model is computed; with other values of the rest a checkpoint's arrays would be another model's.
_COMPUTATION = ("snapshot_quant", "grad_bank_dtype", "chunk_size", "implementation", "remat", "dtype")


def add_flags(flags: _flags.Flags) -> list[str]:
    """Adds the flags of a model; returns those of which a checkpoint holds the arrays."""
    integer, number, boolean = _flags.positive_integer, _flags.number, argparse.BooleanOptionalAction
    before = set(flags.defaults)
    flags.group("model")
    flags.add(
        "--layers",
        "swa,swa,sdm,swa",
        "mixers of the blocks: sdm, swa (sliding-window attention), attention",
        metavar="KINDS",
    )
    flags.add("--dim", 128, "width of the features", type=integer, metavar="N")
    flags.add("--num-heads", 4, "attention heads", type=integer, metavar="N")
    flags.add("--window", 64, "tokens that a swa layer sees", type=integer, metavar="N")
    flags.add("--hidden-dim", None, "width of the SwiGLU layers (default: 8/3 of --dim)", type=integer, metavar="N")
    flags.add("--tie-head", True, "the head is the embedding's matrix", action=boolean)
    flags.add("--dtype", "float32", "of the computation; parameters are float32", choices=("float32", "bfloat16"))
    flags.add("--remat", False, "the backward computes each block again, to save memory", action=boolean)

    flags.group("memory (sdm layers)")
    flags.add("--slots", 4096, "slots of a head, a square number", type=integer, metavar="N")
    flags.add("--memory-heads", 1, "heads of the memory", type=integer, metavar="N")
    flags.add("--writes", 16, "slots that a token writes in a head", type=integer, metavar="N")
    flags.add("--reads", 16, "slots that a token reads in a head", type=integer, metavar="N")
    flags.add(
        "--product-key-factors",
        None,
        "sizes of the factors, whose product is --slots (default: two equal ones)",
        type=_flags.integers,
        metavar="N,N...",
    )
    flags.add("--query-batchnorm", True, "BatchNorm of the write and read scores", action=boolean)
    flags.add("--write-activation", "softmax", "how write scores become weights", metavar="NAME")
    flags.add("--read-activation", "softmax", "how read scores become weights", metavar="NAME")
    flags.add("--write-scale", 1.0, "factor of the write scores", type=number, metavar="X")
    flags.add("--read-scale", 1.0, "factor of the read scores", type=number, metavar="X")
    flags.add("--normalize-readings", True, "LayerNorm of the readings", action=boolean)
    flags.add("--output-gate", True, "gate the readings", action=boolean)
    flags.add("--key-weighted-decay", False, "one forget gate a write", action=boolean)
    flags.add("--learned-bank", True, "learn the initial bank; else zeros", action=boolean)
    flags.add("--chunk-size", 64, "tokens that the memory handles together", type=integer, metavar="N")
    flags.add("--snapshot-quant", "none", "the backward's snapshot: none, bf16, fp8 or int4", metavar="MODE")
    flags.add("--grad-bank-dtype", None, "float32: carry a bfloat16 bank's gradient so", metavar="NAME")
    flags.add(
        "--implementation",
        None,
        f"{', '.join(IMPLEMENTATIONS)} (default: the platform's best)",
        choices=IMPLEMENTATIONS,
        metavar="NAME",
    )
    return [name for name in flags.defaults if name not in before and name not in _COMPUTATION]


def model_config(settings: argparse.Namespace, vocab_size: int) -> Any:
    """The `LanguageModelConfig` that the settings describe.

    Raises:
        CommandError: they describe none; the message names the flag.
    """
    from sdm_jax.flax import LanguageModelConfig, _settings, attention
    from sdm_jax.flax.layer import MAX_SLOTS
    from sdm_jax.product_key import check_count

    kinds = tuple(kind.strip() for kind in settings.layers.split(","))
    # What the model would name otherwise than the flags do.
    try:
        if set(kinds) & {"swa", "attention"}:
            attention.attention_heads(settings.num_heads, settings.dim, "--num-heads", "--dim")
        if "sdm" in kinds:
            _settings.divisor("--memory-heads", settings.memory_heads, "--dim", settings.dim)
            if settings.product_key_factors is None:
                _settings.square("--slots", settings.slots, MAX_SLOTS)
            elif math.prod(settings.product_key_factors) != settings.slots:
                raise ValueError(
                    f"--slots must be the product of --product-key-factors, {math.prod(settings.product_key_factors)}"
                    f", got {settings.slots}"
                )
            check_count("--writes", settings.writes, settings.slots)
            check_count("--reads", settings.reads, settings.slots)
    except (TypeError, ValueError) as error:
        raise CommandError(str(error)) from None
    return LanguageModelConfig(
        layers=kinds,
        dim=settings.dim,
        vocab_size=vocab_size,
        num_heads=settings.num_heads,
        window=settings.window,
        hidden_dim=settings.hidden_dim,
        memory={name: getattr(settings, flag) for name, flag in _MEMORY.items()},
        tie_head=settings.tie_head,
        remat=settings.remat,
        dtype=settings.dtype,
    )


def name_the_flag(error: Exception, settings: argparse.Namespace) -> CommandError:
    """The error of a model's setting as that of the flag of the same name."""
    message = str(error)
    name = message.split(" ", 1)[0].split("[", 1)[0]
    if name in _MEMORY:
        name, message = _MEMORY[name], message.replace(name, _MEMORY[name], 1)
    if name in vars(settings):
        message = "--" + name.replace("_", "-") + message.removeprefix(name)
    return CommandError(message)
