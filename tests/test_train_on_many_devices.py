"""Training on several devices and in several processes, against one device."""

import csv
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

pytest.importorskip("flax")

from sdm_jax.cli import main
from sdm_jax.cli._training import OptimizerConfig, Trainer
from sdm_jax.flax import LanguageModelConfig, model_shardings

FLAGS = """
    --steps 4 --batch-size 4 --length 32 --validation-tokens 256 --sample-length 4 --validate-every 4 --dim 16
    --num-heads 2 --slots 16 --writes 2 --reads 2 --layers sdm --hidden-dim 16 --memory-heads 2
""".split()  # noqa: SIM905


def mesh_of(data, model):
    devices = jax.devices("cpu")[: data * model]
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices)


def make_trainer(mesh=None, heads=2):
    memory = dict(num_heads=heads, slots_per_head=64, num_writes=4, num_reads=4, query_batchnorm=True)
    config = LanguageModelConfig(layers=("sdm",), dim=32, hidden_dim=32, memory=memory)
    return Trainer(config, OptimizerConfig(10, 1e-2, 2, 0.1, 1.0), mesh)


def train(trainer, steps=3):
    state = trainer.init(0)
    batches = np.random.default_rng(0).integers(0, 256, (steps, 2, 4, 33)).astype(np.int32)  # two are accumulated
    losses = []
    for batch in batches:
        state, metrics = trainer.step(state, trainer.place(batch))
        losses.append(float(metrics["loss"]))
    return state, losses, np.asarray(trainer.losses(state, trainer.place(batches[0, 0])))


@pytest.mark.parametrize(
    ("data", "model", "heads"),
    [(4, 1, 2), (2, 2, 2), (2, 2, 1)],
    ids=["data", "data_heads", "data_columns"],
)
def test_losses_and_parameters_of_a_mesh(data, model, heads):
    state, losses, by_position = train(make_trainer(heads=heads))
    trainer = make_trainer(mesh_of(data, model), heads)
    sharded, sharded_losses, sharded_by_position = train(trainer)
    np.testing.assert_allclose(sharded_losses, losses, rtol=1e-5)
    np.testing.assert_allclose(sharded_by_position, by_position, rtol=1e-4)
    for a, b in zip(jax.tree.leaves(trainer.local(sharded).params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-3)  # Adam divides small gradients by their own size
    # Steps leave the state where it was.
    for x, shape in zip(jax.tree.leaves(sharded), jax.tree.leaves(trainer.shapes()), strict=True):
        assert x.sharding.is_equivalent_to(shape.sharding, x.ndim)
    (bank,) = (x for path, x in jax.tree_util.tree_leaves_with_path(sharded.params) if "bank" in str(path))
    if model > 1:
        spec = PartitionSpec("model") if heads % model == 0 else PartitionSpec(None, "model")
        assert bank.sharding.is_equivalent_to(jax.sharding.NamedSharding(bank.sharding.mesh, spec), 2)


def test_heads_need_no_gather():
    """Each device has its heads' banks and operands; only what all heads make together is summed."""
    trainer = make_trainer(mesh_of(1, 2))
    batch = trainer.place(np.zeros((1, 4, 33), np.int32))
    text = Trainer.step.lower(trainer, trainer.init(0), batch).compile().as_text()
    bank_rows = 2 * 64
    assert "all-reduce" in text
    assert not [line for line in text.splitlines() if " all-gather(" in line and f"[{bank_rows}," in line]
    assert not [line for line in text.splitlines() if " all-gather(" in line and ",64,16]" in line]


def test_a_mesh_without_the_axis():
    with pytest.raises(ValueError, match=r"axis must be one of the mesh's \('data', 'model'\), got 'heads'"):
        model_shardings({}, mesh_of(1, 1), 1, axis="heads")


@pytest.mark.parametrize(
    ("mesh", "num_heads", "error", "message"),
    [
        (None, 2, TypeError, "mesh must be a jax.sharding.Mesh, got NoneType"),
        (mesh_of(1, 1), 0, ValueError, "num_heads must be at least 1, got 0"),
        (mesh_of(1, 1), 2.0, TypeError, "num_heads must be an integer, got 2.0"),
    ],
    ids=["mesh", "zero", "float"],
)
def test_bad_arguments_of_model_shardings(mesh, num_heads, error, message):
    with pytest.raises(error, match=message):
        model_shardings({}, mesh, num_heads)


# ---- the command


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(400)))
    return path


def arguments(text, out, *flags):
    return ["train", *FLAGS, "--data", str(text), "--out", str(out), *flags]


@pytest.fixture(scope="module")
def one_device(text, tmp_path_factory):
    """A run of four steps, continued to six."""
    out = tmp_path_factory.mktemp("runs") / "one"
    assert main(arguments(text, out)) == 0
    assert main(arguments(text, out, "--resume", "--steps", "6")) == 0
    return out


def losses_of(out):
    with open(out / "metrics.csv") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def test_the_command_on_a_mesh(text, tmp_path, one_device, capsys):
    assert main(arguments(text, tmp_path, "--mesh", "data=2,model=2")) == 0
    assert "sample:" in capsys.readouterr().out
    np.testing.assert_allclose(losses_of(tmp_path), losses_of(one_device)[:4], rtol=1e-4)


def test_two_processes_save_what_one_restores(text, tmp_path, one_device):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    shared = ["--mesh", "data=2,model=2", "--coordinator", address, "--processes", "2", "--process-id"]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "sdm_jax", *arguments(text, tmp_path, *shared, str(i))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in (0, 1)
    ]
    (output, errors), (second, second_errors) = (process.communicate(timeout=300) for process in started)
    assert [process.returncode for process in started] == [0, 0], errors + second_errors
    assert "checkpoint: step 4" in output
    assert "step" not in second.replace("[Gloo]", "")  # the first one speaks
    assert main(arguments(text, tmp_path, "--resume", "--steps", "6")) == 0
    assert len(losses_of(tmp_path)) == 6
    np.testing.assert_allclose(losses_of(tmp_path), losses_of(one_device), rtol=1e-4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mesh", "data=3"], "--batch-size 4 must be a multiple of data=3 of --mesh; the next is 6"),
        (["--mesh", "rows=2"], "must be like data=2,model=2, got 'rows=2'"),
        (["--mesh", "data=0"], "must be like data=2,model=2, got 'data=0'"),
        (["--processes", "2"], "--processes 2 needs --coordinator"),
        (["--mesh", "data=1", "--processes", "2", "--coordinator", "localhost:1"], "must divide the 1 devices"),
    ],
)
def test_bad_flags(text, tmp_path, flags, message, capsys):
    try:
        code = main(arguments(text, tmp_path / "out", *flags))
    except SystemExit as usage:
        code = usage.code
    assert code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out" / "metrics.csv").exists()
