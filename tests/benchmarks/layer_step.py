"""One training step of a stack of memory layers: its time, on one device or a mesh, and what takes it.

    python tests/benchmarks/layer_step.py [--layers 4 --dim 2048 --heads 2 --slots 65536 --tokens 32768 --batch 1]
        [--writes 64 --reads 64 --dtype bfloat16] [--mesh data=2] [--repeats 5] [--profile]

Every layer is a pre-norm residual block with `SparseDeltaMemory` as its mixer; the loss is the mean square of the
last one's output, the optimizer plain gradient descent. `--profile` sums up one step's device time by the kind of
work. A mesh splits the batch over `data`, and the heads (or, where it does not divide them, the columns) over `model`;
`--batch` is that of all devices together.
"""

import argparse
import collections
import glob
import gzip
import json
import re
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sdm_jax.flax import SparseDeltaMemory, model_shardings

KINDS = [  # of device work, by the names of events
    ("write_read, forward", r"sdm_forward|forward_steps|gather_kernel|mover_kernel|dual_|phase1_kernel|solve|records"),
    ("write_read, backward", r"sdm_backward|gradient|du_matmul|square|phase1_backward|add_parts"),
    ("product keys", r"product_key|topk|backward_kernel"),
    ("matrix products", r"gemm|dot|cublas|cutlass|nvjet"),
    ("communication", r"nccl|all-reduce|all-gather"),
    ("custom calls (CPU)", r"ffi_call"),
    ("copies and fills", r"copy|memcpy|memset|broadcast"),
]


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


def profiled(run):
    """Milliseconds of device work in one call, by kind; and the names of what belongs to none, longest first."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            run()
        (path,) = glob.glob(f"{folder}/**/perfetto_trace.json.gz", recursive=True)
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    devices = {pid for pid, name in processes.items() if "/device:GPU" in name} or set(processes)
    times, others = collections.Counter(), collections.Counter()
    for event in events:
        if event.get("ph") != "X" or event["pid"] not in devices or not isinstance(event.get("args"), dict):
            continue
        name = " ".join([event["name"], event["args"].get("hlo_op", ""), event["args"].get("name", "")])
        if "hlo_op" not in event["args"] and devices == set(processes):
            continue
        kind = next((kind for kind, pattern in KINDS if re.search(pattern, name)), "other")
        times[kind] += event["dur"] / 1e3
        if kind == "other":
            others[event["name"]] += event["dur"] / 1e3
    return times, others


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
        kinds, others = profiled(run)
        for kind, ms in kinds.most_common():
            print(f"  {kind:22s} {ms:8.2f} ms")
        for name, ms in others.most_common(8):
            print(f"    other: {name[:80]:80s} {ms:8.2f} ms")


if __name__ == "__main__":
    main()
