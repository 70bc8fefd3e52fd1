"""Sparse Delta Memory as Flax NNX modules: the layer and a small language model. Needs the extra `flax`."""

from sdm_jax.flax.attention import Attention, AttentionState
from sdm_jax.flax.language_model import LanguageModel, LanguageModelConfig, generate
from sdm_jax.flax.layer import BankParam, GateParam, SDMState, SparseDeltaMemory

__all__ = [
    "Attention",
    "AttentionState",
    "BankParam",
    "GateParam",
    "LanguageModel",
    "LanguageModelConfig",
    "SDMState",
    "SparseDeltaMemory",
    "generate",
]
