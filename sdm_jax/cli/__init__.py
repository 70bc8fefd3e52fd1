"""The command line of the package: `python -m sdm_jax COMMAND`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from sdm_jax.checks import UnsupportedConfigurationError
from sdm_jax.cli import bench, generate, info, train
from sdm_jax.cli._errors import CommandError

# A command is a module with `add_parser(subparsers)`, which sets `run(arguments) -> exit status`.
COMMANDS = (train, generate, bench, info)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` (by default the process's arguments) names; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m sdm_jax", description="Sparse Delta Memory for JAX.")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except (CommandError, UnsupportedConfigurationError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the output has left; Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
