"""Confidence intervals that cover, from a jackknife over items.

The unit that is left out is a held-out item with everything that belongs to it (its picture, its caption, all
pictures drawn for it), so that pairing and clusters are accounted for. Not a bootstrap: the duplicates in a
resample bias an unbiased MMD (measured: its percentile interval covered in 18 of 100 simulations at a nominal 95%).

Letters: N items. All in float64.
"""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with the two ends of its confidence interval."""

    value: float
    low: float
    high: float

    def to_json(self, digits: int = 6) -> dict[str, float]:
        """Plain numbers with `digits` significant digits."""
        return {name: significant(getattr(self, name), digits) for name in ("value", "low", "high")}


def significant(value: float, digits: int = 6) -> float:
    """`value` rounded to significant digits: the last bits of a sum do not reach a report; never -0.0."""
    return float(f"{value:.{digits}g}") + 0.0


def t_quantile(confidence: float, freedom: int) -> float:
    """The t for which |T| <= t has probability `confidence`, T being Student's t with `freedom` >= 1 degrees.

    The probability is a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4), inverted by bisection.
    """
    if not 0 < confidence < 1 or freedom < 1:
        raise ValueError(f"confidence {confidence} and {freedom} degrees of freedom have no quantile")
    low, high = 0.0, 1.0
    while _t_probability(high, freedom) < confidence:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_probability(middle, freedom) < confidence else (low, middle)
    return (low + high) / 2


def _t_probability(t: float, freedom: int) -> float:
    angle = math.atan(t / math.sqrt(freedom))
    cosine, total = math.cos(angle), 0.0
    # even: 1 + (1/2)cos^2 + (1*3)/(2*4)cos^4 + ...; odd: cos + (2/3)cos^3 + (2*4)/(3*5)cos^5 + ...
    term, first = (1.0, 1) if freedom % 2 == 0 else (cosine, 2)
    for k in range(first, freedom, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    if freedom % 2 == 0:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + math.sin(angle) * total)


def from_left_out(value: float, left_out_N: Tensor, confidence: float) -> Interval:
    """value +- t * standard error, the jackknife's from the values with item i left out, float64 [N].

    Variance (N-1)/N sum (v_i - mean v)^2 (Tukey 1958; for U-statistics Arvesen 1969); t has N - 1 degrees.
    """
    n = len(left_out_N)
    variance = (n - 1) / n * (left_out_N - left_out_N.mean()).square().sum()
    reach = t_quantile(confidence, n - 1) * math.sqrt(float(variance))
    return Interval(value=value, low=value - reach, high=value + reach)


def of_mean(values_N: Tensor, confidence: float) -> Interval:
    """The mean over items; the jackknife is then exactly Student's interval. Needs 2 items."""
    values_N = _at_least(values_N, 2)
    left_out_N = (values_N.sum() - values_N) / (len(values_N) - 1)
    return from_left_out(float(values_N.mean()), left_out_N, confidence)


def of_ratio(above_N: Tensor, below_N: Tensor, confidence: float) -> Interval:
    """The ratio of two means over the same items, for example how much of a loss is left. Needs 2 items."""
    above_N, below_N = _at_least(above_N, 2), _at_least(below_N, 2)
    left_out_N = (above_N.sum() - above_N) / (below_N.sum() - below_N)
    return from_left_out(float(above_N.sum() / below_N.sum()), left_out_N, confidence)


def pair_means(pairs_NN: Tensor) -> Tensor:
    """Of a symmetric h(i, j): for each item its mean over all other items, float64 [N]; the diagonal is not looked at."""
    pairs_NN = _at_least(pairs_NN, 3)
    return (pairs_NN.sum(dim=1) - pairs_NN.diagonal()) / (len(pairs_NN) - 1)


def of_pair_means(means_N: Tensor, confidence: float) -> Interval:
    """The mean of h over all pairs of different items, from `pair_means`. Needs 3 items.

    A U-statistic of order 2 (Hoeffding 1948). The items' means are enough, so differences of two models on the same items
    are intervals of differences of their means. Where h is degenerate (two equal distributions) the jackknife
    overstates the variance: the interval is then too wide, not too narrow.
    """
    means_N = _at_least(means_N, 3)
    left_out_N = (means_N.sum() - 2 * means_N) / (len(means_N) - 2)
    return from_left_out(float(means_N.mean()), left_out_N, confidence)


def _at_least(values: Tensor, items: int) -> Tensor:
    if len(values) < items:
        raise ValueError(f"an interval over {len(values)} items; it needs at least {items}")
    return values.double()
