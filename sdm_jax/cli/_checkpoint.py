"""Checkpoints of a run: the training state and the settings that made it, through orbax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from sdm_jax.cli._errors import CommandError
from sdm_jax.cli._training import needed_settings


class Checkpoints:
    """The checkpoints in a folder; a context manager.

    Arguments:
        folder: where they are.
        create: make the folder if there is none; else that is an error.
        keep: how many of the newest are kept.
    """

    def __init__(self, folder: str, create: bool = True, keep: int = 2):
        self.folder = Path(folder).expanduser().absolute()
        if not create and not self.folder.is_dir():
            raise CommandError(f"there is no folder {self.folder}")
        if self.folder.exists() and not self.folder.is_dir():
            raise CommandError(f"{self.folder} is not a folder")
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        handlers = {"state": ocp.StandardCheckpointHandler(), "settings": ocp.JsonCheckpointHandler()}
        try:
            self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)
        except OSError as error:
            raise CommandError(f"{folder}: {error.strerror}") from None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        self._manager.close()

    @property
    def latest_step(self) -> int | None:
        """The newest checkpoint's step; None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, settings: dict[str, Any]) -> None:
        """Saves a checkpoint, unless this step has one."""
        if step == self.latest_step:
            return
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), settings=ocp.args.JsonSave(settings))
        self._manager.save(step, args=items)
        self._manager.wait_until_finished()

    def settings(self) -> dict[str, Any]:
        """The settings saved with the newest checkpoint."""
        if self.latest_step is None:
            raise CommandError(f"there is no checkpoint in {self.folder}")
        settings = self._restore("settings", ocp.args.JsonRestore())
        if not isinstance(settings, dict):
            raise self._unreadable(f"its settings are a {type(settings).__name__}")
        missing = [name for name in needed_settings() if name not in settings]
        if missing:
            raise self._unreadable(f"its settings lack {', '.join(missing)}")
        return settings

    def restore(self, like: Any) -> Any:
        """The newest state; `like` is a pytree of shapes like it, with shardings, or None for plain dicts."""
        return self._restore("state", ocp.args.StandardRestore(like))

    def _restore(self, item: str, how: Any) -> Any:
        try:
            return self._manager.restore(self.latest_step, args=ocp.args.Composite(**{item: how}))[item]
        except Exception as error:  # whatever the damage makes orbax raise
            raise self._unreadable(type(error).__name__) from error

    def _unreadable(self, why: str) -> CommandError:
        step = self.latest_step
        others = [other for other in self._manager.all_steps() if other != step]
        older = f" to go back to step {max(others)}" if others else ""
        return CommandError(
            f"the checkpoint of step {step} in {self.folder} cannot be read; it is damaged, or of another version "
            f"of this package ({why}). Delete {self.folder / str(step)}{older}"
        )

    def clear(self) -> None:
        """Deletes all checkpoints."""
        for step in self._manager.all_steps():
            self._manager.delete(step)
