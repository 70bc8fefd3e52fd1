"""One call of every kind at a named shape with few tokens, for a kernel profiler.

ncu --clock-control none ... python tests/gpu/profile.py flagship 1024
"""

import pathlib
import sys

import jax

import sdm_jax

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))
from gpu import SHAPES, inputs

(P, _, S, D, W, C, dtype), *_ = SHAPES[sys.argv[1]]
bank, tokens = inputs(P, int(sys.argv[2]), S, D, W, dtype)
floats = {n: x for n, x in tokens.items() if not n.endswith("idx")}


@jax.jit
def both(bank, floats):
    def f(b, x):
        return sdm_jax.write_read(b, **(tokens | x), chunk_size=C, implementation="cuda")

    (y, new_bank), vjp = jax.vjp(f, bank, floats)
    return vjp((y, new_bank))


jax.block_until_ready(both(bank, floats))
