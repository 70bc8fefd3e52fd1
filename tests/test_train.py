"""The commands `train`, `generate` and `info`: they learn, resume bit for bit, report, and say what is wrong."""

import csv
import importlib.util
import itertools
import json
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

import sdm_jax
from sdm_jax.cli import _text, main
from sdm_jax.cli._checkpoint import Checkpoints
from sdm_jax.cli._training import OptimizerConfig, Trainer
from sdm_jax.flax import ByteTokenizer, LanguageModel, LanguageModelConfig
from sdm_jax.flax.statistics import slot_statistics

TINY = """
    --layers swa,sdm --dim 16 --num-heads 2 --window 8 --hidden-dim 16 --slots 16 --writes 2 --reads 2
    --batch-size 4 --length 32 --validation-tokens 256 --warmup-steps 2 --learning-rate 0.02
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


def metrics(out):
    """The rows of the metrics file, without the speed, which is another every time."""
    with (out / "metrics.csv").open(newline="") as file:
        return [{name: row[name] for name in row if name != "tokens_per_second"} for row in csv.DictReader(file)]


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
    rows = metrics(tmp_path)
    assert [int(row["step"]) for row in rows] == list(range(1, 61))
    assert [int(row["step"]) for row in rows if row["validation_loss"]] == [30, 60]
    assert float(rows[-1]["validation_bits_per_byte"]) == pytest.approx(bits, abs=1e-3)
    assert float(rows[0]["loss"]) > 5 > 2 > float(rows[-1]["loss"])
    assert float(rows[1]["learning_rate"]) == pytest.approx(0.01)
    (positions,) = [line for line in lines if line.startswith("bits per byte by position: ")]
    first, *_, last = (float(part.split(": ")[1]) for part in positions.split("position: ")[1].split(", "))
    assert "17-32: " in positions
    assert last < first  # the first byte has nothing before it
    (slots,) = [line for line in lines if line.startswith("slots of layer 1, head 0: written ")]
    assert 0 < float(slots.split("written ")[1].split("%")[0]) <= 100
    step, saved = arrays(tmp_path)
    assert step == 60
    assert all(np.isfinite(x).all() for x in saved.values())


def test_resume_equals_an_uninterrupted_run(data, tmp_path, capsys, monkeypatch):
    flags = ("--steps", 8, "--sample-length", 5, "--prompt", "slot", "--accumulate", 2)
    assert command(data, tmp_path / "whole", *flags) == 0

    draw = _text.draw_batch

    def interrupt_at_5(text, batch_size, length, seed, step):
        if step == 4:
            signal.raise_signal(signal.SIGINT)
        return draw(text, batch_size, length, seed, step)

    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(_text, "draw_batch", interrupt_at_5)
        assert command(data, tmp_path / "parts", *flags) == 130
    assert signal.getsignal(signal.SIGINT) is handler
    assert "step 5 in" in capsys.readouterr().out
    # The settings come from the checkpoint; those given again agree with it.
    assert main(["train", "--out", str(tmp_path / "parts"), "--resume", "--dim", "16"]) == 0
    sample = capsys.readouterr().out.split("sample:\n")[1]
    assert sample.startswith("slot")
    assert len(sample.encode()) >= 4 + 5

    (whole_step, whole), (parts_step, parts) = arrays(tmp_path / "whole"), arrays(tmp_path / "parts")
    assert whole_step == parts_step == 8
    assert whole.keys() == parts.keys()
    assert any("optimizer" in name for name in whole)
    for name, value in whole.items():
        assert value.tobytes() == parts[name].tobytes(), name
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")

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
        (["--data", "{tmp}/short.txt"], "short.txt is too short: 95 tokens to train on and 5 to validate on"),
        (["--layers", "swa,smd"], "layers[1] must be one of"),
        (["--slots", "63"], "--slots must be a square number, got 63; the nearest valid value is 64"),
        (["--product-key-factors", "4,5"], "--slots must be the product of --product-key-factors, 20, got 16"),
        (["--memory-heads", "5"], "--memory-heads must divide --dim (16), got 5; the nearest valid value is 4"),
        (["--num-heads", "16"], "--num-heads must be in 1..8, got 16"),
        (["--writes", "17"], "--writes must be in 1..16 (there are 16 slots), got 17; the nearest valid value is 16"),
        (["--chunk-size", "7"], "--chunk-size must be in 16..256"),
        (["--read-activation", "none"], "--read-activation must be one of"),
        (["--grad-bank-dtype", "int8"], "--grad-bank-dtype must be float32"),
        (["--tokenizer", "nowhere:at_all"], "--tokenizer nowhere:at_all: must be 'bytes' or 'module:object'"),
        (["--tokenizer", "math:pi"], "--tokenizer math:pi: the object must have encode, decode"),
        (["--implementation", "cuda"], "cuda"),
        (["--resume"], "there is no folder"),
        (["--resume", "--out", "{tmp}/empty"], "there is no checkpoint in"),
        (["--out", "{tmp}/empty.txt"], "empty.txt is not a folder"),
        (["--process-id", "5"], "--process-id 5 needs --processes above 1"),
        (["--coordinator", "here:1"], "--coordinator here:1 needs --processes above 1"),
        (["--config", "{tmp}/none.yaml"], "none.yaml: No such file"),
        (["--resume", "--overwrite"], "exclude each other"),
        (["--out", "{tmp}/empty.txt/run"], "empty.txt/run: "),
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
    if "--resume" in flags:
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "--steps: must be an integer of at least 1, got '0'"),
        (["--steps", "abc"], "--steps: must be an integer of at least 1, got 'abc'"),
        (["--learning-rate", "nan"], "--learning-rate: must be a finite number above 0, got 'nan'"),
        (["--write-scale", "x"], "--write-scale: must be a finite number, got 'x'"),
        (["--seed", "-1"], "--seed: must be an integer of at least 0, got '-1'"),
        (["--seed", "3000000000"], "--seed: must be below 2^31, got 3000000000"),
        (["--temperature", "x"], "--temperature: must be a finite number of at least 0, got 'x'"),
        (["--metrics", "json"], "--metrics: invalid choice: 'json'"),
        (["--dtype", "float64"], "--dtype: invalid choice: 'float64'"),
        (["--implementation", "gpu"], "--implementation: invalid choice: 'gpu' (choose from "),
        (["--product-key-factors", "4,x"], "must be integers of at least 1 with commas between them, got '4,x'"),
        (["--out", ""], "--out: must not be empty"),
        (["--nothing"], "unrecognized arguments: --nothing"),
        ([], "required: COMMAND"),
    ],
    ids=str,
)
def test_usage_errors(flags, message, capsys):
    with pytest.raises(SystemExit) as exit_status:
        main(["train", *flags] if flags else [])
    assert exit_status.value.code == 2
    error = capsys.readouterr().err
    assert "usage: python -m sdm_jax" in error
    assert message in error.splitlines()[-1]


def test_overwrite_deletes_once_a_step_has_run(data, tmp_path, capsys, monkeypatch):
    assert command(data, tmp_path, "--steps", 3, "--sample-length", 0) == 0
    (_, before), rows = arrays(tmp_path), metrics(tmp_path)
    find_spec = importlib.util.find_spec
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboardX" else find_spec(name))
        assert command(data, tmp_path, "--overwrite", "--metrics", "tensorboard") == 2
    assert "needs tensorboardX" in capsys.readouterr().err
    assert command(data, tmp_path, "--overwrite", "--implementation", "cuda") == 2
    assert "'cuda' cannot serve" in capsys.readouterr().err
    step, after = arrays(tmp_path)
    assert step == 3
    assert all(value.tobytes() == after[name].tobytes() for name, value in before.items())
    assert metrics(tmp_path) == rows
    assert command(data, tmp_path, "--overwrite", "--steps", 1, "--sample-length", 0) == 0
    with Checkpoints(str(tmp_path)) as checkpoints:
        assert checkpoints.latest_step == 1
    assert [row["step"] for row in metrics(tmp_path)] == ["1"]


def test_help_does_not_wait_for_flax():
    program = (
        "import sys; from sdm_jax import cli; sys.modules.pop('flax', None)\n"
        "try: cli.main(['train', '--help'])\n"
        "except SystemExit: print('flax' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "--learning-rate X" in result.stdout
    assert "(default: 0.004)" in result.stdout
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


def test_yaml(data, tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text(
        f"data: {data}\nout: {tmp_path / 'run'}\nlayers: [sdm]\ndim: 8\nslots: 12\nproduct-key-factors: [3, 4]\n"
        "writes: 2\nreads: 2\nlength: 20\nsteps: 2\nlearning_rate: 1e-2\nquery_batchnorm: false\nhidden_dim:\n"
        "validation_tokens: 100\nsample_length: 0\nmetrics: none\n"
    )
    assert main(["train", "--config", str(config), "--steps", "3"]) == 0
    out = capsys.readouterr().out
    assert "model: sdm, " in out
    assert "96 in initial banks" in out
    assert "checkpoint: step 3" in out
    assert not (tmp_path / "run" / "metrics.csv").exists()
    for line, message in [
        ("slots: four", "slots: must be an integer of at least 1, got 'four'"),
        ("slot: 4", "there is no flag --slot"),
        ("tie_head: 3", "tie_head: must be true or false, got 3"),
        ("dim: true", "dim: must be a value or a list, got True"),
        ("steps: 0", "steps: must be an integer of at least 1, got '0'"),
        ("dtype: float16", "dtype: must be one of 'float32', 'bfloat16', got 'float16'"),
        ("- a list", "must map the names of flags to values"),
        ("dim: [", "is not YAML"),
    ]:
        config.write_text(line)
        assert main(["train", "--config", str(config)]) == 2
        assert message in capsys.readouterr().err


class Pairs:
    """A tokenizer of pairs of letters."""

    vocab_size = 27 * 27
    letters = " abcdefghijklmnopqrstuvwxyz"

    def encode(self, text):
        text = "".join(letter if letter in self.letters else " " for letter in text)
        index = self.letters.index
        return [index(a) * 27 + index(b) for a, b in zip(text[::2], text[1::2], strict=False)]

    def decode(self, tokens):
        return "".join(self.letters[token // 27] + self.letters[token % 27] for token in tokens)


PAIRS = Pairs()


class Constant:
    """A tokenizer that gives the same tokens for every text."""

    vocab_size = 100

    def __init__(self, *tokens):
        self.tokens = tokens

    def encode(self, text):
        return [*self.tokens] * 100

    def decode(self, tokens):
        return ""


TOO_LARGE, NEGATIVE, FRACTIONS = Constant(3, 100), Constant(0, -1), Constant(0.5, 1.5)
STRINGS, NESTED, RAGGED = Constant("a"), Constant([1, 2]), Constant([1], [2, 3])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("TOO_LARGE", "got tokens from 3 to 100"),
        ("NEGATIVE", "got tokens from -1 to 0"),
        ("FRACTIONS", "got 1 dimensions of float64"),
        ("STRINGS", "got 1 dimensions of <U1"),
        ("NESTED", "got 2 dimensions of int64"),
        ("RAGGED", "inhomogeneous"),
    ],
)
def test_tokens_that_do_not_fit(name, message, data, tmp_path, capsys):
    assert command(data, tmp_path, "--tokenizer", f"test_train:{name}") == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "--tokenizer: its tokens must be a list of integers from 0 to vocab_size - 1, 99" in error
    assert message in error


def test_tokenizer_and_generate(data, tmp_path, capsys):
    """A run with a tokenizer, in bfloat16 with an untied head and remat, continued by `generate`."""
    flags = ["--tokenizer", "test_train:PAIRS", "--dtype", "bfloat16", "--no-tie-head", "--remat"]
    assert command(data, tmp_path / "run", *flags, "--steps", 40, "--prompt", "bank", "--sample-length", 10) == 0
    out = capsys.readouterr().out
    assert "order-1" not in out
    tokens = len(PAIRS.encode("x" * 1000)) / 1000
    (line,) = [line for line in out.splitlines() if line.startswith("validation: ")]
    bits, loss = float(line.split()[1]), float(line.split("loss ")[1].split(")")[0])
    assert bits == pytest.approx(loss / np.log(2) * tokens, rel=0.01)
    sample = out.split("sample:\n")[1]
    assert sample.startswith("bank")
    assert len(sample) == 4 + 20 + 1

    arguments = ["generate", "--from", str(tmp_path / "run"), "--prompt", "bank", "--length", "10"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == sample
    assert main([*arguments, "--seed", "1", "--temperature", "5"]) == 0
    assert capsys.readouterr().out != sample
    assert main(["generate", "--from", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["generate", "--from", str(tmp_path / "empty")]) == 2
    assert "there is no checkpoint in" in capsys.readouterr().err
    assert list((tmp_path / "empty").iterdir()) == []

    assert main(["info", "--from", str(tmp_path / "run"), "--batch-size", "3"]) == 0
    out = capsys.readouterr().out
    assert "model: swa,sdm, 729 tokens" in out
    assert "banks 3 x 1 x 16 x 16 bfloat16: 1.5 KiB" in out


def test_damaged_checkpoint(data, tmp_path, capsys):
    run, broken = tmp_path / "run", tmp_path / "broken"
    assert command(data, run, "--steps", 4, "--save-every", 2, "--sample-length", 0) == 0
    shutil.copytree(run, broken)
    for path in (broken / "4" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")
    capsys.readouterr()
    for arguments in (["train", "--resume", "--out", str(broken)], ["generate", "--from", str(broken)]):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert "Traceback" not in error
        assert f"the checkpoint of step 4 in {broken} cannot be read; it is damaged" in error
        assert f"Delete {broken / '4'} to go back to step 2" in error
    shutil.rmtree(broken / "4")
    assert main(["train", "--resume", "--out", str(broken)]) == 0
    (_, whole), (_, again) = arrays(run), arrays(broken)
    for name, value in whole.items():
        assert value.tobytes() == again[name].tobytes(), name
    for path in (broken / "4" / "settings").rglob("*"):
        if path.is_file():
            path.write_bytes(b"{")
    assert main(["generate", "--from", str(broken)]) == 2
    assert "cannot be read; it is damaged" in capsys.readouterr().err


def test_settings_and_metrics_that_are_none(data, tmp_path, capsys):
    assert command(data, tmp_path, "--steps", 2, "--sample-length", 0) == 0
    (settings,) = (path for path in (tmp_path / "2" / "settings").rglob("*") if b'"dim"' in path.read_bytes())
    saved = json.loads(settings.read_text())
    without_dim = {name: value for name, value in saved.items() if name != "dim"}
    for content, message in (([saved], "(its settings are a list)"), (without_dim, "(its settings lack dim)")):
        settings.write_text(json.dumps(content))
        for arguments in (
            ["train", "--resume", "--out", str(tmp_path)],
            ["generate", "--from", str(tmp_path)],
            ["info", "--from", str(tmp_path)],
        ):
            assert main(arguments) == 2
            error = capsys.readouterr().err
            assert f"the checkpoint of step 2 in {tmp_path} cannot be read" in error
            assert message in error
    settings.write_text(json.dumps(saved))
    (tmp_path / "metrics.csv").write_bytes(b"\xff\xfe\0")
    assert main(["train", "--resume", "--out", str(tmp_path), "--steps", "4"]) == 2
    assert "metrics.csv is not a CSV file" in capsys.readouterr().err


def test_tensorboard(data, tmp_path):
    assert command(data, tmp_path, "--steps", 2, "--sample-length", 0, "--metrics", "tensorboard") == 0
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"gradient_norm" in content
    assert b"validation_bits_per_byte" in content


def test_accumulated_batches_are_one_larger_batch():
    config = LanguageModelConfig(
        layers=("sdm", "swa"), dim=16, memory={"slots_per_head": 16, "num_writes": 2, "num_reads": 2}
    )
    trainer = Trainer(config, OptimizerConfig(10, 1e-2, 0, 0.1, 1.0))
    batch = np.random.default_rng(0).integers(0, 256, (6, 20)).astype(np.int32)
    results = []
    for pieces in (batch[None], batch.reshape(3, 2, 20)):
        state, metrics = trainer.step(trainer.init(0), pieces)
        results.append((state.params, metrics["loss"], metrics["gradient_norm"]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5), *results)


def test_slot_statistics():
    """Against counts in NumPy of the slots that the layer selects."""
    config = LanguageModelConfig(
        layers=("swa", "sdm"),
        dim=16,
        memory={"slots_per_head": 64, "num_heads": 2, "num_writes": 3, "num_reads": 2, "query_batchnorm": True},
    )
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    texts = [np.random.default_rng(i).integers(0, 256, (2, 9 + i)) for i in range(2)]
    (statistics,) = slot_statistics(model, texts)
    assert statistics.layer == 1
    model.eval()

    @jax.jit
    def layer_alone(model, tokens):
        layer = model.blocks[1].mixer
        x = model.blocks[1].mixer_norm(model.blocks[0](model.embedding(tokens))[0])
        k_idx, _, _, beta, *_ = layer.operands(x)
        return k_idx, beta, layer(x)[1].bank

    written, strengths, norms = [], [], []
    for tokens in texts:
        k_idx, beta, bank = map(np.asarray, layer_alone(model, tokens))
        written.append(np.moveaxis(k_idx, 1, 0).reshape(2, -1))
        strengths.append(np.moveaxis(beta, 1, 0).reshape(2, -1))
        norms.append(np.square(bank).sum(-1).mean((0, 2)))
    for head in range(2):
        ids = np.concatenate([w[head] for w in written])
        counts = np.bincount(ids, minlength=64)
        assert statistics.written[head] == (counts > 0).mean()
        share = counts[counts > 0] / counts.sum()
        assert statistics.write_entropy[head] == pytest.approx(-(share * np.log(share)).sum() / np.log(64))
    np.testing.assert_allclose(statistics.write_strength, np.concatenate(strengths, 1).mean(1), rtol=1e-5)
    np.testing.assert_allclose(statistics.final_norm, np.sqrt((18 * norms[0] + 20 * norms[1]) / 38), rtol=1e-5)
    initial = np.square(np.asarray(model.blocks[1].mixer.bank[...]).reshape(2, 64, 8)).sum(-1).mean(1)
    np.testing.assert_allclose(statistics.initial_norm, np.sqrt(initial), rtol=1e-5)
    with pytest.raises(ValueError, match="texts must have at least one batch"):
        slot_statistics(model, [])


def test_info(capsys):
    assert main(["info", "--slots", "1024", "--layers", "sdm,attention", "--length", "128"]) == 0
    out = capsys.readouterr().out
    assert f"sdm_jax {sdm_jax.__version__}, jax {jax.__version__}" in out
    assert "devices: " in out
    assert "131,072 in initial banks" in out
    assert "layer 0 (sdm), served by 'cpu': 2 chunks of 64 tokens" in out
    assert "banks 2 x 1 x 1024 x 128 float32: 1 MiB" in out
    assert "without differentiation" in out
    assert "decoding, 2 texts of up to 128 tokens: 1.25 MiB" in out
    assert main(["info", "--memory-heads", "5"]) == 2
    assert "--memory-heads must divide --dim (128), got 5" in capsys.readouterr().err


def test_byte_tokenizer():
    assert ByteTokenizer().decode(ByteTokenizer().encode("naïve ☃")) == "naïve ☃"
