"""The Sparse Delta Memory layer: a sequence mixer with one large bank of slots a head (section 6)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sdm_jax import checks
from sdm_jax._layout import BANK_DTYPES, SNAPSHOT_MODES
from sdm_jax.decode import decode_step
from sdm_jax.flax import _settings
from sdm_jax.flax.parameters import BankParam, GateParam
from sdm_jax.product_key import check_count, check_factors, product_key_topk
from sdm_jax.write_read import write_read

_L2_EPSILON = 1e-6
# PyTorch's defaults: a published checkpoint means the same here.
_NORM_EPSILON = 1e-5
_BATCHNORM_MOMENTUM = 0.9
_SMALLEST_A = 1e-4
_DT_RANGE = (1e-3, 1e-1)
MAX_SLOTS = 2**31 - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SDMState:
    """What the layer carries from one piece of a sequence to the next; a pytree.

    Attributes:
        bank: `[B, H, S, D]`, the bank of every sequence and head after the tokens seen.
        tokens: int32 scalar, how many tokens every sequence has seen.
    """

    bank: jax.Array
    tokens: jax.Array


def _softmax(scores, scale):
    return jax.nn.softmax(scale * scores, axis=-1)


def _l2(scores, scale):
    scores = scale * scores
    return scores * jax.lax.rsqrt(jnp.sum(scores * scores, axis=-1, keepdims=True) + _L2_EPSILON)


def _elementwise(function):
    return lambda scores, scale: function(scale * scores)


ACTIVATIONS: dict[str, Callable[[jax.Array, float], jax.Array]] = {
    "softmax": _softmax,
    "l2": _l2,
    "identity": _elementwise(lambda x: x),
    "relu": _elementwise(jax.nn.relu),
    "gelu": _elementwise(jax.nn.gelu),
    "silu": _elementwise(jax.nn.silu),
    "sigmoid": _elementwise(jax.nn.sigmoid),
    "softplus": _elementwise(jax.nn.softplus),
    "tanh": _elementwise(jnp.tanh),
}
"""How scores become weights: of `scale * score`, the softmax or the L2 normalisation over a token's selected
slots, or a function of each."""


class SparseDeltaMemory(nnx.Module):
    """Sparse Delta Memory over token features (section 6 of the specification).

    Every token writes `num_writes` and reads `num_reads` of the `slots_per_head` slots of each head's
    bank by a gated delta rule. The slots are chosen by an exact product-key top-k, so the cost of a
    token does not depend on the number of slots.

    `y, state = layer(x, state)` continues where `state` stopped; a sequence may be given in pieces of
    any length. Without a state every sequence starts from the initial bank.

    Arguments:
        dim: width of the features; a head is `D = dim / num_heads` wide.
        num_heads: independent banks side by side.
        slots_per_head: `S`, the slots of a head: the product of the factors.
        num_writes: `W`, slots a token writes in a head, `1..min(256, S)`.
        num_reads: `R`, slots a token reads in a head, `1..min(256, S)`.
        product_key_factors: sizes of the product key's factors; by default two of `sqrt(slots_per_head)`.
        write_activation: how write scores become weights, a name of `ACTIVATIONS`. Writing is stable
            where the squared weights of a token sum to at most 2, as those of `"softmax"` and `"l2"` do.
        read_activation: the same for read scores.
        write_scale: factor of the write scores before the activation.
        read_scale: factor of the read scores before the activation.
        normalize_readings: LayerNorm over each head's readings.
        output_gate: multiply the merged readings by a sigmoid gate of the features.
        query_batchnorm: BatchNorm of the write and read scores, which keeps all slots in use. Its
            running statistics serve in `eval()` mode.
        key_weighted_decay: one forget gate a write, the token's gate times the write's weight, instead
            of one a token.
        learned_bank: the initial bank is a parameter `[H * S, D]` shared by the batch; else zeros.
        A_init_range: range of the uniform draw of `A`, the rate of forgetting.
        use_bias: biases in the projections.
        snapshot_quant: how the backward's copy of overwritten rows is stored: `"none"`, `"bf16"`, `"fp8"`
            or `"int4"`.
        grad_bank_dtype: dtype that the gradient of the bank is carried in: None (the bank's) or float32.
        chunk_size: tokens handled together, `16..256`; changes results only by rounding.
        implementation: that of `sdm_jax.write_read`; None: the best for the platform.
        dtype: dtype of the computation and of the bank, float32, bfloat16 or float64; None: `param_dtype`.
            Gates are computed in float32 (float64) in any case.
        param_dtype: dtype of the parameters.
        kernel_init: initializer of the projections; by default a normal of deviation `dim^-0.5`, cut at three
            deviations. May carry partitioning metadata, as that of `nnx.Linear`.
        out_kernel_init: that of the output projection, whose rows, not columns, belong to the heads; None:
            `kernel_init`.
        bias_init: initializer of the biases, by default zeros.
        bank_init: initializer of the learned bank; by default as `kernel_init`'s default.
        kernel_metadata: metadata of the projections' kernels, as `nnx.Linear` has it.
        out_kernel_metadata: that of the output projection's kernel; None: `kernel_metadata`.
        bias_metadata: metadata of the biases.
        bank_metadata: metadata of the learned bank.
        rngs: random streams; `params` is used.

    Raises:
        TypeError: a setting has the wrong type.
        ValueError: a setting is out of range; the message names it and the nearest valid value.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int = 1,
        slots_per_head: int = 4096,
        num_writes: int = 16,
        num_reads: int = 16,
        product_key_factors: Sequence[int] | None = None,
        write_activation: str = "softmax",
        read_activation: str = "softmax",
        write_scale: float = 1.0,
        read_scale: float = 1.0,
        normalize_readings: bool = True,
        output_gate: bool = True,
        query_batchnorm: bool = False,
        key_weighted_decay: bool = False,
        learned_bank: bool = True,
        A_init_range: tuple[float, float] = (0.0, 16.0),
        use_bias: bool = False,
        snapshot_quant: str = "none",
        grad_bank_dtype: Any = None,
        chunk_size: int = 64,
        implementation: str | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: nnx.Initializer | None = None,
        out_kernel_init: nnx.Initializer | None = None,
        bias_init: nnx.Initializer = nnx.initializers.zeros,
        bank_init: nnx.Initializer | None = None,
        kernel_metadata: Mapping[str, Any] | None = None,
        out_kernel_metadata: Mapping[str, Any] | None = None,
        bias_metadata: Mapping[str, Any] | None = None,
        bank_metadata: Mapping[str, Any] | None = None,
        rngs: nnx.Rngs,
    ):
        self.dim = _settings.integer("dim", dim, 1)
        self.num_heads = _settings.divisor("num_heads", num_heads, "dim", self.dim)
        self.head_dim = self.dim // self.num_heads
        self.factors = _check_slots(slots_per_head, product_key_factors)
        self.slots_per_head = math.prod(self.factors)
        self.num_writes = check_count("num_writes", num_writes, self.slots_per_head)
        self.num_reads = check_count("num_reads", num_reads, self.slots_per_head)
        self.write_activation = _settings.choice("write_activation", write_activation, ACTIVATIONS)
        self.read_activation = _settings.choice("read_activation", read_activation, ACTIVATIONS)
        self.write_scale = _settings.number("write_scale", write_scale)
        self.read_scale = _settings.number("read_scale", read_scale)
        self.key_weighted_decay = _settings.flag("key_weighted_decay", key_weighted_decay)
        self.snapshot_quant = _settings.choice("snapshot_quant", snapshot_quant, SNAPSHOT_MODES)
        self.chunk_size = _settings.integer("chunk_size", chunk_size, *checks.CHUNK_SIZES)
        self.implementation = _settings.choice("implementation", implementation, (None, *checks.IMPLEMENTATIONS))
        self.param_dtype = _settings.float_dtype("param_dtype", param_dtype, BANK_DTYPES)
        self.dtype = _settings.float_dtype("dtype", self.param_dtype if dtype is None else dtype, BANK_DTYPES)
        if grad_bank_dtype is not None:
            if self.dtype == jnp.float64:
                raise ValueError(
                    f"grad_bank_dtype must be None for a float64 bank, got {grad_bank_dtype!r}"
                    "; the nearest valid value is None"
                )
            grad_bank_dtype = _settings.float_dtype("grad_bank_dtype", grad_bank_dtype, ("float32",))
        self.grad_bank_dtype = grad_bank_dtype
        low, high = _check_range("A_init_range", A_init_range)

        init = nnx.initializers.truncated_normal(stddev=self.dim**-0.5, lower=-3.0, upper=3.0)
        kernel_init = init if kernel_init is None else _settings.initializer("kernel_init", kernel_init)
        out_name = "kernel_init" if out_kernel_init is None else "out_kernel_init"
        out_kernel_init = kernel_init if out_kernel_init is None else _settings.initializer(out_name, out_kernel_init)
        _settings.initializer("bias_init", bias_init)
        bank_init = init if bank_init is None else _settings.initializer("bank_init", bank_init)
        kernel_metadata = _settings.metadata("kernel_metadata", kernel_metadata)
        if out_kernel_metadata is None:
            out_kernel_metadata = kernel_metadata
        out_kernel_metadata = _settings.metadata("out_kernel_metadata", out_kernel_metadata)
        bias_metadata = _settings.metadata("bias_metadata", bias_metadata)
        bank_metadata = _settings.metadata("bank_metadata", bank_metadata)
        _settings.random_streams("rngs", rngs)

        normalize_readings = _settings.flag("normalize_readings", normalize_readings)
        output_gate = _settings.flag("output_gate", output_gate)
        query_batchnorm = _settings.flag("query_batchnorm", query_batchnorm)
        learned_bank = _settings.flag("learned_bank", learned_bank)
        use_bias = _settings.flag("use_bias", use_bias)
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}

        def projection(columns, kernel_init=kernel_init, kernel_metadata=kernel_metadata, name="kernel_init"):
            linear = nnx.Linear(
                self.dim,
                columns,
                use_bias=use_bias,
                kernel_init=kernel_init,
                bias_init=bias_init,
                kernel_metadata=kernel_metadata,
                bias_metadata=bias_metadata,
                rngs=rngs,
                **dtypes,
            )
            _settings.initialized(name, linear.kernel, (self.dim, columns))
            if linear.bias is not None:
                _settings.initialized("bias_init", linear.bias, (columns,))
            return linear

        def batchnorm():
            if not query_batchnorm:
                return None
            norm = nnx.BatchNorm(
                score_columns, momentum=_BATCHNORM_MOMENTUM, epsilon=_NORM_EPSILON, rngs=rngs, **dtypes
            )
            for statistic in (norm.mean, norm.var):
                # Flax makes them float32, which the statistics of float64 scores do not fit.
                statistic.set_value(statistic[...].astype(jnp.promote_types(self.dtype, jnp.float32)))
            return norm

        score_columns = self.num_heads * sum(self.factors)
        self.write_scores = projection(score_columns)
        self.write_norm = batchnorm()
        self.read_scores = projection(score_columns)
        self.read_norm = batchnorm()
        self.value = projection(self.dim)
        self.decay = projection(self.num_heads)
        self.strength = projection(self.num_heads)
        self.readings_norm = (
            nnx.LayerNorm(self.head_dim, epsilon=_NORM_EPSILON, rngs=rngs, **dtypes) if normalize_readings else None
        )
        self.output_gate = projection(self.dim) if output_gate else None
        self.output = projection(self.dim, out_kernel_init, out_kernel_metadata, out_name)

        a = jax.random.uniform(rngs.params(), (self.num_heads,), minval=low, maxval=high)
        self.A_log = GateParam(jnp.log(jnp.maximum(a, _SMALLEST_A)).astype(self.param_dtype))
        low, high = (math.log(dt) for dt in _DT_RANGE)
        dt = jnp.exp(jax.random.uniform(rngs.params(), (self.num_heads,), minval=low, maxval=high))
        # The inverse of softplus.
        self.dt_bias = GateParam((dt + jnp.log(-jnp.expm1(-dt))).astype(self.param_dtype))
        rows = self.num_heads * self.slots_per_head
        self.bank = (
            BankParam(bank_init(rngs.params(), (rows, self.head_dim), self.param_dtype), **bank_metadata)
            if learned_bank
            else None
        )
        if self.bank is not None:
            _settings.initialized("bank_init", self.bank, (rows, self.head_dim))

    @property
    def _bank_shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.slots_per_head, self.head_dim

    def init_state(self, batch: int, dtype: Any = None) -> SDMState:
        """The state of `batch` sequences that have seen no token; its bank has `dtype`, or the layer's.

        Raises:
            TypeError: `batch` is no integer, `dtype` no dtype of a bank, or the layer is abstract.
            ValueError: `batch` is negative.
        """
        dtype = self.dtype if dtype is None else _settings.float_dtype("dtype", dtype, BANK_DTYPES)
        shape = (_settings.integer("batch", batch, 0), *self._bank_shape)
        if self.bank is None:
            bank = jnp.zeros(shape, dtype)
        elif isinstance(self.bank.get_value(), jax.ShapeDtypeStruct):
            raise TypeError(
                f"the layer's bank is abstract, {self.bank.get_value()}: nnx.update the layer with arrays, or pass it "
                "to jax.eval_shape as an argument"
            )
        else:
            # Cast before the broadcast, which then is all that stands before the op: anything else there
            # would be a pass over the banks of the whole batch.
            bank = jnp.broadcast_to(self.bank[...].astype(dtype).reshape(1, *self._bank_shape), shape)
        return SDMState(bank=bank, tokens=jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array, state: SDMState | None = None) -> tuple[jax.Array, SDMState]:
        """Mixes the next tokens of every sequence into its bank and reads from it.

        Arguments:
            x: features, `[B, T, dim]`, any `T >= 0`.
            state: where the sequences stopped; None: at their start.

        Returns:
            `(y, state)`: `y [B, T, dim]` in the layer's dtype, and the state after these tokens.

        Raises:
            TypeError: `x` is no floating-point array, or `state` no `SDMState` of one.
            ValueError: `x` or `state` do not have the shapes above.
        """
        _settings.features("x", x, self.dim)
        batch, num_tokens, _ = x.shape
        if state is None:
            state = self.init_state(batch)
        self._check_state(state, x.shape)
        if batch * num_tokens == 0:  # of which BatchNorm has no statistics
            return jnp.zeros(x.shape, self.dtype), SDMState(bank=state.bank, tokens=state.tokens + num_tokens)
        x = x.astype(self.dtype)
        operands = self.operands(x)
        if num_tokens == 1:
            y, bank = decode_step(state.bank, *(a[:, :, 0] for a in operands), implementation=self.implementation)
            y = y[:, :, None]
        else:
            y, bank = write_read(
                state.bank,
                *operands,
                chunk_size=self.chunk_size,
                snapshot_quant=self.snapshot_quant,
                grad_bank_dtype=self.grad_bank_dtype,
                implementation=self.implementation,
            )
        y = jnp.swapaxes(y, 1, 2).astype(self.dtype)  # [B, T, H, D]
        if self.readings_norm is not None:
            y = self.readings_norm(y)
        y = y.reshape(batch, num_tokens, self.dim)
        if self.output_gate is not None:
            y = y * jax.nn.sigmoid(self.output_gate(x))
        return self.output(y), SDMState(bank=bank, tokens=state.tokens + num_tokens)

    def _check_state(self, state, x_shape):
        if not isinstance(state, SDMState):
            raise TypeError(f"state must be an SDMState, as init_state gives it, or None, got {type(state).__name__}")
        for name in ("bank", "tokens"):
            if not checks.is_array(getattr(state, name)):
                raise TypeError(f"state.{name} must be an array, got {type(getattr(state, name)).__name__}")
        if state.bank.dtype.name not in BANK_DTYPES:
            raise TypeError(f"state.bank must be {', '.join(BANK_DTYPES)}, got {state.bank.dtype.name}")
        shape = (x_shape[0], *self._bank_shape)
        if state.bank.shape != shape:
            raise ValueError(f"state.bank must be {shape} for x of shape {x_shape}, got {state.bank.shape}")
        if state.tokens.shape or not jnp.issubdtype(state.tokens.dtype, jnp.integer):
            raise TypeError(
                f"state.tokens must be an integer scalar, got shape {state.tokens.shape} of {state.tokens.dtype}"
            )

    def operands(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """What tokens `x [B, T, dim]` ask of their banks: the arguments of `sdm_jax.write_read` after the bank.

        Returns:
            `(k_idx, k_val, v, beta, g, q_idx, q_val)`, each `[B, H, T, ...]`.
        """
        x = x.astype(self.dtype)
        acc = jnp.promote_types(self.dtype, jnp.float32)
        k_val, k_idx = self._select(self.write_scores, self.write_norm, x, self.num_writes)
        q_val, q_idx = self._select(self.read_scores, self.read_norm, x, self.num_reads)
        k_val = ACTIVATIONS[self.write_activation](k_val.astype(acc), self.write_scale)
        q_val = ACTIVATIONS[self.read_activation](q_val.astype(acc), self.read_scale)
        v = self._heads(self.value(x))
        beta = jax.nn.sigmoid(self._heads(self.strength(x)).astype(acc))
        rate = jnp.exp(self.A_log[...].astype(acc))[None, None, :]
        step = jax.nn.softplus(self.decay(x).astype(acc) + self.dt_bias[...].astype(acc)[None, None, :])
        g = self._heads(-rate * step)
        if self.key_weighted_decay:
            g = g * k_val
        return k_idx, k_val.astype(self.dtype), v, beta, g, q_idx, q_val.astype(self.dtype)

    def _select(self, projection, norm, x, count):
        """The selected slots of every token and head and their scores, each `[B, H, T, count]`."""
        scores = projection(x)
        if norm is not None:
            scores = norm(scores)
        scores = scores.reshape(*x.shape[:2], self.num_heads, sum(self.factors))
        # Selected first: there is less to transpose.
        values, ids = product_key_topk(scores, self.factors, count)
        return jnp.swapaxes(values, 1, 2), jnp.swapaxes(ids, 1, 2)

    def _heads(self, x):
        """`[B, T, H * n]` as `[B, H, T, n]`."""
        return jnp.swapaxes(x.reshape(*x.shape[:2], self.num_heads, x.shape[-1] // self.num_heads), 1, 2)


def _check_slots(slots_per_head, product_key_factors) -> tuple[int, ...]:
    slots = _settings.integer("slots_per_head", slots_per_head, 1, MAX_SLOTS)
    if product_key_factors is None:
        side = _settings.square("slots_per_head", slots, MAX_SLOTS)
        return side, side
    factors = check_factors(product_key_factors, "product_key_factors")
    if math.prod(factors) != slots:
        raise ValueError(
            f"slots_per_head must be the product of product_key_factors {factors}, got {slots}"
            f"; the nearest valid value is {math.prod(factors)}"
        )
    return factors


def _check_range(name, values) -> tuple[float, float]:
    try:
        low, high = values
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a pair of numbers, got {values!r}") from None
    low, high = _settings.number(name, low), _settings.number(name, high)
    if not 0 <= low <= high:
        nearest = (max(0.0, min(low, high)), max(0.0, low, high))
        raise ValueError(f"{name} must be 0 <= low <= high, got {values!r}; the nearest valid value is {nearest}")
    return low, high
