"""`python -m sdm_jax train`: it learns, saves, resumes bit for bit, samples, and says what is wrong."""

import itertools
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from sdm_jax.cli import _text, main
from sdm_jax.cli._checkpoint import Checkpoints

TINY = """
    --layers swa,sdm --dim 16 --num-heads 2 --window 8 --hidden-dim 16 --slots 16 --writes 2 --reads 2
    --batch-size 4 --length 32 --validation-bytes 256 --warmup-steps 2 --learning-rate 0.02
""".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    rng = np.random.default_rng(0)
    words = [b"slot ", b"bank ", b"delta ", b"memory\n"]
    path.write_bytes(b"".join(words[i] for i in rng.integers(0, len(words), 2000)))
    return path


def command(data, out, *flags):
    return main(["train", *TINY, "--data", str(data), "--out", str(out), *map(str, flags)])


def arrays(out):
    """All that the newest checkpoint holds, as NumPy arrays by their paths."""
    with Checkpoints(str(out)) as checkpoints:
        step = checkpoints.latest_step
        state = checkpoints.restore(None)
    return step, {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(state)}


def test_learns_saves_and_samples(data, tmp_path, capsys):
    assert command(data, tmp_path, "--steps", 60, "--validate-every", 30, "--prompt", "ban") == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert "order-1 byte model: " in lines[2]
    order_1 = float(lines[2].split(": ")[1].split()[0])
    (final,) = [line for line in lines if line.startswith("validation: ")]
    bits = float(final.split()[1])
    assert bits < 2.5 < 8
    assert f"{order_1:.3f}" in final
    assert lines[3].startswith("step 30: loss ")
    sample = out.split("sample:\n")[1]
    assert sample.startswith("ban")
    assert len(sample) > 100
    assert "bits/byte=" in err
    assert "tokens/s=" in err
    step, saved = arrays(tmp_path)
    assert step == 60
    assert all(np.isfinite(x).all() for x in saved.values())


def test_resume_equals_an_uninterrupted_run(data, tmp_path, capsys, monkeypatch):
    flags = ("--steps", 8, "--sample-length", 0)
    assert command(data, tmp_path / "whole", *flags) == 0

    draw = _text.draw_batch

    def interrupt_at_5(text, batch_size, length, seed, step):
        if step == 4:
            signal.raise_signal(signal.SIGINT)
        return draw(text, batch_size, length, seed, step)

    with monkeypatch.context() as patch:
        patch.setattr(_text, "draw_batch", interrupt_at_5)
        assert command(data, tmp_path / "parts", *flags) == 130
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert "step 5 in" in capsys.readouterr().out
    # The settings come from the checkpoint; those given again agree with it.
    assert main(["train", "--out", str(tmp_path / "parts"), "--resume", "--dim", "16", "--sample-length", "5"]) == 0
    assert "sample:\ndef " in capsys.readouterr().out

    (whole_step, whole), (parts_step, parts) = arrays(tmp_path / "whole"), arrays(tmp_path / "parts")
    assert whole_step == parts_step == 8
    assert whole.keys() == parts.keys()
    assert any("optimizer" in name for name in whole)
    for name, value in whole.items():
        assert value.tobytes() == parts[name].tobytes(), name

    # A finished run only validates again.
    assert main(["train", "--out", str(tmp_path / "parts"), "--resume", "--sample-length", "0"]) == 0
    assert main(["train", "--out", str(tmp_path / "parts"), "--resume", "--dim", "32"]) == 2
    assert "--dim 32: the checkpoint in" in capsys.readouterr().err
    original = data.read_bytes()
    try:
        data.write_bytes(original + b"more")
        assert main(["train", "--out", str(tmp_path / "parts"), "--resume"]) == 2
        assert "has changed since the checkpoint" in capsys.readouterr().err
    finally:
        data.write_bytes(original)
    assert command(data, tmp_path / "parts") == 2
    assert "holds a checkpoint of step 8: continue it with --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "{tmp}/none"], "there is no such file or folder"),
        (["--data", "{tmp}/empty"], "found no text in it"),
        (["--data", "{tmp}/empty.txt"], "the file is empty or not text"),
        (["--data", "{tmp}/short.txt"], "short.txt is too short: 95 bytes to train on and 5 to validate on"),
        (["--layers", "swa,smd"], "layers[1] must be one of"),
        (["--slots", "40"], "slots_per_head must be a square"),
        (["--chunk-size", "7"], "chunk_size must be in 16..256"),
        (["--implementation", "cuda"], "cuda"),
        (["--resume"], "there is no checkpoint in"),
        (["--resume", "--overwrite"], "exclude each other"),
        (["--out", "{tmp}/empty.txt/run"], "--out"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_is_wrong_is_said(flags, message, tmp_path, capsys, data):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_bytes(b"x" * 100)
    flags = [flag.format(tmp=tmp_path) for flag in flags]
    assert command(data, tmp_path / "out", *flags) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.parametrize(
    "flags",
    [
        ["--steps", "0"],
        ["--learning-rate", "nan"],
        ["--seed", "-1"],
        ["--seed", "3000000000"],
        ["--temperature", "x"],
        ["--nothing"],
        [],
    ],
    ids=str,
)
def test_usage_errors(flags, capsys):
    with pytest.raises(SystemExit) as exit_status:
        main(["train", *flags] if flags else [])
    assert exit_status.value.code == 2
    assert "usage: python -m sdm_jax" in capsys.readouterr().err


def test_help_does_not_wait_for_flax():
    program = (
        "import sys; from sdm_jax import cli; sys.modules.pop('flax', None)\n"
        "try: cli.main(['train', '--help'])\n"
        "except SystemExit: print('flax' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "--learning-rate X" in result.stdout
    assert "(default: runs/sdm)" in result.stdout
    assert result.stdout.endswith("False\n")


def test_a_folder_is_split_by_file(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_bytes(bytes([i + 32]) * 10)
    (tmp_path / ".hidden").write_bytes(b"hidden")
    (tmp_path / "binary").write_bytes(b"\0\1\2")
    text = _text.read_text(str(tmp_path))
    assert text.validation.tobytes() == bytes([19 + 32]) * 10 + bytes([39 + 32]) * 10
    assert len(text.train) == 380
    assert set(text.train.tobytes()) == set(range(32, 72)) - {19 + 32, 39 + 32}
    assert text.fingerprint == _text.read_text(str(tmp_path)).fingerprint


def test_the_standard_library_is_the_default():
    text = _text.read_text(None)
    assert len(text.train) > 5_000_000
    assert 0.01 < len(text.validation) / len(text.train) < 0.2
    assert b"import " in text.validation.tobytes()


def test_batches():
    text = np.arange(200, dtype=np.uint8)
    batch = _text.draw_batch(text, 16, 8, seed=3, step=5)
    assert batch.shape == (16, 8)
    assert (np.diff(batch) == 1).all()
    np.testing.assert_array_equal(batch, _text.draw_batch(text, 16, 8, seed=3, step=5))
    assert (batch != _text.draw_batch(text, 16, 8, seed=3, step=6)).any()
    pieces = list(_text.validation_batches(text, 4, 8, 70))
    assert [piece.shape for piece in pieces] == [(4, 8), (4, 8)]
    assert pieces[0][0, 0] == 0
    assert pieces[-1][-1, -1] == 199


def test_order_1_model():
    rng = np.random.default_rng(0)
    text = rng.choice(np.frombuffer(b"abc", np.uint8), 500)
    model = _text.ByteBigram(text)
    probabilities = 2.0**-model._bits
    np.testing.assert_allclose(probabilities.sum(1), 1)
    pairs = list(itertools.pairwise(text))
    frequency = (list(text).count(98) + 1 / 256) / 501
    expected = (pairs.count((97, 98)) + frequency) / (sum(a == 97 for a, _ in pairs) + 1)
    assert probabilities[97, 98] == pytest.approx(expected)
    piece = text[None, :3].astype(np.int32)
    bits = -np.log2(probabilities[piece[0, :-1], piece[0, 1:]])
    assert model.bits_per_byte([piece]) == pytest.approx(bits.mean())
