"""Golden values, which must never change: every checkpoint and every result hangs on them."""

import json
import subprocess
import sys

import pytest
import torch

from stages.core.sampler import BatchOrder, integers, normal, stream, uniforms


def test_golden_values() -> None:
    assert [round(x, 6) for x in normal(1, "noise", 2, 3, shape=(4,)).tolist()] == GOLDEN["normal"]
    assert integers(1, "timestep", 2, 3, below=1000, size=5) == GOLDEN["integers"]
    assert [round(x, 12) for x in uniforms(1, "caption-dropout", 2, 3, size=3)] == GOLDEN["uniforms"]
    assert stream(1, "order", 0, 0).permutation(8).tolist() == GOLDEN["permutation"]
    order = BatchOrder([[0, 1, 2], [3, 4, 5, 6, 7]], batch_size=2, seed=1)
    assert [order.batch(step) for step in range(6)] == GOLDEN["order"]


def test_normal_is_float32_of_the_shape_and_normal() -> None:
    drawn = normal(0, "x", 1, shape=(4, 100, 100))
    assert drawn.dtype == torch.float32
    assert drawn.shape == (4, 100, 100)
    # 40,000 values: a mean of 5 standard errors (0.025) would be a fault, and so would a deviation of 0.018.
    assert abs(float(drawn.mean())) < 0.025
    assert abs(float(drawn.std()) - 1) < 0.018


def test_streams_differ_by_seed_purpose_and_each_counter() -> None:
    keys = [(1, "a", (1, 2, 3)), (2, "a", (1, 2, 3)), (1, "b", (1, 2, 3)), (1, "a", (0, 2, 3))]
    keys += [(1, "a", (1, 0, 3)), (1, "a", (1, 2, 0)), (1, "a", (3, 2, 1))]
    drawn = {tuple(normal(seed, purpose, *counters, shape=(4,)).tolist()) for seed, purpose, counters in keys}
    assert len(drawn) == len(keys)


def test_a_long_stream_does_not_run_into_the_next_position() -> None:
    long = set(normal(0, "x", 0, shape=(100_000,)).tolist()[1000:])
    assert not long & set(normal(0, "x", 1, shape=(16,)).double().tolist())


def test_nothing_depends_on_what_was_drawn_before() -> None:
    expected = normal(5, "x", 7, shape=(3,))
    normal(5, "x", 6, shape=(1000,))
    torch.manual_seed(0)
    assert torch.equal(normal(5, "x", 7, shape=(3,)), expected)


def test_another_process_draws_the_same() -> None:
    code = (
        "import json\nfrom stages.core.sampler import *\norder = BatchOrder([list(range(9))], batch_size=4, seed=3)\n"
        "print(json.dumps([normal(3, 'n', 1, shape=(8,)).tolist(), order.batch(7)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True, capture_output=True, text=True, env={"PYTHONHASHSEED": "9", "PYTHONPATH": "."},
    )  # fmt: skip
    order = BatchOrder([list(range(9))], batch_size=4, seed=3)
    assert json.loads(done.stdout) == [normal(3, "n", 1, shape=(8,)).tolist(), order.batch(7)]


def test_too_many_counters() -> None:
    with pytest.raises(ValueError, match="at most three counters, got 4"):
        stream(0, "x", 1, 2, 3, 4)


# --- the order of batches

BUCKETS = [[0, 1, 2, 3, 4], [5, 6], [], [7, 8, 9, 10, 11, 12, 13]]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 20])
def test_every_item_in_every_epoch_in_batches_of_one_bucket_and_size(batch_size: int) -> None:
    order = BatchOrder(BUCKETS, batch_size=batch_size, seed=0)
    whole = sum(-(-len(bucket) // batch_size) for bucket in BUCKETS)
    assert order.batches_per_epoch == whole
    for epoch in range(3):
        batches = [order.batch(epoch * whole + place) for place in range(whole)]
        assert {item for batch in batches for item in batch} == set(range(14))
        for batch in batches:
            assert len(batch) == batch_size
            assert any(set(batch) <= set(bucket) for bucket in BUCKETS)


def test_a_short_batch_is_filled_from_the_beginning_of_the_permutation() -> None:
    batches = [BatchOrder([[0, 1, 2, 3, 4]], batch_size=3, seed=4).batch(place) for place in range(2)]
    # One of the two is the first three of the permutation, the other the last two and the first again.
    first, second = batches if len({*batches[0], *batches[1][:2]}) == 5 else batches[::-1]
    assert sorted([*first, *second[:2]]) == [0, 1, 2, 3, 4]
    assert second[2] == first[0]


def test_a_bucket_smaller_than_the_batch_goes_round() -> None:
    batch = BatchOrder([[7, 9]], batch_size=5, seed=0).batch(0)
    assert batch == [batch[0], batch[1]] * 2 + [batch[0]]
    assert set(batch) == {7, 9}


def test_a_function_of_the_step_alone() -> None:
    straight = BatchOrder(BUCKETS, batch_size=2, seed=1)
    expected = [straight.batch(step) for step in range(40)]
    mixed = BatchOrder(BUCKETS, batch_size=2, seed=1)
    assert [mixed.batch(step) for step in reversed(range(40))] == expected[::-1]
    assert [mixed.batch(step) for step in (39, 0, 17, 17)] == [
        expected[39],
        expected[0],
        expected[17],
        expected[17],
    ]


def test_epochs_and_seeds_are_ordered_differently() -> None:
    order = BatchOrder([list(range(20))], batch_size=20, seed=0)
    other = BatchOrder([list(range(20))], batch_size=20, seed=1)
    assert len({tuple(order.batch(0)), tuple(order.batch(1)), tuple(other.batch(0))}) == 3


@pytest.mark.parametrize("buckets", [[], [[], []]])
def test_nothing_to_order(buckets: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="no items to order"):
        BatchOrder(buckets, batch_size=1, seed=0)


GOLDEN = {
    "normal": [-0.409302, 0.733247, 0.319519, 1.748902],
    "integers": [502, 432, 243, 362, 721],
    "uniforms": [0.267858563299, 0.667073313869, 0.382912139376],
    "permutation": [7, 0, 2, 3, 4, 5, 6, 1],
    "order": [[3, 4], [2, 0], [5, 7], [1, 2], [7, 6], [5, 7]],
}
