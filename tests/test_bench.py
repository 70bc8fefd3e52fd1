"""The command `bench`: what it measures is right, what it writes can be read, and what is wrong it says at once."""

import functools
import json

import jax
import numpy as np
import pytest

import sdm_jax
from sdm_jax.cli import bench, main

SMALL = "P=2,T=40,S=60,D=8,W=3,R=2,C=16"


def test_numbers_and_files(tmp_path, capsys):
    files = {name: tmp_path / f"result.{name}" for name in ("json", "png")}
    flags = ["--shape", SMALL, "--seconds", "0.01", "--json", str(files["json"]), "--plot", str(files["png"])]
    assert main(["bench", *flags, "--implementations", "reference,xla"]) == 0
    out, _ = capsys.readouterr()
    result = json.loads(files["json"].read_text())
    assert result["shapes"]["own"] == {"P": 2, "T": 40, "S": 60, "D": 8, "W": 3, "R": 2, "C": 16, "dtype": "float32"}
    assert result["copy_bytes_per_second"] > 1e8
    rows = {(row["pass"], row["implementation"]): row for row in result["rows"]}
    assert set(rows) == {(kind, name) for kind in bench.PASSES for name in ("reference", "xla")}
    # Rows read for writes and reads, and written; with gradients also the snapshot and seven passes of the backward.
    row_bytes = {"forward": 2 * 40 * (2 * 3 + 2) * 32, "gradients": 2 * 40 * (7 * 3 + 4 * 2) * 32}
    row_bytes["decode"] = 2 * (2 * 3 + 2) * 32
    bank_bytes = 2 * 60 * 8 * 4
    for (kind, name), row in rows.items():
        assert row["row_bytes"] == row_bytes[kind]
        assert row["bytes_per_second"] == pytest.approx(row["row_bytes"] / row["seconds"])
        assert row["share_of_copy"] == pytest.approx(row["bytes_per_second"] / result["copy_bytes_per_second"])
        assert row["times_faster_than_xla"] == pytest.approx(rows[kind, "xla"]["seconds"] / row["seconds"])
        assert 0 < row["best_seconds"] <= row["seconds"] < 1
        assert row["memory_bytes"] > (2 if kind == "gradients" else 1) * bank_bytes
        assert f"\n{kind:10s} {name:10s}" in out
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_bytes_of_a_named_shape():
    # 25.8 GB forward; with gradients 34.4 GB forward, which saves the snapshot, and 60.1 GB backward.
    flagship = bench.SHAPES["flagship"]
    assert flagship.row_bytes("forward") == pytest.approx(25.8e9, rel=2e-3)
    assert flagship.row_bytes("gradients") == pytest.approx(94.5e9, rel=2e-3)


def test_what_is_timed_is_the_operation():
    shape = bench.parse_shape(SMALL)
    data = jax.jit(functools.partial(bench.inputs, shape))()
    sdm_jax.check_inputs(data[0], **data[1], allow_repeats=False)
    want_y, want = sdm_jax.write_read(data[0], **data[1], chunk_size=16)
    contestant = bench._build(shape, data, "forward", "xla", "cpu")
    bank, y = contestant._program(contestant._bank, *contestant._operands)
    np.testing.assert_allclose(y, want_y, rtol=0, atol=1e-5)
    np.testing.assert_allclose(bank, want, rtol=0, atol=1e-5)
    contestant = bench._build(shape, data, "gradients", "xla", "cpu")
    assert contestant() > 0
    contestant = bench._build(shape, data, "decode", "xla", "cpu")
    bank, y = contestant._program(contestant._bank, *contestant._operands)
    assert (contestant._steps, len(y)) == (40, 40)
    np.testing.assert_allclose(np.moveaxis(y, 0, 1), want_y, rtol=0, atol=1e-5)
    np.testing.assert_allclose(bank, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--shape P=1,T=8,S=4,D=4,W=5", "--shape P=1,T=8,S=4,D=4,W=5: W must be at most S, 4, got 5"),
        ("--shape P=1,T=8,S=4", "--shape P=1,T=8,S=4: D, W missing"),
        ("--shape P=x", "P must be an integer of at least 1, got 'x'"),
        ("--shape Q=1", "must be of P=, T=, S=, D=, W=, R=, C=, dtype=; got 'Q=1'"),
        ("--shape P=1,T=8,S=9,D=4,W=2,dtype=int8", "dtype must be float32 or bfloat16, got 'int8'"),
        ("--shape P=1,T=8,S=9,D=4,W=2,C=500", "shape own: chunk_size must be in [16, 256], got 500"),
        ("--shapes flagships", "--shapes must be of laptop, "),
        ("--passes back", "--passes must be of forward, gradients, decode; got 'back'"),
        ("--implementations fast", "--implementations must be of cpu, cuda, xla, reference; got 'fast'"),
        ("--json nowhere/x.json", "--json nowhere/x.json: there is no such folder"),
        ("--plot x.foo", "--plot x.foo: must end in one of"),
    ],
)
def test_bad_flags(flags, message, capsys):
    assert main(["bench", *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""
