"""The devices of a run: a mesh of them, in one process or several."""

from __future__ import annotations

import argparse
import contextlib
import math
from typing import Any

from sdm_jax.cli import _flags
from sdm_jax.cli._errors import CommandError

AXES = ("data", "model")
FLAGS = ("mesh", "coordinator", "processes", "process_id")


def add_flags(flags: _flags.Flags) -> None:
    flags.group("devices")
    flags.add(
        "--mesh",
        None,
        "devices, e.g. data=2,model=2: over data a batch is split, over model the memory's heads, or its columns where "
        "model does not divide the heads (on the CPU, that many devices are made)",
        type=_mesh,
        metavar="SIZES",
    )
    flags.add("--coordinator", None, "several processes: where the first one listens", metavar="HOST:PORT")
    flags.add("--processes", 1, "how many there are", type=_flags.positive_integer, metavar="N")
    flags.add("--process-id", 0, "which one this is", type=_flags.natural, metavar="N")


def _mesh(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES or name in sizes or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(f"must be like data=2,model=2, got {text!r}")
        sizes[name] = int(size)
    return sizes


def check_batch_size(mesh: Any, batch_size: int) -> None:
    """A batch is split evenly over the mesh."""
    size = mesh.shape["data"] if mesh is not None else 1
    if batch_size % size:
        raise CommandError(
            f"--batch-size {batch_size} must be a multiple of data={size} of --mesh; the next is "
            f"{-(-batch_size // size) * size}"
        )


def start(invocation: argparse.Namespace) -> Any:
    """Joins the other processes, if there are any, and makes the mesh that the flags ask for, or None.

    Nothing may have used a device before.
    """
    import jax

    sizes = invocation.mesh
    count = math.prod(sizes.values()) if sizes else 1
    processes = invocation.processes
    if processes == 1 and (invocation.process_id > 0 or "processes" not in invocation.given):
        for name in ("coordinator", "process_id"):
            if name in invocation.given:
                raise CommandError(f"--{name.replace('_', '-')} {invocation.given[name]} needs --processes above 1")
    if processes > 1:
        if invocation.coordinator is None or invocation.process_id >= processes:
            raise CommandError(
                f"--processes {processes} needs --coordinator, and --process-id from 0 to {processes - 1}"
            )
        if count % processes:
            raise CommandError(f"--processes {processes} must divide the {count} devices of --mesh")
    if count > 1:
        with contextlib.suppress(RuntimeError):  # the devices are there already
            jax.config.update("jax_num_cpu_devices", count // processes)
    if processes > 1:
        jax.distributed.initialize(invocation.coordinator, processes, invocation.process_id)
    if not sizes:
        return None
    if jax.device_count() < count:
        raise CommandError(f"--mesh asks for {count} devices, but there are {jax.device_count()}")
    shape = tuple(sizes.get(name, 1) for name in AXES)
    kinds = (jax.sharding.AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, axis_types=kinds, devices=jax.devices()[:count])
