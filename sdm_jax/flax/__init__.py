"""Sparse Delta Memory as Flax NNX modules: the layer and a small language model. Needs the extra `flax`."""

from sdm_jax.flax.attention import Attention, AttentionState
from sdm_jax.flax.generation import ByteTokenizer, Tokenizer, generate, generate_stream, generate_text
from sdm_jax.flax.language_model import LanguageModel, LanguageModelConfig
from sdm_jax.flax.layer import SDMState, SparseDeltaMemory
from sdm_jax.flax.parameters import BankParam, GateParam, ParameterCount, count_parameters, weight_decay_mask
from sdm_jax.flax.sharding import model_shardings
from sdm_jax.flax.torch_names import from_torch_state_dict, to_torch_state_dict

__all__ = [
    "Attention",
    "AttentionState",
    "BankParam",
    "ByteTokenizer",
    "GateParam",
    "LanguageModel",
    "LanguageModelConfig",
    "ParameterCount",
    "SDMState",
    "SparseDeltaMemory",
    "Tokenizer",
    "count_parameters",
    "from_torch_state_dict",
    "generate",
    "generate_stream",
    "generate_text",
    "model_shardings",
    "to_torch_state_dict",
    "weight_decay_mask",
]
