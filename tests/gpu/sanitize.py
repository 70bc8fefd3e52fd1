"""Small calls of every kernel, for compute-sanitizer:

    XLA_PYTHON_CLIENT_ALLOCATOR=platform compute-sanitizer --tool TOOL python tests/gpu/sanitize.py [CASE ...]

with memcheck, racecheck, synccheck, or initcheck (which also needs --check-api-memory-access no: between the
calls XLA copies workspaces that nothing has written yet). Every custom call is a program of its own, so that
with the platform allocator each operand, result and workspace is an allocation of its own: an access past any
end is seen, and so is a value that nothing wrote.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from sdm_jax import _calls, _cuda_calls

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from check import GPU, make, steps

# name: settings of check.make, chunk, snapshot mode, dtype
CASES = {
    "vector": (dict(D=72, W=6, R=5, S=60, T=70), 16, "none", jnp.bfloat16),
    "float32": (dict(D=68, W=5, R=7, S=300, T=50, G=5), 32, "none", jnp.float32),
    "odd": (dict(D=17, W=3, R=9, S=40, T=40, G=3), 16, "fp8", jnp.bfloat16),
    "int4": (dict(D=64, W=4, R=4, S=9, T=33), 16, "int4", jnp.float32),
    "odd_chunk": (dict(D=64, W=4, R=3, S=40, T=60), 23, "none", jnp.bfloat16),
    "one": (dict(P=(1,), D=1, W=1, R=1, S=1, T=17), 16, "none", jnp.float32),
    "long_chunk": (dict(P=(1,), D=136, W=8, R=8, S=500, T=300), 256, "bf16", jnp.float32),
    "wide_slices": (dict(D=128, W=8, R=9, S=200, T=150), 70, "none", jnp.bfloat16),
    "many_entries": (dict(P=(1,), D=64, W=256, R=200, S=400, T=20), 16, "none", jnp.bfloat16),
    "streams": (dict(P=(5,), D=64, W=4, R=4, S=50, T=33), 16, "none", jnp.bfloat16),
    "dropped": (dict(D=64, W=4, R=4, S=4, T=33, low=-8), 16, "none", jnp.bfloat16),
}


def cast(args, dtype):
    def one(name, x):
        return x if x.dtype == np.int32 else x.astype(np.float32 if name in ("beta", "g") else dtype)

    return {name: jnp.asarray(one(name, x)) for name, x in args.items()}


def whole_call(args, chunk, mode):
    """Forward that saves nothing, forward that saves, backward; call by call."""
    operands = list(args.values())
    settings = dict(chunk=chunk, snapshot_quant=mode)
    _cuda_calls.forward(*operands, **settings, save=False)
    y, bank, *saved = _cuda_calls.forward(*operands, **settings, save=True)
    bank_, k_idx, k_val, _, beta, g, q_idx, q_val = operands
    out = _cuda_calls.backward(bank, bank_, y, k_idx, k_val, beta, g, q_idx, q_val, *saved, **settings)
    return jax.block_until_ready(out)


def decode(args):
    jax.block_until_ready(_calls._decode_cpu(*(x if n == "bank" else x[..., 0, :] for n, x in args.items())))


def product_keys():
    for dtype, factors, k in ((jnp.float32, (16, 16), 8), (jnp.bfloat16, (7, 5, 9), 11), (jnp.float32, (64,), 64)):
        scores = jax.random.normal(jax.random.key(0), (5, sum(factors)), dtype)
        values, ids = _calls.product_key_topk(scores, factors=factors, k=k, implementation="cuda")
        settings = dict(factors=factors, k=k, implementation="cuda")
        jax.block_until_ready(_calls.product_key_topk_backward(values, ids, **settings))


def main(names):
    for name in names or [*CASES, "steps", "product_keys"]:
        print(name, flush=True)
        if name == "product_keys":
            product_keys()
            continue
        if name == "steps":
            for dtype, width, mode in ((jnp.bfloat16, 72, "none"), (jnp.float32, 17, "int4")):
                steps(GPU, "cuda", make(D=width, S=60, T=30, W=6, R=5), dtype, mode)
            continue
        shape, chunk, mode, dtype = CASES[name]
        args = cast(make(**shape), dtype)
        whole_call(args, chunk, mode)
        decode(args)


if __name__ == "__main__":
    main(sys.argv[1:])
