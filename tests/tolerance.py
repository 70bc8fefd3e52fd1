"""How close a result has to be: section 2 of the specification, in one place."""

import numpy as np

# Largest error of a result, relative to its largest value (absolute where that is 0).
_LARGEST = {
    "float64": 1e-12,
    "float32": 1e-5,
    # Against `reference`, whose gradients are not rounded on their way: a few roundings of 2^-9.
    "bfloat16": 2**-6,
}
# The same for the root mean square, where most roundings average out.
_RMS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2**-8}


def tol(dtype):
    """Largest error that a result may have for a bank of `dtype`, relative to the result's largest value."""
    return _LARGEST[np.dtype(dtype).name]


def _scale(largest):
    # Where everything is this small, products leave the range of float32: it counts as 0.
    return largest if largest >= 1e-30 else 1.0


def rms(x):
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def relative_error(got, want):
    """Largest error relative to the largest value wanted; NaN if anything is not finite on one side only."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, want {want.shape}"
    if got.size == 0:
        return 0.0
    return float(np.abs(got - want).max() / _scale(np.abs(want).max()))


def relative_rms(got, want):
    """Root mean square of the error relative to that of what is wanted."""
    return rms(np.asarray(got, np.float64) - np.asarray(want, np.float64)) / _scale(rms(want))


def assert_close(got, want, dtype, factor=1.0):
    """Compares two dicts of named results of a bank of `dtype`."""
    assert got.keys() == want.keys()
    bound, rms_bound = factor * _LARGEST[np.dtype(dtype).name], factor * _RMS[np.dtype(dtype).name]
    errors = {name: relative_error(got[name], want[name]) for name in want}
    assert all(error <= bound for error in errors.values()), f"errors {errors}, allowed {bound}"
    errors = {name: relative_rms(got[name], want[name]) for name in want if np.size(want[name])}
    assert all(error <= rms_bound for error in errors.values()), f"rms errors {errors}, allowed {rms_bound}"


def assert_same_bits(got, want):
    """Compares two dicts of named results bit for bit."""
    assert got.keys() == want.keys()
    for name in want:
        a, b = np.asarray(got[name]), np.asarray(want[name])
        assert a.dtype == b.dtype, f"{name}: {a.dtype}, want {b.dtype}"
        assert a.shape == b.shape, f"{name}: {a.shape}, want {b.shape}"
        assert a.tobytes() == b.tobytes(), f"{name}: {np.count_nonzero(a != b)} of {a.size} differ"
