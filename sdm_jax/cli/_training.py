"""The training state of a language model, its optimizer, and one compiled step."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sdm_jax.cli import _flags, _model
from sdm_jax.flax import LanguageModel, LanguageModelConfig, model_shardings, weight_decay_mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainingState:
    """All that a step changes; a pytree.

    Attributes:
        step: int32 scalar, steps done.
        params: the model's parameters.
        statistics: the model's other variables (running statistics of BatchNorm).
        optimizer: the optimizer's state.
    """

    step: jax.Array
    params: Any
    statistics: Any
    optimizer: Any


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW after clipping by the global norm, with linear warmup and a cosine to a tenth of the peak."""

    steps: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    clip_norm: float

    def schedule(self) -> optax.Schedule:
        """The learning rate of every step."""
        return optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=self.learning_rate,
            warmup_steps=min(self.warmup_steps, self.steps - 1),
            decay_steps=self.steps,
            end_value=0.1 * self.learning_rate,
        )

    def build(self) -> optax.GradientTransformation:
        """The optimizer of the model's parameters."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm),
            optax.adamw(self.schedule(), b2=0.99, weight_decay=self.weight_decay, mask=weight_decay_mask),
        )


def needed_settings() -> list[str]:
    """The names of the settings that a model is made from again: its tokenizer and those of `make_trainer`."""
    flags = _flags.Flags(argparse.ArgumentParser())
    _model.add_flags(flags)
    return ["tokenizer", *flags.defaults, *(field.name for field in dataclasses.fields(OptimizerConfig))]


def make_trainer(settings: argparse.Namespace, vocab_size: int, mesh: Mesh | None = None) -> Trainer:
    """The trainer that the settings of a run describe.

    Raises:
        CommandError: they describe none; the message names the flag.
    """
    config = _model.model_config(settings, vocab_size)
    optimizer_config = OptimizerConfig(
        steps=settings.steps,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        clip_norm=settings.clip_norm,
    )
    try:
        return Trainer(config, optimizer_config, mesh)
    except (TypeError, ValueError) as error:
        raise _model.name_the_flag(error, settings) from error


class Trainer:
    """The compiled functions of a run: `init`, `step`, `losses`.

    Arguments:
        model_config: settings of the model.
        optimizer_config: settings of the optimizer.
        mesh: devices, with axes `data` (of a batch) and `model` (of the memory's heads or columns); None: one device.

    Raises:
        TypeError, ValueError: bad settings of the model.
    """

    def __init__(self, model_config: LanguageModelConfig, optimizer_config: OptimizerConfig, mesh: Mesh | None = None):
        self._model_config = model_config
        self._schedule = optimizer_config.schedule()
        self._optimizer = optimizer_config.build()
        self._graph = nnx.graphdef(nnx.eval_shape(lambda: LanguageModel(model_config, rngs=nnx.Rngs(0))))
        self._mesh = mesh

    def _in_place(self, state: Any) -> Any:
        """The state, told to stay where the mesh has it."""
        return state if self._mesh is None else jax.lax.with_sharding_constraint(state, self._shardings(state))

    def _shardings(self, state: Any) -> Any:
        if self._mesh is None:
            here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            return jax.tree.map(lambda _: here, state)
        return model_shardings(state, self._mesh, (self._model_config.memory or {}).get("num_heads", 1))

    def shapes(self) -> TrainingState:
        """Shapes of a state's arrays, with their shardings."""
        shapes = jax.eval_shape(self.init, 0)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self._shardings(shapes)
        )

    def place(self, batch: np.ndarray) -> jax.Array:
        """`batch [..., B, T + 1]` on the devices."""
        if self._mesh is None:
            return jnp.asarray(batch)
        whole = batch.shape[-2] % self._mesh.shape["data"]  # of a few pieces of validation text
        spec = PartitionSpec(*[None] * (batch.ndim - 2), None if whole else "data")
        return jax.device_put(batch, NamedSharding(self._mesh, spec))

    def local(self, state: TrainingState) -> TrainingState:
        """The state on one device of this process."""
        if self._mesh is None:
            return state
        return jax.tree.map(jnp.asarray, multihost_utils.process_allgather(state, tiled=True))

    @functools.partial(jax.jit, static_argnums=0)
    def init(self, seed: jax.Array) -> TrainingState:
        """The state before the first step."""
        model = LanguageModel(self._model_config, rngs=nnx.Rngs(params=jax.random.key(seed)))
        params, statistics = nnx.state(model, nnx.Param, ...)
        return self._in_place(TrainingState(jnp.zeros((), jnp.int32), params, statistics, self._optimizer.init(params)))

    def model(self, state: TrainingState) -> LanguageModel:
        """The model with the parameters of `state`, in `eval()` mode."""
        model = nnx.merge(self._graph, state.params, state.statistics)
        model.eval()
        return model

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def step(self, state: TrainingState, batches: jax.Array) -> tuple[TrainingState, dict[str, jax.Array]]:
        """One step on `batches [N, B, T + 1]`, one after another, by the mean of their gradients.

        Returns:
            The state after it, and the metrics `loss` (mean over the batches before the step, in nats),
            `gradient_norm` (before clipping) and `learning_rate`.
        """

        def loss_fn(params, statistics, batch):
            # Copied, because BatchNorm changes its statistics.
            model = nnx.merge(self._graph, params, statistics, copy=True)
            model.train()
            loss = _losses(model, batch).mean()
            return loss, nnx.state(model, nnx.Param, ...)[1]

        def one(statistics, batch):
            (loss, statistics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, statistics, batch)
            return statistics, loss, grads

        def add(carry, batch):
            statistics, *sums = carry
            statistics, *terms = one(statistics, batch)
            return (statistics, *jax.tree.map(jnp.add, sums, terms)), None

        if len(batches) == 1:
            statistics, loss, grads = one(state.statistics, batches[0])
        else:
            zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params)
            (statistics, *sums), _ = jax.lax.scan(add, (state.statistics, *zeros), batches)
            loss, grads = jax.tree.map(lambda x: x / len(batches), sums)
        updates, optimizer = self._optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": loss,
            "gradient_norm": jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(grads))),
            "learning_rate": self._schedule(state.step),
        }
        return self._in_place(TrainingState(state.step + 1, params, statistics, optimizer)), metrics

    @functools.partial(jax.jit, static_argnums=0)
    def losses(self, state: TrainingState, batch: jax.Array) -> jax.Array:
        """Loss of each position, `[T]`, the mean over `batch [B, T + 1]`, in nats, in `eval()` mode."""
        return _losses(self.model(state), batch).mean(axis=0)


def _losses(model, batch):
    logits, _ = model(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
