"""One training step of a stack of memory layers: its time, on one device or a mesh, and what takes it.

    python tests/benchmarks/layer_step.py [--layers 4 --dim 2048 --heads 2 --slots 65536 --tokens 32768 --batch 1]
        [--writes 64 --reads 64 --dtype bfloat16] [--mesh data=2] [--repeats 5] [--profile]

Every layer is a pre-norm residual block with `SparseDeltaMemory` as its mixer; the loss is the mean square of the
last one's output, the optimizer plain gradient descent. `--profile` sums up one step's device time by the kind of
work. A mesh splits the batch over `data`, and the heads (or, where it does not divide them, the columns) over `model`;
`--batch` is that of all devices together.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
from device_time import print_device_time
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sdm_jax.flax import SparseDeltaMemory, model_shardings


class Block(nnx.Module):
    def __init__(self, args, rngs):
        dtypes = {"dtype": jnp.dtype(args.dtype), "param_dtype": jnp.float32}
        self.norm = nnx.RMSNorm(args.dim, rngs=rngs, **dtypes)
        self.mixer = SparseDeltaMemory(
            args.dim,
            num_heads=args.heads,
            slots_per_head=args.slots,
            num_writes=args.writes,
            num_reads=args.reads,
            rngs=rngs,
            **dtypes,
        )

    def __call__(self, x):
        return x + self.mixer(self.norm(x))[0]


def make_step(args, mesh):
    """The compiled step, the parameters and the features."""

    def init():
        return nnx.split(nnx.List([Block(args, nnx.Rngs(i)) for i in range(args.layers)]), nnx.Param, ...)

    graph, shapes, _ = nnx.eval_shape(init)
    shape = (args.batch, args.tokens, args.dim)
    if mesh is None:
        shardings, of_features = None, None
    else:
        shardings = model_shardings(shapes, mesh, args.heads)
        of_features = NamedSharding(mesh, PartitionSpec("data"))
    _, params, rest = jax.jit(init, out_shardings=(None, shardings, None))()
    x = jax.jit(lambda key: jax.random.normal(key, shape, args.dtype), out_shardings=of_features)(jax.random.key(0))

    def step(params, rest, x):
        def loss_fn(params):
            y = x
            for block in nnx.merge(graph, params, rest):
                y = block(y)
            return (y.astype(jnp.float32) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), loss

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None)), params, rest, x


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = dict(layers=4, dim=2048, heads=2, slots=65536, tokens=32768, batch=1, writes=64, reads=64, repeats=5)
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--mesh", default=None, help="e.g. data=2 or data=2,model=2")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    mesh = None
    if args.mesh:
        sizes = {"data": 1, "model": 1} | {k: int(n) for k, n in (part.split("=") for part in args.mesh.split(","))}
        mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * 2)
    step, params, rest, x = make_step(args, mesh)

    def run():
        nonlocal params
        params, loss = step(params, rest, x)
        jax.block_until_ready(loss)

    times = []
    for i in range(args.repeats + 2):
        start = time.perf_counter()
        run()
        if i >= 2:
            times.append(time.perf_counter() - start)
    milliseconds = 1e3 * statistics.median(times)
    print(
        f"{jax.devices()[0].device_kind} x {mesh.size if mesh else 1}, jax {jax.__version__}: "
        f"{milliseconds:.1f} ms a step, "
        f"{args.batch * args.tokens / milliseconds * 1e3:,.0f} tokens/s",
        flush=True,
    )
    if args.profile:
        print_device_time(run)


if __name__ == "__main__":
    main()
