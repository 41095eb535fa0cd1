"""Distances and scores in CLIP space, as symmetric h(i, j) over held-out items; `intervals.pair_means` sums them up.

An item is one draw of the data: its real picture, its caption and the pictures drawn for that caption. Only pairs of
different items count: a drawn picture is nearer to the real picture of its own caption, and to the others drawn for
it, than two independent draws would be, and that would bias the estimate.

Letters: N items, M drawn pictures, D width of the features. Features have length 1; all sums in float64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stages.core.intervals import Interval, of_mean, of_pair_means


def averaging(owners: list[int], items: int) -> Tensor:
    """Weights, float64 [N, M]: row i takes the mean over the pictures drawn for item i.

    owners: for each drawn picture its item. Every item must own at least one (ValueError).
    """
    weights_NM = torch.zeros(items, len(owners), dtype=torch.float64)
    weights_NM[torch.tensor(owners), torch.arange(len(owners))] = 1.0
    counts_N = weights_NM.sum(dim=1, keepdim=True)
    if bool((counts_N == 0).any()):
        raise ValueError(f"no pictures were drawn for {int((counts_N == 0).sum())} of {items} items")
    return weights_NM / counts_N


def gaussian_kernel(left: Tensor, right: Tensor, sigma: float) -> Tensor:
    """k(x, y) = exp(-|x - y|^2 / (2 sigma^2)), float64 [rows of left, rows of right]."""
    left, right = left.double(), right.double()
    squares = left.square().sum(dim=1)[:, None] + right.square().sum(dim=1)[None, :] - 2 * left @ right.T
    return torch.exp(-squares.clamp(min=0) / (2 * sigma * sigma))


def mmd_pairs(real_ND: Tensor, drawn_MD: Tensor, owners: list[int], sigma: float) -> Tensor:
    """h(i, j) whose mean over i != j is the unbiased squared MMD of real and drawn features, float64 [N, N].

    h(i, j) = k(x_i, x_j) + k(y_i, y_j) - k(x_i, y_j) - k(x_j, y_i), with k(., y_i) the mean over the pictures drawn
    for item i (Gretton et al., "A kernel two-sample test", JMLR 2012, eq. 4). In CLIP space with a Gaussian kernel
    it is CMMD (Jayasumana et al., "Rethinking FID", CVPR 2024), which takes sigma 10 and the biased estimate.
    """
    weights_NM = averaging(owners, len(real_ND))
    drawn_NN = weights_NM @ gaussian_kernel(drawn_MD, drawn_MD, sigma) @ weights_NM.T
    cross_NN = gaussian_kernel(real_ND, drawn_MD, sigma) @ weights_NM.T
    return gaussian_kernel(real_ND, real_ND, sigma) + drawn_NN - cross_NN - cross_NN.T


def caption_cosines(drawn_MD: Tensor, captions_ND: Tensor, owners: list[int]) -> Tensor:
    """c(i, j): mean cosine of the pictures drawn for item i with the caption of item j, float64 [N, N].

    The diagonal is the CLIP score (Hessel et al., "CLIPScore", EMNLP 2021), without its factor 2.5 and cut at 0.
    """
    return averaging(owners, len(captions_ND)) @ drawn_MD.double() @ captions_ND.double().T


def contrast_pairs(cosines_NN: Tensor) -> Tensor:
    """h(i, j): cosine with the own caption minus that with the other's, averaged over both; float64 [N, N].

    Its mean over i != j is the CLIP score minus that with shuffled captions: 0 for a model that ignores captions.
    """
    own_N = cosines_NN.diagonal()
    return (own_N[:, None] + own_N[None, :] - cosines_NN - cosines_NN.T) / 2


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One measure for both models, one number per item (pair measures: the item's mean over all other items)."""

    name: str
    base_N: Tensor
    finetuned_N: Tensor
    pairs: bool  # whether the numbers are means over pairs
    better: int  # +1: higher is better, -1: lower is better
    real_N: Tensor | None = None  # what the real pictures reach themselves, where that means something

    def intervals(self, confidence: float) -> dict[str, Interval]:
        """Base, fine-tuned, and the improvement: their difference, positive when the fine-tuned model is better.

        `real` comes with them where it is known: a CLIP that cannot tell the real pictures' captions apart judges no
        drawn ones either.
        """
        over = of_pair_means if self.pairs else of_mean
        real = {} if self.real_N is None else {"real": over(self.real_N, confidence)}
        return real | {
            "base": over(self.base_N, confidence),
            "finetuned": over(self.finetuned_N, confidence),
            "improvement": over(self.better * (self.finetuned_N - self.base_N), confidence),
        }
