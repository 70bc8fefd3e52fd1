"""Sparse Delta Memory for JAX: a large bank of slots, written and read sparsely by a gated delta rule."""

from sdm_jax import kernels
from sdm_jax._calls import target_names
from sdm_jax._plan import Plan, plan
from sdm_jax.checks import UnsupportedConfigurationError, check_inputs, count_repeated_writes
from sdm_jax.decode import decode_step
from sdm_jax.in_place import value_and_grad_inplace
from sdm_jax.product_key import product_key_topk
from sdm_jax.write_read import write_read

__version__ = "0.1.0"

__all__ = [
    "Plan",
    "UnsupportedConfigurationError",
    "check_inputs",
    "count_repeated_writes",
    "decode_step",
    "kernels",
    "plan",
    "product_key_topk",
    "target_names",
    "value_and_grad_inplace",
    "write_read",
]
