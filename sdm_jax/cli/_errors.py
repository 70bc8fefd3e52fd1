"""The error that a command reports to its user."""


class CommandError(Exception):
    """Something that the user can mend: reported as one line, without a traceback."""
