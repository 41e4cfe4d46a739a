"""The batch equation: what is left out is derived, contradictions show the arithmetic."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config.batch import DEFAULT_MICRO_BATCH_SIZE, Batch, nearest_divisors, solve_batch
from meshwright.errors import UserError

pytestmark = pytest.mark.quick

quick = settings(max_examples=100, deadline=None, derandomize=True)
sizes = st.integers(1, 64)


def numbers(batch: Batch) -> tuple[int, int, int, int]:
    return (
        batch.global_batch_size,
        batch.micro_batch_size,
        batch.replicas,
        batch.gradient_accumulation_steps,
    )


@quick
@given(micro=sizes, replicas=sizes, steps=sizes, left_out=st.integers(0, 3))
def test_any_one_size_may_be_left_out(micro, replicas, steps, left_out):
    given_sizes = {
        "global_batch_size": micro * replicas * steps,
        "micro_batch_size": micro,
        "gradient_accumulation_steps": steps,
    }
    for name in list(given_sizes)[left_out : left_out + 1]:
        del given_sizes[name]
    batch = solve_batch(replicas=replicas, **given_sizes)
    assert numbers(batch) == (micro * replicas * steps, micro, replicas, steps)


@quick
@given(
    replicas=sizes,
    total=st.none() | st.integers(-2, 300),
    micro=st.none() | st.integers(-2, 20),
    steps=st.none() | st.integers(-2, 20),
    sync=st.integers(1, 20),
)
def test_what_is_accepted_satisfies_the_equation_and_keeps_what_was_given(
    replicas, total, micro, steps, sync
):
    try:
        batch = solve_batch(
            replicas=replicas,
            global_batch_size=total,
            micro_batch_size=micro,
            gradient_accumulation_steps=steps,
            sync_gradients_every=sync,
        )
    except UserError:
        return
    solved = numbers(batch)
    assert solved[0] == solved[1] * solved[2] * solved[3]
    assert solved[3] % batch.sync_gradients_every == 0
    for asked, found in zip((total, micro, replicas, steps), solved, strict=True):
        assert asked in (None, found)


def test_nothing_given_takes_the_default_microbatch_once():
    assert numbers(solve_batch(replicas=4)) == (
        4 * DEFAULT_MICRO_BATCH_SIZE,
        DEFAULT_MICRO_BATCH_SIZE,
        4,
        1,
    )


def test_global_batch_alone_is_not_accumulated():
    assert numbers(solve_batch(replicas=4, global_batch_size=32)) == (32, 8, 4, 1)


@pytest.mark.parametrize(
    ("given_sizes", "arithmetic", "nearest"),
    [
        ({"global_batch_size": 30}, "= 4, and 30 is not a multiple of 4", "28 or 32"),
        ({"global_batch_size": 3}, "= 4, and 3 is not a multiple of 4", "4"),
        (
            {"global_batch_size": 32, "micro_batch_size": 3},
            "micro_batch_size 3 × 4 replicas (data × fsdp) = 12, and 32 is not a multiple of 12",
            "24 or 36",
        ),
        (
            {"global_batch_size": 32, "gradient_accumulation_steps": 3},
            "4 replicas (data × fsdp) × accumulation 3 = 12, and 32 is not a multiple of 12",
            "24 or 36",
        ),
        (
            {"global_batch_size": 32, "micro_batch_size": 4, "gradient_accumulation_steps": 3},
            "micro_batch_size 4 × 4 replicas (data × fsdp) × gradient_accumulation_steps 3 = 48, "
            "but global_batch_size is 32",
            "48",
        ),
    ],
)
def test_contradictions_show_the_arithmetic_and_the_nearest_sizes(given_sizes, arithmetic, nearest):
    with pytest.raises(UserError) as caught:
        solve_batch(replicas=4, **given_sizes)
    assert arithmetic in caught.value.why
    assert f"a global batch of {nearest} samples would work" in caught.value.fix
    assert "(batch_size)" in caught.value.fix


def test_synchronisation_must_divide_the_accumulation():
    batch = solve_batch(replicas=2, gradient_accumulation_steps=4, sync_gradients_every=2)
    assert batch.sync_gradients_every == 2
    with pytest.raises(UserError) as caught:
        solve_batch(replicas=2, gradient_accumulation_steps=4, sync_gradients_every=3)
    assert "gradient_accumulation_steps is 4" in caught.value.why
    assert caught.value.fix == "write sync_gradients_every=2 or 4"


def test_a_large_accumulation_is_refused_as_quickly_as_a_small_one():
    with pytest.raises(UserError, match="does not divide"):
        solve_batch(replicas=1, gradient_accumulation_steps=2**31 - 1, sync_gradients_every=7)


@quick
@given(number=st.integers(1, 500), to=st.integers(1, 600))
def test_nearest_divisors_are_nearest_by_brute_force(number, to):
    nearest = nearest_divisors(number, to)
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    distances = sorted(abs(d - to) for d in divisors)
    assert set(nearest) <= set(divisors)
    assert sorted(abs(d - to) for d in nearest) == distances[:2]


@pytest.mark.parametrize(
    ("total", "micro", "said"),
    [
        (32, 3, "a micro_batch_size of 2 or 4 would work, or a global batch of 24 or 48 samples"),
        (56, 6, "a micro_batch_size of 1 or 7 would work, or a global batch of 48 or 96 samples"),
        (8, 64, "a micro_batch_size of 1 would work, or a global batch of 512 samples would"),
        (30, 4, "a global batch of 32 samples would work"),
    ],
)
def test_microbatches_that_divide_are_named(total, micro, said):
    with pytest.raises(UserError) as caught:
        solve_batch(replicas=8, global_batch_size=total, micro_batch_size=micro)
    assert caught.value.fix.startswith(said)
