"""The error that a command reports to its user."""

import importlib.util


class CommandError(Exception):
    """Something that the user can mend: reported as one line, without a traceback."""


def need_modules(command: str, *names: str) -> None:
    """Raises a CommandError if modules that the command needs are not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"{command} needs {', '.join(missing)}: pip install 'sdm_jax[flax]'")
