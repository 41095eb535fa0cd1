"""Pictures -> posterior moments, in forwards of one shape each.

Every forward has the same number of rows, the last ones padded: a row's bits then depend neither on its place nor on its
companions (measured on CPUs; another number of rows changes them by 1.7e-6), so that it does not matter which rows a
run, a rank or a restart had left to do.

Letters: B batch, N rows of it that are not padding, C latent channels, H W pixels, h w latents.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from stages.core.memory import explained
from stages.core.models.vae import Vae
from stages.core.rounding import kept
from stages.core.rows import Rows, not_finite

PARTS = ("mean", "logvar")
Row = tuple[str, Tensor]  # a name, and uint8 RGB [3, H, W]


def grouped(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    """`rows` in groups of `size` of one shape, in the order in which groups become full; then what is left, by shape."""
    waiting: dict[tuple[int, ...], list[Row]] = defaultdict(list)
    for row in rows:
        shape = tuple(row[1].shape)
        waiting[shape].append(row)
        if len(waiting[shape]) == size:
            yield waiting.pop(shape)
    for _, group in sorted(waiting.items()):
        yield group


def encode_group(
    vae: Vae, group: list[Row], *, batch_size: int, keep: torch.dtype, exact: Callable[[], Vae]
) -> Rows:
    """Up to `batch_size` rows of one shape -> their parts "mean" and "logvar" [N, C, h, w] in `keep`, and "facts":
    float64 [N, 7], the rounding errors of both (`rounding.kept`), then 1 where float32 had to be used.

    exact: gives the VAE in float32; asked for where the numbers of one in half precision are not finite: then the same
    forward is repeated, and the rows concerned are taken from there. Raises MachineError when the memory is too small.
    """
    pixels_BCHW = torch.stack([pixels for _, pixels in group] + [group[-1][1]] * (batch_size - len(group)))
    height, width = pixels_BCHW.shape[2:]
    smaller = f"encode.batch_size to {batch_size // 2}" if batch_size > 1 else "encode.tile to a smaller tile"
    with explained(f"encoding {batch_size} pictures of {width} x {height}", f"set {smaller}"):
        mean_NChw, logvar_NChw = (part[: len(group)] for part in vae.moments(pixels_BCHW))
        bad = [] if vae.dtype == torch.float32 else not_finite(mean_NChw, logvar_NChw)
        if bad:
            exact_mean, exact_logvar = exact().moments(pixels_BCHW)
            mean_NChw, logvar_NChw = mean_NChw.clone(), logvar_NChw.clone()
            mean_NChw[bad], logvar_NChw[bad] = exact_mean[bad], exact_logvar[bad]
    mean_NChw, mean_errors_N3 = kept(mean_NChw, keep)
    logvar_NChw, logvar_errors_N3 = kept(logvar_NChw, keep)
    again_N1 = torch.zeros(len(group), 1, dtype=torch.float64)
    again_N1[bad] = 1
    facts_N7 = torch.cat([mean_errors_N3, logvar_errors_N3, again_N1], dim=1)
    return Rows([name for name, _ in group], {"mean": mean_NChw, "logvar": logvar_NChw, "facts": facts_N7})
