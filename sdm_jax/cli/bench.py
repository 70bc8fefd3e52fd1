"""`python -m sdm_jax bench`: times of `write_read` and `decode_step`, implementations side by side."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sdm_jax
from sdm_jax import checks
from sdm_jax._primitive import choose_implementation
from sdm_jax.cli import _flags
from sdm_jax.cli._errors import CommandError

PASSES = ("forward", "gradients", "decode")
_DECODE_TOKENS = 64  # different ones
_GPU_DECODE_STEPS = 256  # in one call: long enough that the host has the time to start the next one
_COPIED_BYTES = {"cpu": 1 << 28, "gpu": 1 << 31}
_LEAST_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one call, by the symbols of the specification."""

    P: int
    T: int
    S: int
    D: int
    W: int
    R: int
    C: int = 64
    dtype: str = "float32"

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in dataclasses.asdict(self).items())

    def row_bytes(self, kind: str) -> int:
        """Bytes of the fewest bank rows that have to move, were no row named twice.

        Forward: the rows read by writes and reads, and the rows written. With gradients also the snapshot, and the
        backward's passes over the rows of the gradient, of the snapshot and of the bank.
        """
        passes = 7 * self.W + 4 * self.R if kind == "gradients" else 2 * self.W + self.R
        tokens = 1 if kind == "decode" else self.T
        return self.P * tokens * passes * self.D * jnp.dtype(self.dtype).itemsize


SHAPES = {
    "laptop": Shape(2, 2048, 16384, 256, 32, 32),
    "laptop_wide": Shape(1, 512, 16384, 1024, 64, 64),
    "small_head": Shape(32, 4096, 16384, 64, 32, 32, dtype="bfloat16"),
    "mid": Shape(8, 4096, 16384, 256, 64, 64, dtype="bfloat16"),
    "fp32": Shape(2, 8192, 65536, 1024, 64, 64),
    "flagship": Shape(2, 32768, 65536, 1024, 64, 64, dtype="bfloat16"),
    "flagship_b4": Shape(8, 8192, 65536, 1024, 64, 64, dtype="bfloat16"),
    "long_chunk": Shape(2, 32768, 65536, 1024, 64, 64, C=256, dtype="bfloat16"),
    "decode_8": Shape(8, 1, 65536, 1024, 64, 64, dtype="bfloat16"),
    "decode_64": Shape(64, 1, 65536, 1024, 64, 64, dtype="bfloat16"),
}
"""Named shapes; one of a single token is for decoding alone."""
_DEFAULT_SHAPES = {
    "cpu": ["laptop", "laptop_wide"],
    "gpu": ["small_head", "mid", "fp32", "flagship", "flagship_b4", "long_chunk", "decode_8", "decode_64"],
}


def add_parser(subparsers: Any) -> None:
    """Adds the command and its flags."""
    parser = subparsers.add_parser(
        "bench",
        help="time the operation, implementations side by side",
        description="Times write_read (jitted, the bank donated), all its gradients (value_and_grad_inplace of a sum "
        "of squares of the readings), and decode_step, on random product keys. Implementations take turns, and the "
        "median counts. Bytes are those of the fewest bank rows that have to move, beside a copy of memory measured "
        "in the same run: rows that a cache holds can be faster than that copy. Memory is that of the compiled "
        "program: arguments, results and temporaries.",
        epilog="Shapes: " + "; ".join(f"{name}: {shape}" for name, shape in SHAPES.items()),
    )
    platform = "of the machine"
    parser.add_argument("--shapes", help=f"names, with commas between (default: some {platform})", metavar="NAMES")
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        help="a shape of one's own, such as P=2,T=2048,S=16384,D=256,W=32,R=32,C=64,dtype=float32; the last three "
        "can be left out; may be given again",
        metavar="SIZES",
    )
    parser.add_argument(
        "--implementations", help=f"of cpu, cuda, xla, reference (default: those {platform})", metavar="NAMES"
    )
    parser.add_argument("--passes", default=",".join(PASSES), help="default: %(default)s", metavar="NAMES")
    parser.add_argument(
        "--seconds",
        default=1.0,
        help="time to measure each implementation of a pass (default: %(default)s)",
        type=_flags.positive,
        metavar="X",
    )
    parser.add_argument("--json", help="file to write all numbers to", metavar="FILE")
    parser.add_argument("--plot", help="file to draw the times to, such as bench.png", metavar="FILE")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the table, and writes the files; returns the exit status."""
    _check_files(arguments.json, arguments.plot)
    backend = jax.default_backend()
    shapes = _chosen_shapes(arguments, backend)
    passes = _names("--passes", arguments.passes, PASSES)
    implementations = _chosen_implementations(arguments.implementations, backend)
    for name, shape in shapes.items():
        for implementation in implementations:
            _check(name, shape, implementation)

    copy_rate = _copy_rate(backend)
    device = jax.devices()[0].device_kind
    print(
        f"{device}, {os.cpu_count()} CPU cores, jax {jax.__version__}, sdm_jax {sdm_jax.__version__}; memory copy "
        f"{copy_rate / 1e9:.1f} GB/s read and written"
    )
    rows: list[dict[str, Any]] = []
    for name, shape in shapes.items():
        print(f"\n{name}: {shape}")
        print(
            f"{'':10s} {'':10s} {'time':>12s} {'to xla':>8s} {'rows':>11s} {'of copy':>8s} {'memory':>11s}", flush=True
        )
        data = jax.jit(functools.partial(inputs, shape))()
        for kind in passes:
            if shape.T == 1 and kind != "decode":
                continue
            new = _measure(name, shape, data, kind, implementations, backend, arguments.seconds, copy_rate)
            rows += new
            for row in new:
                print(_line(row), flush=True)
    result = {
        "device": device,
        "cpu_cores": os.cpu_count(),
        "jax": jax.__version__,
        "sdm_jax": sdm_jax.__version__,
        "copy_bytes_per_second": copy_rate,
        "shapes": {name: dataclasses.asdict(shape) for name, shape in shapes.items()},
        "rows": rows,
    }
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)
    if arguments.plot:
        plot(result, arguments.plot)
    return 0


def _check_files(json_path: str | None, plot_path: str | None) -> None:
    """Raises CommandError now for files that could not be written after the measurement."""
    for flag, path in (("--json", json_path), ("--plot", plot_path)):
        if path is not None and not os.path.isdir(os.path.dirname(path) or "."):
            raise CommandError(f"{flag} {path}: there is no such folder")
    if plot_path is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise CommandError("--plot needs matplotlib: pip install 'sdm_jax[notebooks]'")
        from matplotlib.figure import Figure

        known = Figure().canvas.get_supported_filetypes()
        if os.path.splitext(plot_path)[1][1:] not in known:
            raise CommandError(f"--plot {plot_path}: must end in one of {', '.join(known)}")


def _names(flag: str, text: str, known: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in known:
            raise CommandError(f"{flag} must be of {', '.join(known)}; got {name!r}")
    return names


def _chosen_shapes(arguments: argparse.Namespace, backend: str) -> dict[str, Shape]:
    own = [parse_shape(text) for text in arguments.shape]
    if arguments.shapes is None:
        names = [] if own else _DEFAULT_SHAPES.get(backend, _DEFAULT_SHAPES["cpu"])
    else:
        names = _names("--shapes", arguments.shapes, list(SHAPES))
    chosen = {name: SHAPES[name] for name in names}
    return chosen | {f"own_{i}" if len(own) > 1 else "own": shape for i, shape in enumerate(own, 1)}


def parse_shape(text: str) -> Shape:
    """The shape that `--shape` describes. Raises CommandError for a text that describes none."""
    values: dict[str, Any] = {}
    fields = [field.name for field in dataclasses.fields(Shape)]
    for part in text.split(","):
        name, _, text_value = (x.strip() for x in part.partition("="))
        value: Any = text_value
        if name not in fields:
            raise CommandError(f"--shape {text}: must be of {', '.join(f'{f}=' for f in fields)}; got {part!r}")
        if name == "dtype":
            if value not in ("float32", "bfloat16"):
                raise CommandError(f"--shape {text}: dtype must be float32 or bfloat16, got {value!r}")
        else:
            try:
                value = _flags.positive_integer(value)
            except argparse.ArgumentTypeError:
                raise CommandError(f"--shape {text}: {name} must be an integer of at least 1, got {value!r}") from None
        values[name] = value
    values.setdefault("R", values.get("W"))
    missing = [name for name in ("P", "T", "S", "D", "W") if name not in values]
    if missing:
        raise CommandError(f"--shape {text}: {', '.join(missing)} missing")
    for name in ("W", "R"):
        if values[name] > values["S"]:
            raise CommandError(f"--shape {text}: {name} must be at most S, {values['S']}, got {values[name]}")
    return Shape(**values)


def _chosen_implementations(text: str | None, backend: str) -> list[str]:
    if text is not None:
        return _names("--implementations", text, checks.IMPLEMENTATIONS)
    best = choose_implementation(_platform(backend), None, jnp.float32)
    return list(dict.fromkeys((best, "xla")))


def _platform(backend: str) -> str:
    return "cuda" if backend == "gpu" else backend


def _check(name: str, shape: Shape, implementation: str) -> None:
    """Raises CommandError for what `write_read` refuses."""
    bank, tokens = jax.eval_shape(functools.partial(inputs, shape))
    settings: dict[str, Any] = {"chunk_size": shape.C, "implementation": implementation}
    try:
        sdm_jax.plan(bank, **tokens, platform=_platform(jax.default_backend()), **settings)
    except (TypeError, ValueError) as error:
        raise CommandError(f"shape {name}: {error}") from None


def inputs(shape: Shape, seed: int = 0) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A bank `[P, S, D]` and the tokens of `write_read`; ids are product-key selections of random scores.

    A shape of one token gets more, which `decode_step` takes one after another.
    """
    tokens = _DECODE_TOKENS if shape.T == 1 else shape.T
    side = next(n for n in range(math.isqrt(shape.S), 0, -1) if shape.S % n == 0)
    factors = (side, shape.S // side)
    keys = iter(jax.random.split(jax.random.key(seed), 8))

    def normal(*axes):
        return jax.random.normal(next(keys), (shape.P, *axes))

    def select(count):
        scores, ids = sdm_jax.product_key_topk(normal(tokens, sum(factors)), factors, count)
        return ids, jax.nn.softmax(scores).astype(shape.dtype)

    k_idx, k_val = select(shape.W)
    q_idx, q_val = select(shape.R)
    return normal(shape.S, shape.D).astype(shape.dtype), {
        "k_idx": k_idx,
        "k_val": k_val,
        "v": normal(tokens, shape.D).astype(shape.dtype),
        "beta": jax.random.uniform(next(keys), (shape.P, tokens, 1)),
        "g": -jax.random.uniform(next(keys), (shape.P, tokens, 1)),
        "q_idx": q_idx,
        "q_val": q_val,
    }


class _Contestant:
    """A compiled program and the bank that it hands on from call to call."""

    def __init__(self, program: Callable, bank: Any, *operands: Any, steps: int = 1):
        self._program = program
        self._bank = bank
        self._operands = operands
        self._steps = steps
        memory = program.memory_analysis()  # type: ignore[attr-defined]
        self.memory = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes
        )

    def __call__(self, calls: int = 1) -> float:
        """Seconds of one step, the mean of some calls."""
        start = time.perf_counter()
        for _ in range(calls):
            self._bank, results = None, self._program(self._bank, *self._operands)
            self._bank, results = results
        jax.block_until_ready((self._bank, results))
        return (time.perf_counter() - start) / calls / self._steps


def _build(shape: Shape, data: Any, kind: str, implementation: str, backend: str) -> _Contestant:
    bank, tokens = data
    bank = jnp.copy(bank)  # its own, to be donated
    steps = 1
    program: Callable[..., Any]
    operands: tuple[Any, ...] = (tokens,)
    if kind == "forward":

        def forward(bank, tokens):
            return sdm_jax.write_read(bank, **tokens, chunk_size=shape.C, implementation=implementation)[::-1]

        program = forward
    elif kind == "gradients":

        def loss(bank, floats, tokens):
            y, bank = sdm_jax.write_read(bank, **(tokens | floats), chunk_size=shape.C, implementation=implementation)
            return (y.astype(jnp.float32) ** 2).sum(), bank

        def gradients(bank, tokens):
            floats = {name: x for name, x in tokens.items() if not name.endswith("idx")}
            if implementation == "reference":
                grads = jax.grad(lambda *x: loss(*x)[0], argnums=(0, 1))(bank, floats, tokens)
            else:
                _, bank, grads = sdm_jax.value_and_grad_inplace(loss, argnums=(0, 1))(bank, floats, tokens)
            return bank, grads

        program = gradients

    else:
        few = min(_DECODE_TOKENS, tokens["v"].shape[1])
        steps = _GPU_DECODE_STEPS if backend == "gpu" else few
        operands = ([{name: x[:, t] for name, x in tokens.items()} for t in range(few)],)

        def step(bank, token):
            return sdm_jax.decode_step(bank, **token, implementation=implementation)[::-1]

        def decode(bank, tokens):
            if backend != "gpu":
                return jax.lax.scan(step, bank, jax.tree.map(lambda *x: jnp.stack(x), *tokens))
            # One after another without a loop, which XLA takes as one CUDA graph.
            readings = []
            for i in range(steps):
                bank, y = step(bank, tokens[i % few])
                readings.append(y)
            return bank, readings[-few:]

        program = decode

    compiled = jax.jit(program, donate_argnums=0).lower(bank, *operands).compile()
    return _Contestant(compiled, bank, *operands, steps=steps)


def _measure(name, shape, data, kind, implementations, backend, seconds, copy_rate) -> list[dict[str, Any]]:
    """One row of numbers for each implementation."""
    contestants: dict[str, _Contestant] = {}
    refusals: dict[str, str] = {}
    times: dict[str, list[float]] = {}
    calls: dict[str, int] = {}
    for implementation in implementations:
        try:
            contestant = _build(shape, data, kind, implementation, backend)
            contestant()
            once = contestant()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            refusals[implementation] = "out of memory"
            continue
        contestants[implementation] = contestant
        times[implementation] = []
        calls[implementation] = max(1, min(50, int(0.02 / once)))
    end = time.perf_counter() + seconds * len(contestants)
    while contestants and (
        time.perf_counter() < end or any(len(measured) < _LEAST_ROUNDS for measured in times.values())
    ):
        for implementation, contestant in contestants.items():
            times[implementation].append(contestant(calls[implementation]))
    medians = {implementation: statistics.median(measured) for implementation, measured in times.items()}
    rows = []
    for implementation in implementations:
        row: dict[str, Any] = {"shape": name, "pass": kind, "implementation": implementation}
        if implementation in refusals:
            rows.append(row | {"refused": refusals[implementation]})
            continue
        median = medians[implementation]
        rate = shape.row_bytes(kind) / median
        rows.append(
            row
            | {
                "seconds": median,
                "best_seconds": min(times[implementation]),
                "rounds": len(times[implementation]),
                "times_faster_than_xla": medians["xla"] / median if "xla" in medians else None,
                "row_bytes": shape.row_bytes(kind),
                "bytes_per_second": rate,
                "share_of_copy": rate / copy_rate,
                "memory_bytes": contestants[implementation].memory,
            }
        )
    return rows


def _line(row: dict[str, Any]) -> str:
    start = f"{row['pass']:10s} {row['implementation']:10s}"
    if "refused" in row:
        return f"{start} {row['refused']}"
    to_xla = row["times_faster_than_xla"]
    return (
        f"{start} {_duration(row['seconds']):>12s} {'' if to_xla is None else f'{to_xla:.2f} x':>8s} "
        f"{row['bytes_per_second'] / 1e9:6.1f} GB/s {row['share_of_copy']:8.0%} {row['memory_bytes'] / 2**20:7.0f} MiB"
    )


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def _copy_rate(backend: str) -> float:
    """Bytes read and written a second by a copy of memory, the best of several."""
    num_bytes = _COPIED_BYTES.get(backend, _COPIED_BYTES["cpu"])
    if backend == "cpu":
        # All cores: XLA would copy on one.
        cores = os.cpu_count() or 1
        pairs = [(np.zeros(num_bytes // cores, np.uint8), np.ones(num_bytes // cores, np.uint8)) for _ in range(cores)]

        def copy():
            threads = [threading.Thread(target=np.copyto, args=pair) for pair in pairs]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    else:
        array = jnp.ones(num_bytes // 4, jnp.float32)
        step = jax.jit(lambda x: x + 1)

        def copy():
            jax.block_until_ready(step(array))

    copy()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        copy()
        times.append(time.perf_counter() - start)
    return 2 * num_bytes / min(times)


def plot(result: dict[str, Any], path: str) -> None:
    """Draws the times of a result (as `--json` writes it) to a file: one panel a shape, bars by pass.

    A black line is the time of the fewest bytes at the rate of the measured copy.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shapes = [name for name in result["shapes"] if any(row["shape"] == name for row in result["rows"])]
    figure = Figure(figsize=(1 + 3.2 * len(shapes), 3.6))
    panels = figure.subplots(1, len(shapes), squeeze=False)
    colors: dict[str, Any] = {}
    for panel, name in zip(panels[0], shapes, strict=True):
        rows = [row for row in result["rows"] if row["shape"] == name and "seconds" in row]
        kinds = list(dict.fromkeys(row["pass"] for row in rows))
        implementations = list(dict.fromkeys(row["implementation"] for row in rows))
        width = 0.8 / max(1, len(implementations))
        for row in rows:
            color = colors.setdefault(row["implementation"], f"C{len(colors)}")
            x = kinds.index(row["pass"]) + (implementations.index(row["implementation"]) + 0.5) * width - 0.4
            panel.bar(x, 1e3 * row["seconds"], 0.9 * width, color=color)
        for i, kind in enumerate(kinds):
            fewest = next(row["row_bytes"] for row in rows if row["pass"] == kind) / result["copy_bytes_per_second"]
            panel.plot([i - 0.4, i + 0.4], [1e3 * fewest] * 2, color="black")
        panel.set_yscale("log")
        panel.set_xticks(range(len(kinds)), kinds)
        panel.set_title(name)
    panels[0][0].set_ylabel("milliseconds")
    handles: list[Any] = [Patch(color=color) for color in colors.values()]
    handles.append(Line2D([], [], color="black"))
    figure.legend(handles, [*colors, "fewest bytes at copy speed"], loc="lower center", ncols=len(handles))
    figure.suptitle(result["device"])
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=150)
