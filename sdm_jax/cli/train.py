"""`python -m sdm_jax train`: trains a byte-level language model on text."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from sdm_jax.cli import _flags
from sdm_jax.cli._errors import CommandError

# Of these a checkpoint holds arrays: another value would be another model.
MODEL_FLAGS = (
    "layers",
    "dim",
    "num_heads",
    "window",
    "hidden_dim",
    "slots",
    "memory_heads",
    "writes",
    "reads",
    "query_batchnorm",
)
# These concern one invocation and are not kept.
INVOCATION_FLAGS = ("out", "resume", "overwrite", "prompt", "temperature", "sample_length")


def add_parser(subparsers: Any) -> None:
    """Adds the command and its flags."""
    parser = subparsers.add_parser(
        "train",
        help="train a byte-level language model on text",
        description="Trains a byte-level language model of Sparse Delta Memory and sliding-window attention "
        "layers, saves checkpoints, and samples a continuation at the end.",
    )
    flags = _flags.Flags(parser)
    integer, natural = _flags.positive_integer, _flags.natural
    positive, nonnegative = _flags.positive, _flags.nonnegative

    flags.group("text and checkpoints")
    flags.add("--data", None, "a file or a folder (default: the standard library's sources)", metavar="PATH")
    flags.add("--out", "runs/sdm", "folder of the checkpoints", metavar="DIR")
    flags.add(
        "--resume",
        False,
        "continue from the newest checkpoint in --out, with its settings where no flag is given",
        action="store_true",
    )
    flags.add("--overwrite", False, "start anew, and delete the checkpoints in --out", action="store_true")
    flags.add("--save-every", 250, "steps between checkpoints", type=integer, metavar="N")

    flags.group("training")
    flags.add("--steps", 500, "steps in all", type=integer, metavar="N")
    flags.add("--batch-size", 2, "pieces of text a step", type=integer, metavar="N")
    flags.add("--length", 512, "bytes of a piece", type=integer, metavar="N")
    flags.add("--learning-rate", 4e-3, "peak learning rate", type=positive, metavar="X")
    flags.add("--warmup-steps", 50, "steps up to the peak", type=natural, metavar="N")
    flags.add("--weight-decay", 0.1, "of matrices", type=nonnegative, metavar="X")
    flags.add("--clip-norm", 1.0, "largest norm of the gradient", type=positive, metavar="X")
    flags.add("--seed", 0, "of parameters, batches and samples", type=_flags.seed, metavar="N")
    flags.add("--validate-every", 250, "steps between validations", type=integer, metavar="N")
    flags.add("--validation-bytes", 65536, "bytes that a validation predicts", type=integer, metavar="N")

    flags.group("model")
    flags.add(
        "--layers",
        "swa,swa,sdm,swa",
        "mixers of the blocks: sdm, swa (sliding-window attention), attention",
        metavar="KINDS",
    )
    flags.add("--dim", 128, "width of the features", type=integer, metavar="N")
    flags.add("--num-heads", 4, "attention heads", type=integer, metavar="N")
    flags.add("--window", 64, "bytes that a swa layer sees", type=integer, metavar="N")
    flags.add("--hidden-dim", None, "width of the SwiGLU layers (default: 8/3 of --dim)", type=integer, metavar="N")
    flags.add("--slots", 4096, "slots of a head of the memory, a square number", type=integer, metavar="N")
    flags.add("--memory-heads", 1, "heads of the memory", type=integer, metavar="N")
    flags.add("--writes", 16, "slots that a byte writes in a head", type=integer, metavar="N")
    flags.add("--reads", 16, "slots that a byte reads in a head", type=integer, metavar="N")
    flags.add(
        "--query-batchnorm",
        True,
        "BatchNorm of the write and read scores",
        action=argparse.BooleanOptionalAction,
    )
    flags.add("--chunk-size", 64, "bytes that the memory handles together", type=integer, metavar="N")
    flags.add("--snapshot-quant", "none", "the backward's snapshot: none, bf16, fp8 or int4", metavar="MODE")
    flags.add("--implementation", None, "cpu, cuda or xla (default: the platform's best)", metavar="NAME")

    flags.group("sample at the end")
    flags.add("--prompt", "def ", "text to continue", metavar="TEXT")
    flags.add("--temperature", 0.7, "0 takes the likeliest byte, 1 samples the model", type=nonnegative, metavar="X")
    flags.add("--sample-length", 256, "bytes to sample; 0 for no sample", type=natural, metavar="N")

    def run_with_defaults(arguments: argparse.Namespace) -> int:
        given = {name: value for name, value in vars(arguments).items() if name in flags.defaults}
        return run(given, flags.defaults)

    parser.set_defaults(run=run_with_defaults)


def run(given: dict[str, Any], defaults: dict[str, Any]) -> int:
    """Trains with the given flags over those of the checkpoint over the defaults; returns the exit status."""
    modules = ("flax", "optax", "orbax", "tqdm")
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"train needs {', '.join(missing)}: pip install 'sdm_jax[flax]'")
    # Loading Flax and orbax takes seconds, which help and usage errors need not wait for.
    from sdm_jax.cli._checkpoint import Checkpoints

    invocation = argparse.Namespace(**(defaults | given), given=given)
    with Checkpoints(invocation.out) as checkpoints:
        settings = _settle(given, defaults, checkpoints)
        return _train(settings, invocation, checkpoints)


def _settle(given, defaults, checkpoints) -> argparse.Namespace:
    """The settings of the run, after what the checkpoints say to starting or resuming."""
    flags = {**defaults, **given}
    latest = checkpoints.latest_step
    saved: dict[str, Any] = {}
    if flags["resume"] and flags["overwrite"]:
        raise CommandError("--resume and --overwrite exclude each other")
    if flags["resume"]:
        if latest is None:
            raise CommandError(f"--resume: there is no checkpoint in {checkpoints.folder}")
        saved = checkpoints.settings()
        for name in MODEL_FLAGS:
            if name in given and given[name] != saved[name]:
                raise CommandError(
                    f"--{name.replace('_', '-')} {given[name]}: the checkpoint in {checkpoints.folder} "
                    f"was made with {saved[name]}"
                )
    elif latest is not None and not flags["overwrite"]:
        raise CommandError(
            f"{checkpoints.folder} holds a checkpoint of step {latest}: continue it with --resume, "
            "replace it with --overwrite, or choose another --out"
        )
    flags = {**defaults, **saved, **given}
    if flags["data"] is not None:
        # A resumed run may start in another folder.
        flags["data"] = os.path.abspath(os.path.expanduser(flags["data"]))
    settings = {name: value for name, value in flags.items() if name not in INVOCATION_FLAGS}
    return argparse.Namespace(**settings)


def _train(settings, invocation, checkpoints) -> int:
    import jax

    from sdm_jax.cli import _text

    text = _text.read_text(settings.data)
    for part in (text.train, text.validation):
        if len(part) <= settings.length:
            raise CommandError(
                f"{text.source} is too short: {len(text.train)} bytes to train on and {len(text.validation)} "
                f"to validate on, but each must be more than --length {settings.length}"
            )
    if vars(settings).setdefault("fingerprint", text.fingerprint) != text.fingerprint:
        if "data" not in invocation.given:
            raise CommandError(f"{text.source} has changed since the checkpoint: give --data to train on it")
        settings.fingerprint = text.fingerprint
    trainer = _trainer(settings)
    pieces = list(
        _text.validation_batches(text.validation, settings.batch_size, settings.length + 1, settings.validation_bytes)
    )
    order_1 = _text.ByteBigram(text.train).bits_per_byte(pieces)

    if invocation.resume:
        state = checkpoints.restore(jax.eval_shape(trainer.init, settings.seed))
    else:
        state = trainer.init(settings.seed)
        # Now that nothing is left that could be wrong with the settings or the text.
        checkpoints.clear()
    print(
        f"text: {text.source}, {len(text.train):,} bytes to train on and {len(text.validation):,} "
        "to validate on\n"
        f"model: {settings.layers}, {trainer.num_parameters(state)}\n"
        f"order-1 byte model: {order_1:.3f} bits per byte on the validation text",
        flush=True,
    )

    def validate(state):
        losses = [float(trainer.loss(state, piece)) for piece in pieces]
        return sum(losses) / len(losses)

    state, stopped = _run_steps(trainer, state, text, settings, validate, checkpoints)
    step = int(state.step)
    checkpoints.save(step, state, vars(settings))
    print(f"checkpoint: step {step} in {checkpoints.folder}", flush=True)
    if stopped:
        print("stopped; --resume continues", flush=True)
        return 130

    bits = validate(state) / math.log(2)
    print(
        f"validation: {bits:.3f} bits per byte (loss {bits * math.log(2):.3f}), {abs(order_1 - bits):.3f} "
        f"{'below' if bits < order_1 else 'above'} the order-1 byte model's {order_1:.3f}",
        flush=True,
    )
    if invocation.sample_length:
        _print_sample(trainer.model(state), settings.seed, invocation)
    return 0


def _trainer(settings):
    from sdm_jax.cli._training import OptimizerConfig, Trainer
    from sdm_jax.flax import LanguageModelConfig

    model_config = LanguageModelConfig(
        layers=tuple(kind.strip() for kind in settings.layers.split(",")),
        dim=settings.dim,
        num_heads=settings.num_heads,
        window=settings.window,
        hidden_dim=settings.hidden_dim,
        memory={
            "num_heads": settings.memory_heads,
            "slots_per_head": settings.slots,
            "num_writes": settings.writes,
            "num_reads": settings.reads,
            "query_batchnorm": settings.query_batchnorm,
            "chunk_size": settings.chunk_size,
            "snapshot_quant": settings.snapshot_quant,
            "implementation": settings.implementation,
        },
    )
    optimizer_config = OptimizerConfig(
        steps=settings.steps,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        clip_norm=settings.clip_norm,
    )
    try:
        return Trainer(model_config, optimizer_config)
    except (TypeError, ValueError) as error:
        raise CommandError(f"settings of the model: {error}") from error


def _run_steps(trainer, state, text, settings, validate, checkpoints):
    """The steps that are left: the state after them, and whether the user stopped them."""
    from tqdm import tqdm

    from sdm_jax.cli._text import draw_batch

    first = int(state.step)
    with (
        _interruption() as interrupted,
        tqdm(total=settings.steps, initial=first, unit="step", dynamic_ncols=True) as bar,
    ):
        smooth, started = None, None
        for step in range(first, settings.steps):
            batch = draw_batch(text.train, settings.batch_size, settings.length + 1, settings.seed, step)
            state, loss = trainer.step(state, batch)
            loss = float(loss)
            if not math.isfinite(loss):
                raise CommandError(f"the loss of step {step + 1} is {loss}: lower --learning-rate")
            smooth = loss if smooth is None else 0.9 * smooth + 0.1 * loss
            shown = {"loss": f"{smooth:.3f}", "bits/byte": f"{smooth / math.log(2):.3f}"}
            if started is None:
                started = time.perf_counter()  # after the first step, which compiles
                paused = 0.0
            else:
                done = (step - first) * settings.batch_size * settings.length
                shown["tokens/s"] = f"{done / (time.perf_counter() - started - paused):,.0f}"
            bar.set_postfix(shown, refresh=False)
            bar.update()

            pause = time.perf_counter()
            done = step + 1
            if done % settings.validate_every == 0 and done < settings.steps:
                validation = validate(state)
                bar.write(
                    f"step {done}: loss {smooth:.3f}, {smooth / math.log(2):.3f} bits per byte; validation "
                    f"loss {validation:.3f}, {validation / math.log(2):.3f} bits per byte"
                )
            if done % settings.save_every == 0 and done < settings.steps:
                checkpoints.save(done, state, vars(settings))
            paused += time.perf_counter() - pause
            if interrupted():
                return state, True
    return state, False


@contextlib.contextmanager
def _interruption() -> Iterator[Callable[[], bool]]:
    """Within it, Ctrl-C waits for the end of a step; a second one interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    interrupted = False

    def handle(number, frame):
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, previous)


def _print_sample(model, seed, invocation):
    import numpy as np

    from sdm_jax.flax import generate

    prompt = invocation.prompt.encode() or b"\n"
    tokens = generate(
        model,
        np.frombuffer(prompt, np.uint8).astype(np.int32)[None],
        invocation.sample_length,
        temperature=invocation.temperature,
        seed=seed,
    )
    continuation = bytes(np.asarray(tokens[0], np.uint8))
    print(f"sample:\n{(prompt + continuation).decode(errors='replace')}", flush=True)
