#!/bin/bash
# Time, DRAM and L2 traffic of every kernel of the package, each run alone: profile.sh SHAPE TOKENS
cd "$(dirname "$0")/../.."
XLA_FLAGS=--xla_gpu_enable_command_buffer= ncu --clock-control none -k 'regex:gather_kernel|matmul|mover|phase1|solve|products|rows_kernel|links|parts|snapshot' \
  --metrics gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum,lts__t_bytes.sum,sm__warps_active.avg.pct_of_peak_sustained_active,launch__grid_size,launch__registers_per_thread \
  --csv python3 tests/gpu/profile.py "$1" "$2" 2>/dev/null | python3 -c '
import csv, sys, collections
lines = [l for l in sys.stdin if l.startswith("\"")]
sums, count = collections.defaultdict(lambda: collections.defaultdict(float)), collections.Counter()
for r in csv.DictReader(lines):
    name = (r["Kernel Name"].split("(")[0][-60:], r["Grid Size"])
    value, unit = float(r["Metric Value"].replace(",", "")), r["Metric Unit"]
    scale = {"ns": 1e-3, "ms": 1e3, "Mbyte": 1.0, "Kbyte": 1e-3, "byte": 1e-6, "Gbyte": 1e3}.get(unit, 1.0)
    sums[name][r["Metric Name"]] += value * scale
    count[name] += r["Metric Name"] == "gpu__time_duration.sum"
for name, m in sums.items():
    n = count[name]
    short = {"gpu__time_duration.sum": "us", "dram__bytes_read.sum": "rdMB", "dram__bytes_write.sum": "wrMB", "lts__t_bytes.sum": "l2MB",
             "sm__warps_active.avg.pct_of_peak_sustained_active": "occ%", "launch__registers_per_thread": "regs"}
    print(f"{name[0]:30s} {name[1]:16s} x{n:4d}", " ".join(f"{short[k]} {v / n:8.2f}" for k, v in m.items() if k in short))
'
