"""Multi-query associative recall: pairs of a key and a value, and much later each key again, asking for its value.

`python tests/recall.py` trains a model with Sparse Delta Memory and one with windows alone, for three seeds each, and
prints the share of right answers on texts that they have not seen. `--help` lists what can be changed. A harder task,
for which models train on shorter texts of fewer pairs first, is

    python tests/recall.py --pairs 256 --vocab-size 8192 --length 2048 --dim 256 --entries 32 --batch 8 --seeds 1 \\
        --slots 1024 4096 16384 --easier 16 4 --steps 3500 500 600
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from sdm_jax.flax import LanguageModel, LanguageModelConfig, weight_decay_mask

NOTHING_ASKED = -1


@dataclasses.dataclass(frozen=True)
class Task:
    """Texts of `length` tokens: `pairs` keys, each followed by its value; then each key once more, asking for it.

    Token 0 fills the gaps. The keys of a text are distinct, of the lower half of the vocabulary; values are of the
    upper half. A question is more than `distance` tokens after the value that it asks for.
    """

    pairs: int = 16
    vocab_size: int = 64
    length: int = 128
    distance: int = 32

    def __post_init__(self):
        keys = self.vocab_size // 2 - 1
        if not 1 <= self.pairs <= keys:
            raise ValueError(f"pairs must be 1 to {keys}, the keys of a vocabulary of {self.vocab_size}: {self.pairs}")
        # The questions of pair i and later ones have the places from _first_place(i) on.
        least = max(self._first_place(i) + self.pairs - i for i in range(self.pairs))
        if self.length < least:
            raise ValueError(f"{self.pairs} pairs with distance {self.distance} need length {least}: {self.length}")

    def _first_place(self, pair: int) -> int:
        return max(2 * self.pairs, 2 * pair + 2 + self.distance)

    def draw(self, rng: np.random.Generator, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """`(tokens, answers)`, each `[batch, length]` int32; `answers` is `NOTHING_ASKED` where nothing is asked."""
        half = self.vocab_size // 2
        rows = np.arange(batch)
        tokens = np.zeros((batch, self.length), np.int32)
        answers = np.full((batch, self.length), NOTHING_ASKED, np.int32)
        if half <= 1024:
            keys = 1 + np.argsort(rng.random((batch, half - 1)), axis=1)[:, : self.pairs]
        else:  # to sort all takes longer than a step
            keys = 1 + np.stack([rng.choice(half - 1, self.pairs, replace=False) for _ in rows])
        values = rng.integers(half, self.vocab_size, (batch, self.pairs))
        tokens[:, 0 : 2 * self.pairs : 2] = keys
        tokens[:, 1 : 2 * self.pairs : 2] = values
        order = rng.random((batch, self.length))
        # From the last pair, which has the fewest places left, to the first.
        for i in reversed(range(self.pairs)):
            first = self._first_place(i)
            places = first + order[:, first:].argmax(axis=1)
            order[rows, places] = -1.0  # taken
            tokens[rows, places], answers[rows, places] = keys[:, i], values[:, i]
        return tokens, answers

    def easier(self, factor: int) -> Task:
        """The task with texts of a `factor`-th of the length, and as many pairs fewer."""
        return dataclasses.replace(self, pairs=self.pairs // factor, length=self.length // factor)


class Stage(NamedTuple):
    """Steps of a training on texts of one task."""

    task: Task
    steps: int
    batch: int


def train(
    stages: Sequence[Stage], config: LanguageModelConfig, *, seed: int, learning_rate: float
) -> Iterator[tuple[int, float, Any]]:
    """Trains on new texts, stage after stage.

    Gives the steps done, the loss and `accuracy()`, of the last stage's task, every 50 steps and at the end.
    """
    steps = sum(stage.steps for stage in stages)
    model = LanguageModel(config, rngs=nnx.Rngs(seed))
    graph, params, statistics = nnx.split(model, nnx.Param, ...)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, min(50, steps // 2), steps, learning_rate / 20)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01, mask=weight_decay_mask)
    )

    @jax.jit
    def step(params, statistics, state, tokens, answers):
        def loss_fn(params):
            model = nnx.merge(graph, params, statistics, copy=True)
            logits, _ = model(tokens)
            asked = answers != NOTHING_ASKED
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(asked, answers, 0))
            return jnp.where(asked, losses, 0).sum() / asked.sum(), nnx.state(model, nnx.Param, ...)[1]

        (loss, statistics), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), statistics, state, loss

    @jax.jit
    def right(params, statistics, tokens, answers):
        model = nnx.merge(graph, params, statistics, copy=True)
        model.eval()
        logits, _ = model(tokens)
        return (logits.argmax(-1) == answers).sum(), (answers != NOTHING_ASKED).sum()

    def accuracy():
        """The share of right answers on 512 texts of their own."""
        rng = np.random.default_rng([seed, 2])
        task, _, batch = stages[-1]
        counts = [right(params, statistics, *task.draw(rng, batch)) for _ in range(-(-512 // batch))]
        return float(sum(c[0] for c in counts) / sum(c[1] for c in counts))

    rng = np.random.default_rng([seed, 1])
    state = optimizer.init(params)
    texts = (stage.task.draw(rng, stage.batch) for stage in stages for _ in range(stage.steps))
    for i, text in enumerate(texts, 1):
        params, statistics, state, loss = step(params, statistics, state, *text)
        if i % 50 == 0 or i == steps:
            yield i, float(loss), accuracy


def config(task: Task, layers: tuple[str, ...] = ("swa", "sdm"), **settings: Any) -> LanguageModelConfig:
    """The model of the experiment: two layers, a window of 16 tokens."""
    memory = {"query_batchnorm": True, "write_scale": 3.0, "read_scale": 3.0}
    memory |= {"num_heads": 4, "slots_per_head": 256, "num_writes": 16, "num_reads": 16} | settings.pop("memory", {})
    defaults = {"dim": 64, "num_heads": 8, "window": 16, "hidden_dim": 128}
    return LanguageModelConfig(layers=layers, vocab_size=task.vocab_size, memory=memory, **(defaults | settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    for field in dataclasses.fields(Task):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, default=field.default, type=type(field.default))
    parser.add_argument("--slots", default=[256], nargs="+", type=int)
    parser.add_argument("--entries", default=16, type=int, help="writes and reads of a token")
    parser.add_argument("--dim", default=64, type=int)
    parser.add_argument("--seeds", default=3, type=int)
    parser.add_argument("--easier", default=[], nargs="*", type=int, help="divisors of pairs and length to begin with")
    parser.add_argument("--steps", default=[1600], nargs="+", type=int, help="of each stage")
    parser.add_argument("--batch", default=32, type=int, help="of the last stage; the others have as many tokens")
    parser.add_argument("--learning-rate", default=4e-3, type=float)
    parser.add_argument("--only", choices=("memory", "windows"))
    arguments = parser.parse_args()
    task = Task(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Task)})
    models = {}
    if arguments.only != "windows":
        for slots in arguments.slots:
            memory = {"slots_per_head": slots, "num_writes": arguments.entries, "num_reads": arguments.entries}
            models[f"{slots} slots"] = config(task, dim=arguments.dim, memory=memory)
    if arguments.only != "memory":
        models["windows only"] = config(task, layers=("swa", "swa"), dim=arguments.dim)
    if len(arguments.steps) != 1 + len(arguments.easier):
        parser.error("--steps needs a number for each of --easier, and one for the task itself")
    stages = [
        Stage(task.easier(factor), steps, arguments.batch * factor)
        for factor, steps in zip([*arguments.easier, 1], arguments.steps, strict=True)
    ]
    every = max(50, sum(arguments.steps) // 20 // 50 * 50)
    for name, model in models.items():
        shares = []
        for seed in range(arguments.seeds):
            started = time.perf_counter()
            for step, loss, accuracy in train(stages, model, seed=seed, learning_rate=arguments.learning_rate):
                if step % every == 0:
                    print(f"{name}, seed {seed}, step {step}: loss {loss:.4f}, {accuracy():.1%} right", flush=True)
            shares.append(accuracy())
            seconds = time.perf_counter() - started
            print(f"{name}, seed {seed}: {shares[-1]:.1%} right, {seconds:.0f} s", flush=True)
        print(f"{name}: mean {np.mean(shares):.1%} of {arguments.seeds} seeds", flush=True)


if __name__ == "__main__":
    main()
