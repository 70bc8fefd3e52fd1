"""`python -m sdm_jax generate`: continues a text with a trained model."""

from __future__ import annotations

import argparse
from typing import Any

from sdm_jax.cli import _flags
from sdm_jax.cli._errors import CommandError, need_modules


def add_parser(subparsers: Any) -> None:
    """Adds the command and its flags."""
    parser = subparsers.add_parser(
        "generate",
        help="continue a text with a trained model",
        description="Prints a prompt and its continuation by the newest checkpoint of a run, as it is sampled.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    integer, seed = _flags.natural, _flags.seed
    parser.add_argument(
        "--from", default="runs/sdm", dest="folder", type=_flags.path, help="folder of the run", metavar="DIR"
    )
    parser.add_argument("--prompt", default="def ", help="text to continue", metavar="TEXT")
    parser.add_argument("--length", default=512, help="tokens to sample", type=integer, metavar="N")
    parser.add_argument(
        "--temperature",
        default=0.7,
        help="0 takes the likeliest token, 1 samples the model",
        type=_flags.nonnegative,
        metavar="X",
    )
    parser.add_argument("--seed", default=0, help="of the samples", type=seed, metavar="N")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Loads the model and samples; returns the exit status."""
    need_modules("generate", "flax", "optax", "orbax")

    from sdm_jax.cli import _text
    from sdm_jax.cli._checkpoint import Checkpoints
    from sdm_jax.cli._training import make_trainer

    with Checkpoints(arguments.folder, create=False) as checkpoints:
        settings = argparse.Namespace(**checkpoints.settings())
        tokenizer, vocab_size = _text.load_tokenizer(settings.tokenizer)
        trainer = make_trainer(settings, vocab_size)
        state = checkpoints.restore(trainer.shapes())
    print_continuation(
        trainer.model(state), tokenizer, arguments.prompt, arguments.length, arguments.temperature, arguments.seed
    )
    return 0


def print_continuation(model: Any, tokenizer: Any, prompt: str, length: int, temperature: float, seed: int) -> None:
    """Prints the prompt and its continuation as it is sampled."""
    from sdm_jax.flax import generate_text

    prompt = prompt or "\n"
    try:
        pieces = generate_text(model, tokenizer, prompt, length, temperature=temperature, seed=seed)
    except (TypeError, ValueError) as error:
        raise CommandError(f"--prompt: {error}") from None
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print(flush=True)
