"""Small sets by hand."""

import math

import pytest
import torch

from stages.core.intervals import pair_means
from stages.core.metrics import (
    Measured,
    averaging,
    caption_cosines,
    contrast_pairs,
    gaussian_kernel,
    mmd_pairs,
)


def test_kernel_by_hand() -> None:
    left, right = torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([[0.0, 0.0]])
    found = gaussian_kernel(left, right, sigma=5.0)
    assert found.dtype == torch.float64
    assert found.tolist() == [[1.0], [pytest.approx(math.exp(-0.5))]]


def test_kernel_of_nearly_equal_rows_is_not_above_one() -> None:
    rows = torch.nn.functional.normalize(torch.arange(1.0, 65.0).reshape(1, 64)).repeat(2, 1)
    rows[1, 0] += 1e-7
    assert float(gaussian_kernel(rows, rows, 1e-4).max()) <= 1.0


def test_averaging_weights() -> None:
    assert averaging([0, 1, 0], 2).tolist() == [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]]


def test_an_item_without_pictures_is_refused() -> None:
    with pytest.raises(ValueError, match="no pictures were drawn for 1 of 3 items"):
        averaging([0, 0, 2], 3)


def test_mmd_of_one_picture_each_is_grettons_formula() -> None:
    """Eq. 4 of Gretton et al. 2012, term by term, in one dimension."""
    x, y, sigma = [0.0, 1.0, 3.0], [2.0, 2.5, 7.0], 1.5

    def k(a: float, b: float) -> float:
        return math.exp(-((a - b) ** 2) / (2 * sigma**2))

    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    expected = sum(k(x[i], x[j]) + k(y[i], y[j]) - k(x[i], y[j]) - k(x[j], y[i]) for i, j in pairs) / 6
    real, drawn = torch.tensor(x)[:, None], torch.tensor(y)[:, None]
    assert float(pair_means(mmd_pairs(real, drawn, [0, 1, 2], sigma)).mean()) == pytest.approx(expected)


def test_mmd_averages_over_an_items_pictures_and_skips_its_own() -> None:
    """Item 0 has two drawn pictures; equal positions give kernel 1, far ones 0."""
    real = torch.tensor([[0.0], [100.0], [200.0]])
    drawn = torch.tensor([[0.0], [100.0], [100.0], [300.0]])
    h = mmd_pairs(real, drawn, [0, 0, 1, 2], sigma=1.0)
    # (0, 1): real 0; drawn: half of item 0's sit on item 1's: 0.5; cross: x_0 on y_1 0, x_1 on half of y_0: 0.5
    assert float(h[0, 1]) == pytest.approx(0.5 - 0.0 - 0.5)
    # (1, 2): nothing coincides
    assert float(h[1, 2]) == pytest.approx(0.0)
    assert torch.equal(h, h.T)


def test_mmd_of_equal_sets_without_repeats_is_zero() -> None:
    points = torch.tensor([[0.0], [1.0], [2.0], [4.0]])
    h = mmd_pairs(points, points.clone(), [0, 1, 2, 3], sigma=2.0)
    assert float(pair_means(h).mean()) == pytest.approx(0.0, abs=1e-15)


def test_cosines_and_contrast_by_hand() -> None:
    captions = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    drawn = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    cosines = caption_cosines(drawn, captions, [0, 0, 1, 2])
    assert cosines[0].tolist() == pytest.approx([0.5, 0.5, 0.7])
    assert cosines[1].tolist() == pytest.approx([0.0, 1.0, 0.8])
    assert cosines[2].tolist() == pytest.approx([1.0, 0.0, 0.6])
    contrast = contrast_pairs(cosines)
    assert float(contrast[0, 1]) == pytest.approx((0.5 - 0.5 + 1.0 - 0.0) / 2)
    assert float(contrast[0, 2]) == pytest.approx((0.5 - 0.7 + 0.6 - 1.0) / 2)
    # The mean over pairs is the matched mean minus the mean over all mismatched captions.
    mismatched = (cosines.sum() - cosines.diagonal().sum()) / 6
    assert float(pair_means(contrast).mean()) == pytest.approx(float(cosines.diagonal().mean() - mismatched))


def test_contrast_is_zero_when_captions_are_ignored() -> None:
    captions = torch.nn.functional.normalize(torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.5]]))
    drawn = torch.tensor([[1.0, 0.0]]).repeat(3, 1)
    found = pair_means(contrast_pairs(caption_cosines(drawn, captions, [0, 1, 2])))
    assert float(found.mean()) == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize(("better", "gain"), [(-1, 0.5), (1, -0.5)])
def test_improvement_is_positive_when_the_finetuned_model_is_better(better: int, gain: float) -> None:
    base, tuned = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 1.5, 2.5])
    measured = Measured(name="x", base_N=base, finetuned_N=tuned, pairs=False, better=better)
    found = measured.intervals(0.95)
    assert set(found) == {"base", "finetuned", "improvement"}
    assert (found["base"].value, found["finetuned"].value) == (2.0, 1.5)
    # The same gain on every item: paired, there is no doubt left.
    assert (found["improvement"].value, found["improvement"].low, found["improvement"].high) == (
        gain,
        gain,
        gain,
    )


def test_what_the_real_pictures_reach_is_told_where_known() -> None:
    zeros, real = torch.zeros(3), torch.tensor([0.2, 0.3, 0.4])
    measured = Measured(name="x", base_N=zeros, finetuned_N=zeros, pairs=True, better=1, real_N=real)
    assert measured.intervals(0.95)["real"].value == pytest.approx(0.3)
