"""Drawn ids, gates and sizes: every implementation against the token loop in float64."""

import numpy as np
from cases import Case, make_inputs, oracle, results
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tolerance import relative_error, tol

# Few sizes, so that examples share compilations. Plain JAX takes its token form for the first, its chunked
# form for the second; one gate a token, and one a write.
SIZES = [
    Case("drawn", lead=(), tokens=20, slots=64, width=3, writes=3, reads=2),
    Case("drawn", lead=(2,), tokens=20, slots=7, width=5, writes=3, reads=2, gate_per_write=True),
]
# More sizes where compiling costs nothing.
MORE_SIZES = [
    *SIZES,
    Case("drawn", lead=(2,), bank_lead=(), tokens=9, slots=12, width=1, writes=2, reads=3),
    Case("drawn", lead=(1, 3), tokens=16, slots=3, width=16, writes=1, reads=1, gate_per_write=True),
    Case("drawn", lead=(), tokens=70, slots=50, width=9, writes=4, reads=5, chunk=32),
]
GATES = (0.0, -1e4, -np.inf, 0.1, -0.05, -1.0, -5.0, -20.0)
DROPPED = (-1, -7, 2**31 - 1, -(2**31))


@st.composite
def drawn_inputs(draw, sizes):
    """A case, its inputs with drawn ids and gates, and cotangents; what nothing may look at is NaN."""
    case = draw(st.sampled_from(sizes))
    inputs, cotangents = make_inputs(case._replace(ids="repeats", gates="mild"), draw(st.integers(0, 9)))
    lead, sharing = case.lead, (int(np.prod(case.lead)) if case.shared else 1)
    span = case.slots // sharing  # of a stream's own slots in a shared bank
    offset = (np.arange(int(np.prod(lead))) % sharing * span).reshape(*lead, 1, 1)
    used = draw(st.integers(1, span))
    for ids, weights in (("k_idx", "k_val"), ("q_idx", "q_val")):
        shape = inputs[ids].shape
        slots = draw(npst.arrays(np.int32, shape, elements=st.integers(0, used - 1))) + offset
        dropped = draw(npst.arrays(bool, shape, elements=st.booleans(), fill=st.just(False)))
        inputs[ids] = np.where(dropped, draw(st.sampled_from((*DROPPED, case.slots))), slots).astype(np.int32)
        inputs[weights][dropped] = np.nan
    gates = npst.arrays(np.float32, inputs["g"].shape, elements=st.sampled_from([np.float32(g) for g in GATES]))
    inputs["g"] = draw(gates)
    silent = np.isnan(inputs["k_val"]).all(axis=-1)
    for name in ("v", "beta", "g"):
        inputs[name][silent] = np.nan
    if case.gate_per_write:
        inputs["g"][np.isnan(inputs["k_val"])] = np.nan
    return case, inputs, cotangents


def largest_growth(case, inputs):
    """How many times the gates of one chunk let a slot grow, at most.

    The chunked form holds such products as numbers, so its rounding errors grow with them.
    """
    gates = np.broadcast_to(inputs["g"], inputs["k_idx"].shape).reshape(-1, case.tokens, case.writes)
    k_idx = inputs["k_idx"].reshape(gates.shape)
    largest = 0.0
    for ids, x in zip(k_idx, gates, strict=True):
        for start in range(0, case.tokens, case.chunk):
            chunk = slice(start, start + case.chunk)
            for slot in range(case.slots):
                named = ids[chunk] == slot
                first = named & (np.cumsum(named, axis=-1) == 1)
                total = 0.0
                for gate in x[chunk][first]:  # the most that a run of them sums up to
                    total = max(0.0, total + float(gate))
                    largest = max(largest, total)
    return np.exp(largest)


def check(implementation, drawn):
    case, inputs, cotangents = drawn
    got = results(inputs, cotangents, implementation=implementation, **case.settings)
    want = oracle(inputs, cotangents, shared_bank=case.shared)
    bound = tol("float32") * largest_growth(case, inputs)
    errors = {name: relative_error(got[name], want[name]) for name in want}
    if not all(error <= bound for error in errors.values()):
        # Sums that cancel lose digits in float32 whatever computes them: so does the token loop.
        loop = oracle(inputs, cotangents, shared_bank=case.shared, dtype="float32")
        lost = {name: max(bound, 20 * relative_error(loop[name], want[name])) for name in want}
        # A gate's gradient is a sum of such products, and may be far smaller than they are.
        products = [np.nanmax(np.abs(inputs[x] * want[f"d_{x}"]), initial=0.0) for x in ("k_val", "q_val")]
        lost["d_g"] = max(lost["d_g"], bound * max(products) / np.abs(want["d_g"]).max(initial=1e-30))
        assert all(errors[name] <= lost[name] for name in want), f"errors {errors}, allowed {lost}"


@settings(max_examples=60)
@given(drawn=drawn_inputs(SIZES))
def test_drawn_inputs(implementation, drawn):
    check(implementation, drawn)


@settings(max_examples=100)
@given(drawn=drawn_inputs(MORE_SIZES))
def test_more_sizes_on_the_cpu(drawn):
    check("cpu", drawn)
