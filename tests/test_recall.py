"""Associative recall: the memory solves it, windows alone cannot."""

import numpy as np
import pytest
from recall import NOTHING_ASKED, Stage, Task, config, train


def test_task():
    task = Task()
    tokens, answers = task.draw(np.random.default_rng(0), 200)
    assert tokens.shape == answers.shape == (200, 128)
    for text, answer in zip(tokens, answers, strict=True):
        keys, values = text[0:32:2], text[1:32:2]
        assert len(set(keys)) == 16
        assert set(keys) <= set(range(1, 32))
        assert set(values) <= set(range(32, 64))
        (places,) = np.nonzero(answer != NOTHING_ASKED)
        assert sorted(text[places]) == sorted(keys)
        assert not text[32:][answer[32:] == NOTHING_ASKED].any()
        for place in places:
            (pair,) = np.nonzero(keys == text[place])[0]
            assert answer[place] == values[pair]
            assert place - (2 * pair + 1) > 32


def test_task_without_room():
    Task().easier(2)
    for easier in (4, 32):  # 4 pairs in 32 tokens; no pair
        with pytest.raises(ValueError, match="pairs"):
            Task().easier(easier)
    with pytest.raises(ValueError, match="vocabulary"):
        Task(pairs=32)


def share(model, *stages, **training):
    *_, (_, _, accuracy) = train(stages, model, **training)
    return accuracy()


def test_small():
    """Four pairs, and a window that reaches back 6 tokens in two layers."""
    task = Task(pairs=4, vocab_size=16, length=40, distance=8)
    settings = {"window": 4, "dim": 32, "hidden_dim": 64, "memory": {"slots_per_head": 64, "num_heads": 2}}
    training = {"seed": 0, "learning_rate": 1e-2}
    assert share(config(task, **settings), Stage(task, 150, 32), **training) > 0.95
    assert share(config(task, layers=("swa", "swa"), **settings), Stage(task, 150, 32), **training) < 0.2


@pytest.mark.slow
def test_memory_solves_it_and_windows_do_not():
    task = Task()
    training, stage = {"learning_rate": 4e-3}, Stage(task, 1600, 32)
    memory = [share(config(task), stage, seed=seed, **training) for seed in range(3)]
    windows = [share(config(task, layers=("swa", "swa")), stage, seed=seed, **training) for seed in range(3)]
    assert np.mean(memory) > 0.95
    assert np.mean(windows) < 0.15
