"""Fixtures of all tests."""

import contextlib
import os

import hypothesis
import jax
import pytest

# For the tests of sharding; all others use the first. Before `cases` asks for devices.
jax.config.update("jax_num_cpu_devices", 4)

from cases import IMPLEMENTATIONS, cpu_device  # noqa: E402

hypothesis.settings.register_profile(
    "default",
    deadline=None,  # the first example of a shape compiles
    derandomize="CI" in os.environ,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("default")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    """Every implementation that can run here, on a device that it serves."""
    with cpu_device() if request.param == "cpu" else contextlib.nullcontext():
        yield request.param
