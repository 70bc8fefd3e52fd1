"""The bank is advanced in place where that is safe and nowhere else, by compiled programs and pointers."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import NATIVE, cpu_device

import sdm_jax

P, S, D, T, W, R = 2, 4096, 64, 128, 4, 3
BANK = (P, S, D)
BANK_BYTES = 4 * P * S * D


def make_tokens(tokens=T, lead=(P,)):
    rng = np.random.default_rng(0)
    return {
        "k_idx": rng.integers(S, size=(*lead, tokens, W)).astype(np.int32),
        "k_val": 0.5 * rng.random((*lead, tokens, W), np.float32),
        "v": rng.random((*lead, tokens, D), np.float32),
        "beta": rng.random((*lead, tokens, 1), np.float32),
        "g": -rng.random((*lead, tokens, 1), np.float32),
        "q_idx": rng.integers(S, size=(*lead, tokens, R)).astype(np.int32),
        "q_val": rng.random((*lead, tokens, R), np.float32),
    }


def make_bank():
    return np.random.default_rng(1).standard_normal(BANK).astype(np.float32)


def write_read(implementation):
    return functools.partial(sdm_jax.write_read, implementation=implementation, chunk_size=16)


def bank_copies(program, shape=BANK, dtype="f32"):
    """Instructions of an optimized HLO text that copy a whole bank, whatever they are wrapped in."""
    bank = rf"{dtype}\[{','.join(map(str, shape))}\]"
    copies = []
    types = dict(re.findall(r"^\s*(?:ROOT )?(%[\w.-]+) = (\S+)", program, re.MULTILINE))
    fused = False
    for line in program.splitlines():
        if line.endswith("{"):
            fused = "fused" in line or "wrapped" in line
        found = re.match(rf"\s*(?:ROOT )?%[\w.-]+ = \(?{bank}\S* (copy|copy-start|fusion|call)\((.*?)\)(.*)", line)
        if found and not fused:
            opcode, operands, rest = found.groups()
            from_bank = any(re.match(bank, types.get(x, "")) for x in re.findall(r"%[\w.-]+", operands))
            if opcode.startswith("copy") or (from_bank and re.search(r"(calls|to_apply)=%\S*copy", rest)):
                copies.append(line.strip())
    return copies


def compile_donated(fn, *args, donate=True):
    return jax.jit(fn, donate_argnums=0 if donate else ()).lower(*args).compile()


def test_the_count_of_copies_counts():
    def keeps(bank):
        return bank.at[0, 0].set(0.0), bank.sum()

    bank = jax.ShapeDtypeStruct(BANK, jnp.float32)
    assert len(bank_copies(compile_donated(keeps, bank, donate=False).as_text())) == 1


def test_donated_call(implementation):
    bank = jnp.asarray(make_bank())
    tokens = make_tokens()
    run = compile_donated(lambda bank, tokens: write_read(implementation)(bank, **tokens), bank, tokens)
    assert bank_copies(run.as_text()) == []
    memory = run.memory_analysis()
    assert memory.alias_size_in_bytes == BANK_BYTES
    assert memory.temp_size_in_bytes < BANK_BYTES
    pointer = bank.unsafe_buffer_pointer()
    _, new_bank = run(bank, tokens)
    assert new_bank.unsafe_buffer_pointer() == pointer
    assert bank.is_deleted()


def test_call_that_is_not_donated(implementation):
    bank = jnp.asarray(make_bank())
    tokens = make_tokens()
    run = compile_donated(lambda bank, tokens: write_read(implementation)(bank, **tokens), bank, tokens, donate=False)
    assert len(bank_copies(run.as_text())) == 1
    _, new_bank = run(bank, tokens)
    assert new_bank.unsafe_buffer_pointer() != bank.unsafe_buffer_pointer()
    assert np.array_equal(bank, make_bank())


def test_gradient_of_a_bank_broadcast_from_a_parameter(implementation):
    def loss(parameter, tokens):
        y, _ = write_read(implementation)(jnp.broadcast_to(parameter, BANK), **tokens)
        return jnp.sum(y**2)

    run = jax.jit(jax.value_and_grad(loss)).lower(jnp.zeros((S, D)), make_tokens()).compile()
    assert bank_copies(run.as_text()) == []
    # The bank, its gradient and what is saved for the backward, but no third bank.
    saved = sdm_jax.plan(jax.ShapeDtypeStruct(BANK, jnp.float32), **make_tokens(), chunk_size=16).saved_bytes
    assert run.memory_analysis().temp_size_in_bytes < 2 * BANK_BYTES + 2 * saved < 3 * BANK_BYTES + saved


def test_segments_chained_by_a_scan(implementation):
    # The bank is the donated carry of a scan over segments of a long stream.
    def run(bank, segments):
        def segment(bank, tokens):
            y, bank = write_read(implementation)(bank, **tokens)
            return bank, y

        bank, y = jax.lax.scan(segment, bank, segments)
        return y, bank

    tokens = make_tokens()
    segments = {name: np.moveaxis(x.reshape(P, 4, T // 4, -1), 1, 0) for name, x in tokens.items()}
    bank = jnp.asarray(make_bank())
    compiled = compile_donated(run, bank, segments)
    assert bank_copies(compiled.as_text()) == []
    assert compiled.memory_analysis().temp_size_in_bytes < BANK_BYTES
    pointer = bank.unsafe_buffer_pointer()
    y, new_bank = compiled(bank, segments)
    assert new_bank.unsafe_buffer_pointer() == pointer
    want_y, want = write_read(implementation)(make_bank(), **tokens)
    np.testing.assert_allclose(np.moveaxis(y, 0, 1).reshape(P, T, D), want_y, rtol=0, atol=1e-5)
    np.testing.assert_allclose(new_bank, want, rtol=0, atol=1e-5)


def test_decode_steps_in_place(implementation):
    bank = jnp.asarray(make_bank())
    token = {name: x[:, 0] for name, x in make_tokens(1).items()}
    step = functools.partial(sdm_jax.decode_step, implementation=implementation)
    run = compile_donated(lambda bank, token: step(bank, **token), bank, token)
    assert bank_copies(run.as_text()) == []
    pointer = bank.unsafe_buffer_pointer()
    for _ in range(3):
        _, bank = run(bank, token)
    assert bank.unsafe_buffer_pointer() == pointer


@pytest.mark.parametrize("calls", NATIVE)
def test_a_result_in_another_buffer(calls):
    # A compiler may give the new bank a buffer of its own. Then it starts as a copy of the old one, which stays.
    token = {name: x[:, 0] for name, x in make_tokens(1).items()}
    results = [jax.ShapeDtypeStruct(BANK, jnp.float32), jax.ShapeDtypeStruct((P, D), jnp.float32)]
    with cpu_device() if calls == "cpu" else contextlib.nullcontext():
        bank = jnp.asarray(make_bank())
        new_bank, y = jax.jit(jax.ffi.ffi_call("sdm_decode", results))(bank, *token.values())
        want_y, want = sdm_jax.decode_step(make_bank(), **token, implementation=calls)
    assert np.array_equal(bank, make_bank())
    assert np.array_equal(new_bank, want)
    assert np.array_equal(y, want_y)


def test_decode_steps_of_a_scan(implementation):
    # The tokens of a step are slices of longer arrays, as contiguous as can be.
    tokens = {name: np.ascontiguousarray(np.moveaxis(x, 1, 0)) for name, x in make_tokens(8).items()}
    step = functools.partial(sdm_jax.decode_step, implementation=implementation)

    def run(bank, tokens):
        def body(bank, token):
            y, bank = step(bank, **token)
            return bank, y

        return jax.lax.scan(body, bank, tokens)

    bank = jnp.asarray(make_bank())
    compiled = compile_donated(run, bank, tokens)
    assert bank_copies(compiled.as_text()) == []
    assert compiled.memory_analysis().temp_size_in_bytes < BANK_BYTES
    got, got_y = compiled(bank, tokens)
    want, want_y = make_bank(), []
    for t in range(8):
        y, want = step(want, **{name: x[t] for name, x in tokens.items()})
        want_y.append(y)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    np.testing.assert_allclose(got_y, np.stack(want_y), rtol=0, atol=1e-5)


def test_shared_bank_in_place(implementation):
    shape = (1, S, D)
    bank = jnp.zeros(shape)
    tokens = make_tokens(lead=(1, 2))
    for name in ("k_idx", "q_idx"):
        tokens[name] = tokens[name] // 2 * 2 + np.arange(2, dtype=np.int32)[None, :, None, None]
    op = functools.partial(write_read(implementation), shared_bank=True)
    run = compile_donated(lambda bank, tokens: op(bank, **tokens), bank, tokens)
    assert bank_copies(run.as_text(), shape) == []
    assert run.memory_analysis().alias_size_in_bytes == BANK_BYTES // P


def test_batched_bank_in_place(implementation):
    bank, tokens = jnp.asarray(make_bank()), make_tokens()
    op = jax.vmap(lambda bank, tokens: write_read(implementation)(bank, **tokens))
    run = compile_donated(op, bank, tokens)
    assert bank_copies(run.as_text()) == []
    assert run.memory_analysis().alias_size_in_bytes == BANK_BYTES


@pytest.mark.parametrize("slots", [S, 32], ids=["many_slots", "few_slots"])
def test_working_memory_does_not_grow(implementation, slots):
    def temp_bytes(tokens):
        tokens = make_tokens(tokens)
        tokens |= {name: tokens[name] % slots for name in ("k_idx", "q_idx")}
        bank = jax.ShapeDtypeStruct((P, slots, D), jnp.float32)
        op = functools.partial(sdm_jax.write_read, implementation=implementation)
        run = compile_donated(lambda bank, tokens: op(bank, **tokens), bank, tokens)
        return run.memory_analysis().temp_size_in_bytes

    # Longer than a slab: 1024 tokens on a CPU, 32768 of these streams on a GPU. Plain JAX works in slabs of 1024
    # tokens too and needs a loop for more than one.
    few, many = {"cpu": (1024, 16384), "xla": (2048, 16384), "cuda": (65536, 262144)}[implementation]
    assert temp_bytes(many) <= temp_bytes(few)


# ---- the caller's array


def test_arrays_of_the_caller_stay(implementation):
    tokens = make_tokens()
    op = write_read(implementation)
    jitted = jax.jit(op)
    gradient = jax.jit(jax.grad(lambda bank, **tokens: op(bank, **tokens)[0].sum()))
    array = jnp.asarray(make_bank())
    view = np.asarray(array)
    ours = make_bank()
    borrowed = jnp.from_dlpack(jnp.asarray(make_bank()) if implementation == "cuda" else ours)
    for bank in (array, ours, borrowed):
        for call in (op, jitted, gradient):
            jax.block_until_ready(call(bank, **tokens))
            for kept in (array, view, ours, borrowed):
                assert np.array_equal(kept, make_bank())


def test_donated_arrays_that_others_hold(implementation):
    tokens = make_tokens()
    donating = jax.jit(write_read(implementation), donate_argnums=0)
    array = jnp.asarray(make_bank())
    view = np.asarray(array)
    ours = make_bank()
    # An array of the CPU's is no operand of the GPU's kernels.
    borrowed = [] if implementation == "cuda" else [jnp.from_dlpack(ours)]
    for bank in (array, ours, *borrowed):
        jax.block_until_ready(donating(bank, **tokens))
        assert np.array_equal(view, make_bank())
        assert np.array_equal(ours, make_bank())


def test_a_bank_used_twice(implementation):
    # Two futures of one bank, and the bank itself, in one program.
    tokens = make_tokens()
    other = tokens | {"v": -tokens["v"]}
    op = write_read(implementation)

    @functools.partial(jax.jit, donate_argnums=0)
    def fork(bank, tokens, other):
        return op(bank, **tokens), op(bank, **other), bank

    a, b, bank = fork(jnp.asarray(make_bank()), tokens, other)
    assert np.array_equal(bank, make_bank())
    for got, arguments in ((a, tokens), (b, other)):
        want = op(make_bank(), **arguments)
        np.testing.assert_allclose(got[0], want[0], rtol=0, atol=1e-5)
        np.testing.assert_allclose(got[1], want[1], rtol=0, atol=1e-5)


def test_a_vjp_called_twice(implementation):
    tokens = make_tokens()
    y, vjp = jax.vjp(lambda bank: write_read(implementation)(bank, **tokens)[0], jnp.asarray(make_bank()))
    (first,), (second,) = vjp(jnp.ones_like(y)), vjp(jnp.ones_like(y))
    assert np.array_equal(first, second)
