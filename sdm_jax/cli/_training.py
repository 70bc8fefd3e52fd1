"""The training state of a language model, its optimizer, and one compiled step."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from sdm_jax.flax import BankParam, GateParam, LanguageModel, LanguageModelConfig


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
            optax.adamw(self.schedule(), b2=0.99, weight_decay=self.weight_decay, mask=_decayed),
        )


def _decayed(params):
    """Weight decay is for matrices that every token passes through."""

    def decays(variable):
        return variable.ndim >= 2 and not isinstance(variable, (BankParam, GateParam))

    return jax.tree.map(decays, params, is_leaf=lambda node: isinstance(node, nnx.Variable))


class Trainer:
    """The compiled functions of a run: `init`, `step`, `loss`.

    Arguments:
        model_config: settings of the model.
        optimizer_config: settings of the optimizer.

    Raises:
        TypeError, ValueError: bad settings of the model.
    """

    def __init__(self, model_config: LanguageModelConfig, optimizer_config: OptimizerConfig):
        self._model_config = model_config
        self._optimizer = optimizer_config.build()
        self._graph = nnx.graphdef(nnx.eval_shape(lambda: LanguageModel(model_config, rngs=nnx.Rngs(0))))

    @functools.partial(jax.jit, static_argnums=0)
    def init(self, seed: jax.Array) -> TrainingState:
        """The state before the first step."""
        model = LanguageModel(self._model_config, rngs=nnx.Rngs(params=jax.random.key(seed)))
        params, statistics = nnx.state(model, nnx.Param, ...)
        return TrainingState(jnp.zeros((), jnp.int32), params, statistics, self._optimizer.init(params))

    def num_parameters(self, state: TrainingState) -> str:
        """The number of parameters for people, those of the banks apart."""
        parts = nnx.split_state(state.params, BankParam, ...)
        banks, others = (sum(x.size for x in jax.tree.leaves(part)) for part in parts)
        return f"{others:,} parameters and {banks:,} in initial banks"

    def model(self, state: TrainingState) -> LanguageModel:
        """The model with the parameters of `state`, in `eval()` mode."""
        model = nnx.merge(self._graph, state.params, state.statistics)
        model.eval()
        return model

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def step(self, state: TrainingState, batch: jax.Array) -> tuple[TrainingState, jax.Array]:
        """One step on `batch [B, T + 1]`: the state after it and the mean loss, in nats, before it."""

        def loss_fn(params):
            # Copied, because BatchNorm changes its statistics.
            model = nnx.merge(self._graph, params, state.statistics, copy=True)
            model.train()
            loss = _loss(model, batch)
            return loss, nnx.state(model, nnx.Param, ...)[1]

        (loss, statistics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, optimizer = self._optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainingState(state.step + 1, params, statistics, optimizer), loss

    @functools.partial(jax.jit, static_argnums=0)
    def loss(self, state: TrainingState, batch: jax.Array) -> jax.Array:
        """Mean loss of `batch [B, T + 1]`, in nats, in `eval()` mode."""
        return _loss(self.model(state), batch)


def _loss(model, batch):
    logits, _ = model(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()
