"""`python -m sdm_jax train`: trains a language model on text."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from sdm_jax.cli import _devices, _flags, _metrics, _model
from sdm_jax.cli._errors import CommandError, need_modules
from sdm_jax.cli.generate import print_continuation

# These concern one invocation and are not kept.
INVOCATION_FLAGS = ("config", "out", "resume", "overwrite", *_devices.FLAGS)


def add_parser(subparsers: Any) -> None:
    """Adds the command and its flags."""
    parser = subparsers.add_parser(
        "train",
        help="train a language model on text",
        description="Trains a language model of Sparse Delta Memory and sliding-window attention layers, saves "
        "checkpoints and metrics, says how its slots are used, and samples a continuation at the end.",
    )
    flags = _flags.Flags(parser)
    integer, natural = _flags.positive_integer, _flags.natural
    positive, nonnegative = _flags.positive, _flags.nonnegative

    flags.group("text and files")
    flags.add("--config", None, "YAML file of flags by their names; those given here come first", metavar="FILE")
    flags.add("--data", None, "a file or a folder (default: the standard library's sources)", metavar="PATH")
    flags.add(
        "--tokenizer",
        "bytes",
        "bytes, or MODULE:OBJECT, any object with encode, decode and vocab_size",
        metavar="NAME",
    )
    flags.add("--out", "runs/sdm", "folder of the checkpoints and metrics", type=_flags.path, metavar="DIR")
    flags.add(
        "--resume",
        False,
        "continue from the newest checkpoint in --out, with its settings where no flag is given",
        action="store_true",
    )
    flags.add("--overwrite", False, "start anew, and delete the checkpoints in --out", action="store_true")
    flags.add("--save-every", 250, "steps between checkpoints", type=integer, metavar="N")
    flags.add("--metrics", "csv", "csv, tensorboard or none", choices=_metrics.KINDS)

    flags.group("training")
    flags.add("--steps", 500, "steps in all", type=integer, metavar="N")
    flags.add("--batch-size", 2, "pieces of text that are computed together", type=integer, metavar="N")
    flags.add("--accumulate", 1, "batches of a step, one after another", type=integer, metavar="N")
    flags.add("--length", 512, "tokens of a piece", type=integer, metavar="N")
    flags.add("--learning-rate", 4e-3, "peak learning rate", type=positive, metavar="X")
    flags.add("--warmup-steps", 50, "steps up to the peak, before a cosine", type=natural, metavar="N")
    flags.add("--weight-decay", 0.1, "of matrices", type=nonnegative, metavar="X")
    flags.add("--clip-norm", 1.0, "largest norm of the gradient", type=positive, metavar="X")
    flags.add("--seed", 0, "of parameters, batches and samples", type=_flags.seed, metavar="N")
    flags.add("--validate-every", 250, "steps between validations", type=integer, metavar="N")
    flags.add("--validation-tokens", 65536, "tokens that a validation predicts", type=integer, metavar="N")

    model_flags = _model.add_flags(flags)
    _devices.add_flags(flags)

    flags.group("sample at the end")
    flags.add("--prompt", "def ", "text to continue", metavar="TEXT")
    flags.add("--temperature", 0.7, "0 takes the likeliest token, 1 samples the model", type=nonnegative, metavar="X")
    flags.add("--sample-length", 256, "tokens to sample; 0 for no sample", type=natural, metavar="N")

    def run_with_flags(arguments: argparse.Namespace) -> int:
        return run(flags.given(arguments), flags.defaults, [*model_flags, "tokenizer"])

    parser.set_defaults(run=run_with_flags)


def run(given: dict[str, Any], defaults: dict[str, Any], model_flags: list[str]) -> int:
    """Trains with the given flags over those of the checkpoint over the defaults; returns the exit status.

    `model_flags` are those that a resumed run cannot change.
    """
    need_modules("train", "flax", "optax", "orbax", "tqdm")
    # Loading Flax and orbax takes seconds, which help and usage errors need not wait for.
    from sdm_jax.cli._checkpoint import Checkpoints

    invocation = argparse.Namespace(**(defaults | given), given=given)
    if invocation.resume and invocation.overwrite:
        raise CommandError("--resume and --overwrite exclude each other")
    mesh = _devices.start(invocation)
    with Checkpoints(invocation.out, create=not invocation.resume) as checkpoints:
        settings = _settle(given, defaults, model_flags, checkpoints)
        _devices.check_batch_size(mesh, settings.batch_size)
        return _train(settings, invocation, checkpoints, mesh)


def _settle(given, defaults, model_flags, checkpoints) -> argparse.Namespace:
    """The settings of the run, after what the checkpoints say to starting or resuming."""
    flags = {**defaults, **given}
    latest = checkpoints.latest_step
    saved: dict[str, Any] = {}
    if flags["resume"]:
        saved = checkpoints.settings()
        for name in model_flags:
            if name in given and name in saved and given[name] != saved[name]:
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


def _train(settings, invocation, checkpoints, mesh) -> int:
    from sdm_jax.cli import _text
    from sdm_jax.cli._training import make_trainer
    from sdm_jax.flax import count_parameters

    tokenizer, vocab_size = _text.load_tokenizer(settings.tokenizer)
    of_bytes = settings.tokenizer == "bytes"
    text = _text.read_text(settings.data, None if of_bytes else tokenizer, vocab_size)
    for part in (text.train, text.validation):
        if len(part) <= settings.length:
            raise CommandError(
                f"{text.source} is too short: {len(text.train)} tokens to train on and {len(text.validation)} "
                f"to validate on, but each must be more than --length {settings.length}"
            )
    if vars(settings).setdefault("fingerprint", text.fingerprint) != text.fingerprint:
        if "data" not in invocation.given:
            raise CommandError(f"{text.source} has changed since the checkpoint: give --data to train on it")
        settings.fingerprint = text.fingerprint
    trainer = make_trainer(settings, vocab_size, mesh)
    pieces = list(
        _text.validation_batches(text.validation, settings.batch_size, settings.length + 1, settings.validation_tokens)
    )
    order_1 = _text.ByteBigram(text.train).bits_per_byte(pieces) if of_bytes else None

    state = checkpoints.restore(trainer.shapes()) if invocation.resume else trainer.init(settings.seed)
    count = count_parameters(trainer.model(state))
    _say(
        f"text: {text.source}, {text.train_bytes:,} bytes to train on and {text.validation_bytes:,} to validate on\n"
        f"model: {settings.layers}, {count.active:,} parameters and {count.bank:,} in initial banks"
    )
    if order_1 is not None:
        _say(f"order-1 byte model: {order_1:.3f} bits per byte on the validation text")

    validation = _Validation(trainer, pieces, text)
    kind = settings.metrics if _is_first_process() else "none"
    with _metrics.Metrics(kind, checkpoints.folder, int(state.step)) as metrics:
        state, stopped = _run_steps(trainer, state, text, settings, validation, checkpoints, metrics)
        step = int(state.step)
        checkpoints.save(step, state, vars(settings))
        _say(f"checkpoint: step {step} in {checkpoints.folder}")
        if stopped:
            _say("stopped; --resume continues")
            return 130
    if validation.step != step:  # a finished run that is resumed
        validation.run(state)
    model = trainer.model(trainer.local(state))
    if not _is_first_process():
        return 0
    _report(model, validation, pieces, order_1)
    if settings.sample_length:
        print("sample:", flush=True)
        print_continuation(
            model,
            tokenizer,
            settings.prompt,
            settings.sample_length,
            settings.temperature,
            settings.seed,
        )
    return 0


def _is_first_process() -> bool:
    import jax

    return jax.process_index() == 0


def _say(line: str) -> None:
    """Prints a line, once where there are several processes."""
    if _is_first_process():
        print(line, flush=True)


class _Validation:
    """The losses on the validation text, after `run`, by the position of a token in its piece."""

    def __init__(self, trainer, pieces, text):
        self._trainer = trainer
        self._pieces = pieces
        self._bits = len(text.validation) / text.validation_bytes / math.log(2)
        self.step: int | None = None

    def run(self, state) -> None:
        self.step = int(state.step)
        losses = [self._trainer.losses(state, self._trainer.place(piece)) for piece in self._pieces]
        self.losses = sum(losses) / len(losses)

    @property
    def loss(self) -> float:
        """Mean loss of a token, in nats."""
        return float(self.losses.mean())

    def bits(self, loss: float) -> float:
        """A loss of a token, in nats, as bits per byte."""
        return loss * self._bits

    def metrics(self) -> dict[str, float]:
        return {"validation_loss": self.loss, "validation_bits_per_byte": self.bits(self.loss)}


def _run_steps(trainer, state, text, settings, validation, checkpoints, metrics):
    """The steps that are left: the state after them, and whether the user stopped them."""
    from tqdm import tqdm

    from sdm_jax.cli._text import draw_batch

    first = int(state.step)
    pieces, length = settings.accumulate * settings.batch_size, settings.length
    with (
        _interruption() as interrupted,
        tqdm(
            total=settings.steps, initial=first, unit="step", dynamic_ncols=True, disable=not _is_first_process()
        ) as bar,
    ):
        smooth, started, paused = None, None, 0.0
        for step in range(first, settings.steps):
            batch = draw_batch(text.train, pieces, length + 1, settings.seed, step)
            state, values = trainer.step(state, trainer.place(batch.reshape(settings.accumulate, -1, length + 1)))
            values = {name: float(value) for name, value in values.items()}
            loss = values["loss"]
            if not math.isfinite(loss):
                raise CommandError(f"the loss of step {step + 1} is {loss}: lower --learning-rate")
            smooth = loss if smooth is None else 0.9 * smooth + 0.1 * loss
            shown = {"loss": f"{smooth:.3f}", "bits/byte": f"{validation.bits(smooth):.3f}"}
            if started is None:
                started = time.perf_counter()  # after the first step, which compiles
            else:
                speed = (step - first) * pieces * length / (time.perf_counter() - started - paused)
                values["tokens_per_second"] = speed
                shown["tokens/s"] = f"{speed:,.0f}"
            bar.set_postfix(shown, refresh=False)
            bar.update()

            pause = time.perf_counter()
            done = step + 1
            if done % settings.validate_every == 0 or done == settings.steps:
                validation.run(state)
                values |= validation.metrics()
                line = (
                    f"step {done}: loss {smooth:.3f}, {validation.bits(smooth):.3f} bits per byte; validation "
                    f"loss {validation.loss:.3f}, {validation.bits(validation.loss):.3f} bits per byte"
                )
                if _is_first_process():
                    bar.write(line)
            metrics.write(done, values)
            if step == 0:
                # What --overwrite replaces, now that a whole step has shown the settings and the text to be right.
                checkpoints.clear()
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


def _report(model, validation, pieces, order_1) -> None:
    """What the validation text says about the model: its loss, by position too, and the use of its slots."""
    from sdm_jax.flax.statistics import slot_statistics

    bits = validation.bits(validation.loss)
    line = f"validation: {bits:.3f} bits per byte (loss {validation.loss:.3f})"
    if order_1 is not None:
        where = "below" if bits < order_1 else "above"
        line += f", {abs(order_1 - bits):.3f} {where} the order-1 byte model's {order_1:.3f}"
    print(line)
    spans, start, length = [], 0, len(validation.losses)
    while start < length:
        end = min(max(8, 2 * start), length)
        mean = float(validation.losses[start:end].mean())
        spans.append(f"{start + 1}-{end}: {validation.bits(mean):.3f}")
        start = end
    print("bits per byte by position: " + ", ".join(spans))
    for s in slot_statistics(model, (piece[:, :-1] for piece in pieces)):
        for head in range(len(s.written)):
            print(
                f"slots of layer {s.layer}, head {head}: written {s.written[head]:.1%}, read {s.read[head]:.1%}; "
                f"entropy of writes {s.write_entropy[head]:.3f}, of reads {s.read_entropy[head]:.3f} of an even use; "
                f"write strength {s.write_strength[head]:.3f}, forget gate {s.forget_gate[head]:.3f}; "
                f"row norm {s.initial_norm[head]:.3f} at first, {s.final_norm[head]:.3f} at last"
            )
