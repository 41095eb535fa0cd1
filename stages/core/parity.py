"""Does an exported artefact compute what the trained model computes? Inputs, comparison and the table of results.

A probe is one set of inputs for all parts of the model; a part's output is compared by its largest error.

Letters: B batch, C channels, H W pixels, h w latents, L tokens, D width, F text features.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.core.errors import ParityError
from stages.core.sampler import integers, normal

Outputs = dict[str, Tensor]  # part ("unet", "vae_decoder", ...) -> what it computed, float32 on the CPU


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What probes must know of a model."""

    latent_channels: int
    latent_multiple: int  # latent heights and widths must be multiples of this, for the U-Net's levels
    latent_size: int  # the height and width that the U-Net was made for
    downsample: int  # H / h
    text_length: int
    text_width: int
    vocabulary: int
    end_token: int
    timesteps: int


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Inputs of one batch and one size for every part, float32 (ids and steps int64)."""

    ids_BL: Tensor
    steps_B: Tensor
    noisy_BChw: Tensor  # what the U-Net sees
    text_BLD: Tensor
    latents_BChw: Tensor  # unscaled, what the decoder sees
    pixels_BCHW: Tensor  # -1..1


def make_probes(shape: ModelShape, seed: int) -> list[Probe]:
    """Three probes that differ in batch, height and width; the first has the model's own size."""
    unit = shape.latent_multiple
    own = max(unit, shape.latent_size // unit * unit)
    # Not square, and small: one large size is enough to be right at large sizes, and CPUs are slow.
    sizes = [(1, own, own), (2, 2 * unit, 3 * unit), (3, 4 * unit, 2 * unit)]
    return [_probe(shape, seed, number, *size) for number, size in enumerate(sizes)]


def _probe(shape: ModelShape, seed: int, number: int, batch: int, height: int, width: int) -> Probe:
    def draw(what: str, *dims: int) -> Tensor:
        return normal(seed, f"parity {what}", number, shape=(batch, *dims))

    def draw_integers(what: str, below: int, *dims: int) -> Tensor:
        values = integers(seed, f"parity {what}", number, below=below, size=batch * math.prod(dims))
        return torch.tensor(values).reshape(batch, *dims)

    pixels = (3, height * shape.downsample, width * shape.downsample)
    ids_BL = draw_integers("ids", shape.vocabulary, shape.text_length)
    # The encoder pools at the end mark.
    ids_BL[:, -1] = shape.end_token
    return Probe(
        ids_BL=ids_BL,
        steps_B=draw_integers("steps", shape.timesteps),
        noisy_BChw=draw("noisy", shape.latent_channels, height, width),
        text_BLD=draw("text", shape.text_length, shape.text_width),
        latents_BChw=draw("latents", shape.latent_channels, height, width),
        pixels_BCHW=draw("pixels", *pixels).clamp(-1, 1),
    )


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison. `relative` is `error` over the largest magnitude of the reference; it must not pass `limit`."""

    artefact: str  # such as onnx/unet
    shape: tuple[int, ...]  # of the output
    error: float  # the largest absolute difference
    relative: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the limit; NaN is not."""
        return self.relative <= self.limit


def compare(artefact: str, got: Tensor, expected: Tensor, limit: float) -> Check:
    """Compare two outputs; another shape, NaN or infinity counts as an infinite error."""
    error = relative = math.inf
    if got.shape == expected.shape and bool(torch.isfinite(got).all()):
        scale = float(expected.abs().max())
        error = float((got.double() - expected.double()).abs().max())
        relative = error / scale if scale else (math.inf if error else 0.0)
    return Check(artefact=artefact, shape=tuple(expected.shape), error=error, relative=relative, limit=limit)


def compare_all(prefix: str, got: list[Outputs], expected: list[Outputs], limit: float) -> list[Check]:
    """Compare all parts that the artefact `prefix` has, probe by probe."""
    return [
        compare(f"{prefix}/{part}", outputs[part], reference[part], limit)
        for outputs, reference in zip(got, expected, strict=True)
        for part in sorted(outputs)
    ]


def table(checks: list[Check]) -> str:
    """The comparisons as text, one line each; failures are marked."""
    rows = [("artefact", "shape", "max abs error", "relative", "limit", "")]
    rows += [
        (
            check.artefact,
            _shape_text(check.shape),
            f"{check.error:.3g}",
            f"{check.relative:.3g}",
            f"{check.limit:.3g}",
            "" if check.passed else "FAILED",
        )
        for check in checks
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def require(checks: list[Check]) -> None:
    """Raise ParityError with the whole table when any comparison failed; the first line names the culprits."""
    failed = sorted({check.artefact for check in checks if not check.passed})
    if failed:
        raise ParityError(
            f"{', '.join(failed)} does not compute what the trained model computes\n{table(checks)}",
            remedy="no checksums were written, so nothing takes these files for finished; if the error is close to "
            "the limit, rounding is the cause: raise export.tolerance_float32 or export.tolerance_float16, or set "
            "export.dtype: float32; if it is far above, the artefact is wrong: run `dvc repro --force export`, and "
            "report it when it fails again",
        )


def require_psnr(decibels: float, minimum: float) -> None:
    """Raise ParityError when the exported pipeline's pictures are too far from the trained pipeline's."""
    if not decibels >= minimum:
        raise ParityError(
            f"pipeline: its pictures are at {decibels:.1f} dB from the trained pipeline's (PSNR), the limit is "
            f"{minimum:.1f} dB",
            remedy="lower export.psnr_minimum if the pictures are close enough for you, or set export.dtype: float32",
        )


def summary(checks: list[Check], decibels: float) -> str:
    """One line: how many comparisons passed, which came closest to its limit, and the pictures' PSNR."""
    worst = max(checks, key=lambda check: check.relative / check.limit)
    return (
        f"parity: {len(checks)} comparisons passed; closest to its limit {worst.artefact} "
        f"({worst.relative:.2g} of {worst.limit:.2g}); pictures at {decibels:.1f} dB"
    )


def measured(checks: list[Check]) -> dict[str, float]:
    """The largest relative error of each artefact, for the tracker: it depends on the machine."""
    worst: dict[str, float] = {}
    for check in checks:
        worst[check.artefact] = max(check.relative, worst.get(check.artefact, 0.0))
    return worst


def facts(checks: list[Check]) -> dict[str, Any]:
    """What of the comparisons is the same on every machine: shapes and limits of what passed."""
    found: dict[str, Any] = {}
    for check in checks:
        entry = found.setdefault(check.artefact, {"limit": check.limit, "shapes": [], "passed": True})
        entry["shapes"].append(_shape_text(check.shape))
        entry["passed"] = entry["passed"] and check.passed
    return found
