"""What takes the time of a call on a device, by the kind of work, from JAX's profiler."""

from __future__ import annotations

import collections
import glob
import gzip
import json
import re
import tempfile
from collections.abc import Callable

import jax

KINDS = [  # of work, by the names of events
    ("product keys", r"product_key|topk|top_k|\bbackward_kernel"),
    (
        "write_read, backward",
        r"sdm_backward|gradient_mover|du_matmul|\bproducts_kernel|rows_kernel|add_parts|_entries_kernel",
    ),
    (
        "write_read, forward",
        r"sdm_forward|forward_steps|\bmover_kernel|dual_matmul|sort_kernel|pairs_kernel|diagonal_kernel|below_kernel",
    ),
    ("write_read, both", r"\bgather_kernel|records_kernel|read_products_kernel|snapshot_kernel"),
    ("matrix products", r"gemm|dot|cublas|cutlass|nvjet"),
    ("communication", r"nccl|all-reduce|all-gather"),
    ("custom calls (CPU)", r"ffi_call"),
    ("copies and fills", r"copy|memcpy|memset|broadcast"),
]


def events_of(run: Callable[[], object]) -> list[dict]:
    """The device's events of one call."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            run()
        (path,) = glob.glob(f"{folder}/**/perfetto_trace.json.gz", recursive=True)
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    devices = {pid for pid, name in processes.items() if "/device:GPU" in name}
    return [
        e
        for e in events
        if e.get("ph") == "X"
        and isinstance(e.get("args"), dict)
        and (e["pid"] in devices if devices else "hlo_op" in e["args"])
    ]


def kind_of(event: dict) -> str:
    name = " ".join([event["name"], event["args"].get("hlo_op", ""), event["args"].get("name", "")])
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "other")


def covered(intervals: list[tuple[float, float]]) -> float:
    """The length of the union of intervals (begin, end)."""
    total, last = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total


def print_device_time(run: Callable[[], object], names: bool = False) -> None:
    """Prints the milliseconds of one call in which the device worked, by kind; by name the longest of no kind, or all.

    What of a kind runs side by side counts once; by name, each counts for itself.
    """
    kinds: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    single: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()
    for event in events_of(run):
        kind, name = kind_of(event), re.sub(r"\(anonymous namespace\)::|sdm::gpu::|void ", "", event["name"])[:70]
        kinds[kind].append((event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3))
        if names or kind == "other":
            single[name] += event["dur"] / 1e3
            count[name] += 1
    times = {kind: covered(intervals) for kind, intervals in kinds.items()}
    times["all"] = covered([x for intervals in kinds.values() for x in intervals])
    for kind, ms in sorted(times.items(), key=lambda x: -x[1]):
        print(f"  {kind:22s} {ms:8.2f} ms")
    for name, ms in single.most_common(16 if names else 8):
        print(f"    {name:70s} x {count[name]:5d} {ms:8.2f} ms", flush=True)
