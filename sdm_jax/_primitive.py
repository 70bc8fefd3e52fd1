"""JAX primitives whose platform is chosen when they are lowered.

A primitive has one plain function for each implementation: `"cpu"` and `"cuda"` make a custom call,
`"xla"` is plain JAX. The parameter `implementation` asks for one of them, or (None) leaves the choice
to the platform that the computation is lowered for.

All operands and results of a primitive have the batch axes in front, and every function takes any
number of them, so vmap only has to put one more there.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from sdm_jax._sharding import Axes, needs_devices, partitioned, result_types, runs_on_many
from sdm_jax.checks import UnsupportedConfigurationError

Arrays = Sequence[Any]


def has_cuda_module() -> bool:
    """Whether the package was built with its CUDA kernels."""
    return importlib.util.find_spec("sdm_jax._cuda") is not None


@functools.cache
def gpu_refusal() -> str:
    """Why the CUDA kernels cannot run on a GPU of this machine; empty if they can, or if it has none."""
    from sdm_jax import _cuda  # type: ignore[attr-defined]

    return _cuda.refusal()


def choose_implementation(platform: str, asked: str | None, bank_dtype: Any = None) -> str:
    """The implementation that serves on a platform ("cpu", "cuda", "rocm", "tpu"), or an error that says why not."""
    if asked == "xla":
        return "xla"
    if asked == "cpu" and platform != "cpu":
        raise UnsupportedConfigurationError(
            f"implementation='cpu' cannot serve a computation for {platform}: its kernels run on the CPU only. "
            "Use implementation=None or 'xla'."
        )
    if asked == "cuda" and platform != "cuda":
        raise UnsupportedConfigurationError(
            f"implementation='cuda' cannot serve a computation for {platform}: its kernels run on NVIDIA GPUs "
            "only. Use implementation=None or 'xla'."
        )
    if platform == "cpu":
        return "cpu"
    if platform == "cuda":
        if not has_cuda_module():
            reason = "needs the CUDA module, which this installation of sdm_jax lacks"
        elif bank_dtype == jnp.float64:
            reason = "cannot serve a float64 bank; float32 and bfloat16 are supported"
        elif gpu_refusal():
            reason = f"cannot serve here: {gpu_refusal()}"
        else:
            return "cuda"
        if asked == "cuda":
            raise UnsupportedConfigurationError(
                f"implementation='cuda' {reason}. implementation=None or 'xla' (plain JAX) runs."
            )
    return "xla"


@functools.cache
def _warn_no_kernels(reason: str) -> None:
    warnings.warn(f"Plain JAX (implementation='xla') serves on this GPU: {reason}.", stacklevel=2)


def _warn_if_no_kernels() -> None:
    """Says once why a GPU gets plain JAX."""
    if not has_cuda_module():
        _warn_no_kernels(
            "sdm_jax was installed without its CUDA module. To get the kernels, install it from source where nvcc is "
            "found, with the environment variable SDM_CUDA=ON"
        )
    elif gpu_refusal():
        _warn_no_kernels(gpu_refusal())


def define(
    name: str,
    results: Callable[..., Arrays],
    *,
    cpu: Callable[..., Arrays],
    cuda: Callable[..., Arrays] | None = None,
    xla: Callable[..., Arrays],
    axes: str | Callable[..., str],
) -> Callable[..., list[Any]]:
    """A function `f(*arrays, implementation=None, note=None, **params)` that binds a new primitive.

    `note` changes nothing; it is there for who reads the program.

    **Arguments:**

    - `results`: from the operands (anything with shape and dtype) and the parameters to the results'
      shapes and dtypes.
    - `cpu`, `cuda`: make the custom calls. Take the operands and the parameters. Without `cuda` the calls
      are the same on both.
    - `xla`: the same in plain JAX; also takes `platform`.
    - `axes`: of the operands and results, as `_sharding.Axes` reads them, or a function of the parameters.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def abstract_eval(*operands, implementation, note, **params):
        del implementation, note
        return result_types(axes_of(params), operands, results(*operands, **params))

    def lower(platform, ctx, *operands, implementation, note, **params):
        del note
        chosen = choose_implementation(platform, implementation, operands_dtype(ctx))
        if platform == "cuda" and implementation is None:
            _warn_if_no_kernels()
        functions: dict[str, Callable[..., Arrays]] = {
            "cpu": cpu,
            "cuda": cuda or cpu,
            "xla": functools.partial(xla, platform=platform),
        }
        f: Callable[..., Arrays] = functools.partial(functions[chosen], **params)
        # What serves a device knows no mesh: the types are those of its parts.
        parts = ctx.replace(avals_in=[jax.core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in])
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            if runs_on_many(ctx):
                f = partitioned(f, axes_of(params), parts.avals_in)
            return mlir.lower_fun(f, multiple_results=True)(parts, *operands)

    def axes_of(params):
        return Axes.parse(axes(**params) if callable(axes) else axes)

    def operands_dtype(ctx):
        # float64 operands come with a float64 bank only.
        return jnp.float64 if any(a.dtype == jnp.float64 for a in ctx.avals_in) else None

    def batch(operands, dims, **params):
        size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)

        def to_front(x, d):
            if d is None:  # not batched
                return jnp.broadcast_to(x, (size, *x.shape))
            return jnp.moveaxis(x, d, 0)

        out = primitive.bind(*map(to_front, operands, dims), **params)
        return out, [0] * len(out)

    def jvp(primals, tangents, **params):
        raise NotImplementedError(
            f"{name} has no derivative of its own: sdm_jax defines reverse-mode gradients of write_read and "
            "decode_step (jax.grad, jax.vjp), once. For forward-mode or second derivatives use "
            "implementation='reference'."
        )

    primitive.def_abstract_eval(abstract_eval)
    needs_devices(primitive)
    mlir.register_lowering(primitive, functools.partial(lower, "cpu"), platform="cpu")
    for platform in ("cuda", "rocm", "tpu"):
        mlir.register_lowering(primitive, functools.partial(lower, platform), platform=platform)
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp

    @functools.cache
    def compiled(params):
        return jax.jit(functools.partial(primitive.bind, **dict(params)))

    def run(*operands, **params):
        # A primitive has no steps to go through one by one, so it is compiled under disable_jit too.
        with jax.disable_jit(False):
            return compiled(tuple(sorted(params.items())))(*operands)

    primitive.def_impl(run)

    def bind(*operands, implementation=None, note=None, **params):
        return primitive.bind(*operands, implementation=implementation, note=note, **params)

    bind.__name__ = bind.__qualname__ = name
    return bind
