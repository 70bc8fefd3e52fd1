"""Quick check of the CUDA kernels against the CPU's on shapes that the test suite is too small for.

    python tests/gpu/check.py [part of a case's name]

Prints one line a case: the largest error of each result relative to its largest value. float32 is compared
with the CPU kernels in float64, bfloat16 with the CPU kernels in bfloat16.
"""

import sys
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np

import sdm_jax
from sdm_jax import kernels

jax.config.update("jax_enable_x64", True)
CPU, GPU = jax.devices("cpu")[0], jax.devices("gpu")[0]
NAMES = ("y", "new_bank", "d_bank", "d_k_val", "d_v", "d_beta", "d_g", "d_q_val")


def make(P=(2,), T=100, S=50, D=17, W=5, R=7, G=1, gate=-0.5, low=-1, high=1, seed=0):
    rng = np.random.default_rng(seed)

    def ids(n):
        return rng.integers(low, S + high, size=(*P, T, n)).astype(np.int32)

    args = dict(bank=rng.normal(size=(*P, S, D)), k_idx=ids(W), k_val=rng.normal(size=(*P, T, W)) * 0.7 / np.sqrt(W))
    args |= dict(
        v=rng.normal(size=(*P, T, D)), beta=rng.uniform(size=(*P, T, 1)), g=gate * rng.uniform(size=(*P, T, G))
    )
    return args | dict(q_idx=ids(R), q_val=rng.normal(size=(*P, T, R)))


def on(device, args, dtype):
    wide = np.float64 if dtype == np.float64 else np.float32

    def cast(n, x):
        return x if x.dtype == np.int32 else x.astype(wide if n in ("beta", "g") else dtype)

    return {n: jax.device_put(cast(n, x), device) for n, x in args.items()}


def results(args, device, dtype, implementation, **settings):
    args = on(device, args, dtype)
    rng = np.random.default_rng(9)
    dy = jax.device_put(rng.normal(size=args["v"].shape).astype(dtype), device)
    db = jax.device_put(rng.normal(size=args["bank"].shape).astype(dtype), device)
    floats = {n: args[n] for n in ("bank", "k_val", "v", "beta", "g", "q_val")}

    @jax.jit
    def run(floats, dy, db):
        def f(x):
            return sdm_jax.write_read(**(args | x), implementation=implementation, **settings)

        (y, bank), vjp = jax.vjp(f, floats)
        (d,) = vjp((dy, db))
        return y, bank, d["bank"], d["k_val"], d["v"], d["beta"], d["g"], d["q_val"]

    plain = jax.jit(lambda a: sdm_jax.write_read(**a, implementation=implementation, **settings))(args)
    out = run(floats, dy, db)
    for a, b in zip(plain, out[:2], strict=False):
        assert np.array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64), equal_nan=True), (
            "saving changes bits"
        )
    return {n: np.asarray(x, np.float64) for n, x in zip(NAMES, out, strict=True)}


def errors(got, want):
    return {n: np.abs(got[n] - want[n]).max() / max(np.abs(want[n]).max(), 1e-30) for n in want}


CASES = {
    "small": dict(),
    "vector": dict(D=64, W=8, R=8, S=300),
    "width_1": dict(T=7, D=1),
    "gate_per_write": dict(G=5),
    "wide": dict(D=600, T=130, P=(1, 3)),
    "strong_gates": dict(gate=-20.0),
    "mid": dict(P=(2,), T=300, S=4096, D=256, W=64, R=64),
    "large": dict(P=(2,), T=160, S=16384, D=1024, W=64, R=64),
    "odd_wide": dict(P=(1,), T=80, S=500, D=1030, W=16, R=16),
    "chunk_23": dict(T=100, S=40, D=64, W=4, R=3, chunk_size=23),
    "chunk_23_scalar": dict(T=100, S=40, D=17, W=4, R=3, chunk_size=23),
    "chunk_256": dict(P=(1,), T=520, S=5000, D=128, W=64, R=32, chunk_size=256),
    "entries_256": dict(P=(1,), T=300, S=3000, D=64, W=256, R=256, chunk_size=256),
    "chunk_100": dict(P=(2,), T=250, S=400, D=256, W=40, R=36, G=40, chunk_size=100),
    "dense": dict(P=(2,), T=150, S=32, D=64, W=32, R=32, chunk_size=64),
    "one_slot": dict(P=(2,), T=150, S=1, D=16, W=4, R=4, low=0, high=0),
    "tokens_1": dict(T=1, D=64),
    "tokens_2": dict(T=20, D=64, chunk_size=16),
}


def steps(device, implementation, args, dtype, mode):
    """Every step of one chunk, each fed by the CPU's results so that errors do not add up."""
    a = on(device, args, dtype)
    kw = dict(implementation=implementation)
    chunk, S = a["k_idx"].shape[-2], a["bank"].shape[-2]
    c = kernels.phase1(a["k_idx"], a["k_val"], a["g"], a["q_idx"], a["q_val"], chunk_size=chunk, num_slots=S, **kw)
    x, qx = kernels.solve(c.a, c.qk, a["beta"], c.writes, **kw)

    def one(z):
        return z[..., 0, :] if z.ndim == 3 else z[..., 0, :, :]

    ret, inter = kernels.gather(a["bank"], a["k_idx"], c.k_eff, a["q_idx"], c.q_eff, **kw)
    rows, scale = kernels.take_snapshot(a["bank"], one(c.slots), snapshot_quant=mode, **kw)
    error, delta, y = kernels.dual_matmul(one(x), one(qx), a["beta"], c.writes, a["v"], ret, inter, **kw)
    bank = kernels.mover(a["bank"], one(c.slots), one(c.starts), one(c.order), c.k_carry, one(c.decay), delta, **kw)
    db = jnp.ones_like(bank) * 0.5 + a["bank"]
    carried = kernels.gather_gradient(db, a["k_idx"], c.k_carry, **kw)
    dv, dbeta, da, dqk = kernels.du_matmul(
        one(c.a), one(c.qk), one(x), a["beta"], c.writes, a["v"], carried, error, delta, **kw
    )
    restored, db2, dke, dkc, ddec = kernels.write_mover_backward(
        bank,
        db,
        one(c.slots),
        one(c.starts),
        one(c.order),
        one(c.decay),
        c.k_eff,
        rows,
        scale,
        delta,
        dv,
        snapshot_quant=mode,
        **kw,
    )
    db3, dqe = kernels.read_mover_backward(
        restored, db2, one(c.read_slots), one(c.read_starts), one(c.read_order), c.q_eff, a["v"], **kw
    )

    def wide(z):
        return jnp.expand_dims(z, -2 if z.ndim == 2 else -3)

    dk, dg, dq = kernels.phase1_backward(
        a["k_idx"],
        a["k_val"],
        a["g"],
        a["q_idx"],
        a["q_val"],
        c,
        wide(da),
        wide(dqk),
        dke,
        dkc,
        dqe,
        wide(ddec),
        num_slots=S,
        **kw,
    )
    names = [
        "x",
        "qx",
        "ret",
        "inter",
        "error",
        "delta",
        "y",
        "bank",
        "carried",
        "dv",
        "dbeta",
        "da",
        "dqk",
        "restored",
        "db2",
        "dke",
        "dkc",
        "ddec",
        "db3",
        "dqe",
        "dk",
        "dg",
        "dq",
    ]
    values = (
        x,
        qx,
        ret,
        inter,
        error,
        delta,
        y,
        bank,
        carried,
        dv,
        dbeta,
        da,
        dqk,
        restored,
        db2,
        dke,
        dkc,
        ddec,
        db3,
        dqe,
        dk,
        dg,
        dq,
    )
    out = {n: np.asarray(v, np.float64) for n, v in zip(names, values, strict=True)}
    valid = np.asarray(one(c.slots)) >= 0
    out["rows"] = np.where(valid[..., None], np.asarray(rows.astype(jnp.float32), np.float64), 0)
    if scale.size:
        out["scale"] = np.where(valid, np.asarray(scale, np.float64), 0)
    return out | {f"chunks.{n}": np.asarray(v, np.float64) for n, v in c._asdict().items()}


def decode(device, implementation, args, dtype):
    y, bank = jax.jit(lambda a: sdm_jax.decode_step(**a, implementation=implementation))(on(device, args, dtype))
    return {"y": np.asarray(y, np.float64), "new_bank": np.asarray(bank, np.float64)}


def main(part=""):
    bad = 0

    def report(name, found, bound, started):
        nonlocal bad
        worst = max(found.values())
        ok = worst <= bound
        bad += not ok
        shown = {n: f"{e:.1e}" for n, e in found.items() if not ok or len(found) < 12}
        print(
            f"{'ok ' if ok else 'BAD'} {name:32s} worst {worst:.1e} {time.time() - started:5.1f}s",
            "" if ok else shown,
            flush=True,
        )

    for name, kw in CASES.items():
        if part not in name:
            continue
        kw = dict(kw)
        settings = dict(chunk_size=kw.pop("chunk_size", 16))
        args = make(**kw)
        for dtype, bound in ((np.float32, 1e-5), (jnp.bfloat16, 2e-2)):
            started = time.time()
            try:
                want = results(args, CPU, np.float64 if dtype == np.float32 else dtype, "cpu", **settings)
                got = results(args, GPU, dtype, "cuda", **settings)
                report(f"{name} {np.dtype(dtype).name}", errors(got, want), bound, started)
                again = results(args, GPU, dtype, "cuda", **settings)
                if any(not np.array_equal(got[n], again[n]) for n in got):
                    bad += 1
                    print("BAD", name, "is not reproducible")
            except Exception:
                bad += 1
                print("BAD", name, np.dtype(dtype).name, traceback.format_exc(limit=-2)[-1500:], flush=True)
    for mode in ("none", "bf16", "fp8", "int4"):
        for D, chunk in ((64, 16), (17, 16), (128, 70)):
            for dtype in (np.float32, jnp.bfloat16):
                name = f"snapshot_{mode}_{D}_{np.dtype(dtype).name}"
                if part not in name:
                    continue
                started = time.time()
                args = make(D=D, S=60, T=90, W=8, R=8)
                try:
                    settings = dict(chunk_size=chunk, snapshot_quant=mode, grad_bank_dtype="float32")
                    want = results(args, CPU, dtype, "cpu", **settings)
                    got = results(args, GPU, dtype, "cuda", **settings)
                    lossy = mode != "none"  # a row on the edge between two codes may fall to either side
                    report(name, errors(got, want), 2e-2 if lossy or dtype != np.float32 else 1e-5, started)
                    args = make(D=D, S=60, T=30, W=8, R=8)
                    want, got = steps(CPU, "cpu", args, dtype, mode), steps(GPU, "cuda", args, dtype, mode)
                    report(f"steps {name}", errors(got, want), 2e-2 if lossy or dtype != np.float32 else 1e-5, started)
                except Exception:
                    bad += 1
                    print("BAD", name, traceback.format_exc(limit=-2)[-1500:], flush=True)
    if part in "decode":
        # The last three: enough streams for slices wider than 64 columns.
        for P, W, D in (
            (3, 64, 1024),
            (3, 5, 17),
            (3, 256, 64),
            (3, 40, 128),
            (64, 40, 1024),
            (130, 64, 1024),
            (130, 9, 136),
        ):
            for dtype, bound in ((np.float32, 1e-5), (jnp.bfloat16, 2e-2)):
                started = time.time()
                args = make(P=(P,), T=1, S=200, D=D, W=W, R=W)
                args = {n: (x if n == "bank" else x[:, 0]) for n, x in args.items()}
                want = decode(CPU, "cpu", args, np.float64 if dtype == np.float32 else dtype)
                got = decode(GPU, "cuda", args, dtype)
                report(f"decode {P} {W} {D} {np.dtype(dtype).name}", errors(got, want), bound, started)
    print("bad:", bad)
    return bad


if __name__ == "__main__":
    sys.exit(min(1, main(*sys.argv[1:])))
