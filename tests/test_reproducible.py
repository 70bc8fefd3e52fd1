"""The same bits whatever runs them: again, on more threads, in another process, differentiated or not."""

import functools
import hashlib
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from cases import SHAPE, Case, case_results, in_dtype, make_inputs
from tolerance import assert_same_bits, relative_error

import sdm_jax

# More tasks than threads: streams, and ranges of columns.
WIDE = Case("wide", lead=(3,), tokens=100, slots=300, width=600, writes=8, reads=8)
SLABS = Case("slabs", lead=(), tokens=2100, slots=40, width=3, writes=2, reads=2)


@functools.cache
def forward(implementation, differentiated=False, **settings):
    """A jitted call: values, and what a differentiated one keeps for its backward."""

    def call(inputs):
        return sdm_jax.write_read(**inputs, implementation=implementation, **settings)

    def saving(inputs):
        out, vjp = jax.vjp(lambda bank: call(inputs | {"bank": bank}), inputs["bank"])
        return *out, *jax.tree.leaves(vjp)

    return jax.jit(saving if differentiated else call)


def named(out):
    return {name: np.asarray(x) for name, x in zip(("y", "new_bank"), out, strict=False)}


@pytest.mark.parametrize("case", [SHAPE["width_64"], SHAPE["odd_chunk"], WIDE], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_differentiated_or_not(case, dtype):
    inputs = in_dtype(make_inputs(case)[0], dtype)
    want = named(forward(None)(inputs))
    for mode in ("none", "bf16", "fp8", "int4"):
        assert_same_bits(named(forward(None, differentiated=True, snapshot_quant=mode)(inputs)), want)


@pytest.mark.parametrize("tokens", [100, 2100])
def test_slabs_of_chunks(tokens):
    # A plain call works in slabs of 1024 tokens, a differentiated one keeps everything.
    inputs, _ = make_inputs(SLABS._replace(tokens=tokens))
    want = named(forward(None)(inputs))
    assert_same_bits(named(forward(None, differentiated=True)(inputs)), want)


@pytest.mark.parametrize("slots", [40, 300])
def test_slabs_of_chunks_in_plain_jax(slots):
    # Two programs that XLA compiles differently: close, not equal.
    inputs, _ = make_inputs(SLABS._replace(slots=slots))
    want = named(forward("xla")(inputs))
    got = named(forward("xla", differentiated=True)(inputs))
    assert all(relative_error(got[name], want[name]) <= 1e-6 for name in want)


def test_run_to_run(implementation):
    want = case_results(SHAPE["shared_by_some"], implementation)
    for _ in range(5):
        assert_same_bits(case_results(SHAPE["shared_by_some"], implementation), want)


def test_neighbours_do_not_matter():
    # A stream alone gives what it gives among others, where more tasks share the threads.
    inputs, _ = make_inputs(WIDE)
    plain = forward("cpu")
    want = [np.asarray(x) for x in plain(inputs)]
    for stream in range(3):
        alone = plain({name: x[stream : stream + 1] for name, x in inputs.items()})
        for got, x in zip(alone, want, strict=True):
            assert np.array_equal(got[0], x[stream], equal_nan=True)


def digest(implementation, case):
    return hashlib.sha256(b"".join(x.tobytes() for x in case_results(case, implementation).values())).hexdigest()


def pool_threads():
    """Threads of XLA's pool for work inside an operation."""
    names = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    return sum("XLAEigen" in name for name in names)


def report():
    digests = {str(case): digest("cpu", case) for case in (WIDE, SHAPE["odd_chunk"])}
    digests["xla"] = digest("xla", SHAPE["width_64"])
    print(json.dumps({"digests": digests, "threads": pool_threads(), "devices": len(jax.devices())}))


def test_number_of_threads():
    # XLA sizes its pool by NPROC, where that is set.
    def start(threads):
        environment = os.environ | {"NPROC": str(threads), "JAX_PLATFORMS": "cpu"}
        code = "import test_reproducible; test_reproducible.report()"
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment | {"PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path])},
            stdout=subprocess.PIPE,
        )

    started = [(threads, start(threads)) for threads in (1, 2, 5)]
    reports = [(threads, json.loads(process.communicate()[0])) for threads, process in started]
    assert [report["threads"] for _, report in reports] == [threads for threads, _ in reports]
    for _, report in reports[1:]:
        assert report["digests"] == reports[0][1]["digests"]
