"""Closed forms first, then what an interval is for: how often it covers the truth."""

import math

import pytest
import torch
from torch import Tensor

from stages.core.intervals import (
    Interval,
    from_left_out,
    of_mean,
    of_pair_means,
    of_ratio,
    pair_means,
    significant,
    t_quantile,
)
from stages.core.metrics import caption_cosines, contrast_pairs, mmd_pairs
from stages.core.sampler import stream


@pytest.mark.parametrize(
    ("confidence", "freedom", "expected"),
    [
        (0.95, 1, 12.7062),
        (0.95, 2, 4.30265),
        (0.95, 3, 3.18245),
        (0.95, 31, 2.03951),
        (0.99, 10, 3.16927),
        (0.5, 33, 0.681997),
    ],
)
def test_t_quantile_matches_the_tables(confidence: float, freedom: int, expected: float) -> None:
    assert t_quantile(confidence, freedom) == pytest.approx(expected, rel=1e-5)


def test_t_quantile_of_one_degree_is_the_cauchy_tangent() -> None:
    assert t_quantile(0.9, 1) == pytest.approx(math.tan(math.pi * 0.45), rel=1e-12)


@pytest.mark.parametrize(("confidence", "freedom"), [(0.0, 5), (1.0, 5), (0.95, 0)])
def test_t_quantile_refuses_what_has_none(confidence: float, freedom: int) -> None:
    with pytest.raises(ValueError, match="have no quantile"):
        t_quantile(confidence, freedom)


def test_jackknife_of_a_mean_is_students_interval() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 9.0])
    # mean 4, sample variance 38/3, standard error sqrt(38/12)
    reach = t_quantile(0.95, 3) * math.sqrt(38 / 12)
    found = of_mean(values, 0.95)
    assert found.value == 4.0
    assert (found.low, found.high) == (pytest.approx(4 - reach), pytest.approx(4 + reach))


def test_ratio_of_proportional_losses_is_exact() -> None:
    below = torch.tensor([1.0, 2.0, 5.0])
    assert of_ratio(0.75 * below, below, 0.95) == Interval(value=0.75, low=0.75, high=0.75)


def test_ratio_by_hand() -> None:
    above, below = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0])
    # left out: 2/2 and 1/2; variance 1/2 * (0.25^2 + 0.25^2) = 1/16
    found = of_ratio(above, below, 0.95)
    assert found.value == 0.75
    assert found.high - found.value == pytest.approx(t_quantile(0.95, 1) / 4)


def test_pairs_by_hand() -> None:
    pairs = torch.tensor([[99.0, 1.0, 2.0], [1.0, 99.0, 6.0], [2.0, 6.0, 99.0]])
    means = pair_means(pairs)
    assert means.tolist() == [1.5, 3.5, 4.0]  # the diagonal is not looked at
    found = of_pair_means(means, 0.95)
    assert found.value == 3.0
    # with one item left out one pair remains: 6, 2, 1; mean 3, squares 9 + 1 + 4, times 2/3
    assert found.high - found.value == pytest.approx(t_quantile(0.95, 2) * math.sqrt(14 * 2 / 3))


def test_pairs_of_sums_are_twice_the_mean() -> None:
    """For h(i, j) = x_i + x_j the jackknife is that of a mean, exactly."""
    x = torch.tensor([1.0, 2.0, 4.0, 9.0, 3.0], dtype=torch.float64)
    pairs, mean = of_pair_means(pair_means(x[:, None] + x[None, :]), 0.9), of_mean(2 * x, 0.9)
    assert pairs.value == pytest.approx(mean.value)
    assert (pairs.low, pairs.high) == (pytest.approx(mean.low), pytest.approx(mean.high))


def test_too_few_items_are_refused() -> None:
    with pytest.raises(ValueError, match="over 1 items; it needs at least 2"):
        of_mean(torch.tensor([1.0]), 0.95)
    with pytest.raises(ValueError, match="over 2 items; it needs at least 3"):
        pair_means(torch.zeros(2, 2))


def test_equal_values_give_a_point() -> None:
    assert from_left_out(2.0, torch.full((4,), 2.0), 0.95) == Interval(value=2.0, low=2.0, high=2.0)


def test_rounding() -> None:
    assert Interval(value=1.23456789, low=-0.0, high=123456789.0).to_json() == {
        "value": 1.23457,
        "low": 0.0,
        "high": 123457000.0,
    }
    assert significant(0.00012345678, 3) == 0.000123
    assert math.copysign(1, significant(-0.0)) == 1.0


# Coverage. An item is x (real), a caption that both its real and its drawn pictures follow, and four drawn pictures per
# model: everything that is correlated in a real evaluation. Gaussian vectors, for which the true MMD has a closed form.

DIMENSIONS, PICTURES = 8, 4


def true_mmd(shift: float, scale: float, sigma: float) -> float:
    """Squared MMD between N(0, I) and N(shift, scale^2 I) in 8 dimensions under the Gaussian kernel."""

    def expected(variance: float, distance: float) -> float:
        inner = math.exp(-(distance**2) / (2 * (sigma**2 + variance)))
        return (inner / math.sqrt(1 + variance / sigma**2)) ** DIMENSIONS

    return expected(2.0, 0.0) + expected(2 * scale**2, 0.0) - 2 * expected(1 + scale**2, shift)


def covered(
    items: int, sigma: float, base: tuple[float, float], tuned: tuple[float, float], sims: int
) -> list[int]:
    """In how many of `sims` simulations the 95% intervals hold the truth: base, fine-tuned, and their difference."""
    truths = [true_mmd(*base, sigma), true_mmd(*tuned, sigma)]
    truths.append(truths[0] - truths[1])
    owners = [item for item in range(items) for _ in range(PICTURES)]
    counts = [0, 0, 0]
    for simulation in range(sims):
        rows = stream(7, "coverage", simulation, items).standard_normal((items, 2 + 2 * PICTURES, DIMENSIONS))
        z = torch.from_numpy(rows) * math.sqrt(0.5)
        caption, own = z[:, :1], z[:, 1:]
        real = (caption + own[:, :1])[:, 0]
        means: list[Tensor] = []
        for (shift, scale), noise in ((base, own[:, 1 : 1 + PICTURES]), (tuned, own[:, 1 + PICTURES :])):
            drawn = shift + scale * (caption + noise).reshape(-1, DIMENSIONS)
            means.append(pair_means(mmd_pairs(real, drawn, owners, sigma)))
        for place, values in enumerate([*means, means[0] - means[1]]):
            found = of_pair_means(values, 0.95)
            counts[place] += found.low <= truths[place] <= found.high
    return counts


# (items, sigma, base, fine-tuned): shift and scale of what each model draws against the real N(0, I).
SCENARIOS = {
    "far and near": (32, 4.0, (1.0, 1.0), (0.5, 1.0)),
    "less spread": (32, 4.0, (0.5, 0.5), (0.25, 0.75)),
    "nearly right": (32, 4.0, (0.3, 1.0), (0.15, 1.0)),
    "both right": (32, 4.0, (0.0, 1.0), (0.0, 1.0)),
    "narrow kernel": (32, 2.0, (0.5, 0.7), (0.25, 0.85)),
    "CMMD's kernel": (32, 10.0, (0.5, 0.7), (0.25, 0.85)),
    "more items": (64, 4.0, (0.3, 0.8), (0.15, 0.9)),
}
SIMULATIONS = 1000


def test_mmd_intervals_cover() -> None:
    """300 simulations at a nominal 95% (binomial noise 1.3%); the slow test has all scenarios and more of them."""
    counts = covered(*SCENARIOS["less spread"], sims=300)
    assert all(count >= 276 for count in counts), counts


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_mmd_intervals_cover_in_every_scenario(name: str) -> None:
    """1,000 simulations each at a nominal 95%: at least 930 cover (docs/evaluation.md has the counts)."""
    counts = covered(*SCENARIOS[name], sims=SIMULATIONS)
    print(name, counts)
    assert all(count >= 930 for count in counts), counts


def test_mmd_is_unbiased() -> None:
    """The mean over 300 small samples is the truth, though captions tie pictures together."""
    truth = true_mmd(0.5, 0.8, 4.0)
    owners = [item for item in range(6) for _ in range(PICTURES)]
    values: list[float] = []
    for simulation in range(300):
        z = torch.from_numpy(stream(3, "bias", simulation).standard_normal((6, 2 + PICTURES, DIMENSIONS)))
        caption, own = z[:, :1] * math.sqrt(0.5), z[:, 1:] * math.sqrt(0.5)
        drawn = 0.5 + 0.8 * (caption + own[:, 1:]).reshape(-1, DIMENSIONS)
        values.append(float(pair_means(mmd_pairs((caption + own[:, :1])[:, 0], drawn, owners, 4.0)).mean()))
    found = of_mean(torch.tensor(values, dtype=torch.float64), 0.99)
    assert found.low < truth < found.high
    assert found.high - found.low < 0.3 * truth  # so the test can tell a bias


def test_contrast_intervals_cover() -> None:
    """A model whose pictures hold a tenth of their caption: true contrast 0.1, since captions are independent."""
    count = 0
    for simulation in range(300):
        rows = torch.from_numpy(stream(5, "contrast", simulation).standard_normal((32, 1 + PICTURES, 16)))
        captions = rows[:, 0] / 4.0  # of squared length 1 on average
        drawn = (0.1 * captions[:, None] + rows[:, 1:] / 4.0).reshape(-1, 16)
        owners = [item for item in range(32) for _ in range(PICTURES)]
        found = of_pair_means(pair_means(contrast_pairs(caption_cosines(drawn, captions, owners))), 0.95)
        count += found.low <= 0.1 <= found.high
    assert count >= 276, count  # 92%
