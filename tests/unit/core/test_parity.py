"""Comparisons: exact errors, no way to pass by accident, and messages that name the culprit."""

import json
import math

import pytest
import torch

from stages.core import parity
from stages.core.errors import ParityError
from stages.core.parity import Check, ModelShape, compare, make_probes
from stages.core.psnr import psnr

_SHAPE = ModelShape(
    latent_channels=4,
    latent_multiple=4,
    latent_size=18,
    downsample=8,
    text_length=7,
    text_width=6,
    vocabulary=50,
    end_token=49,
    timesteps=10,
)


def test_probes_differ_in_batch_and_size_and_fit_the_model() -> None:
    probes = make_probes(_SHAPE, seed=3)
    assert [tuple(probe.noisy_BChw.shape) for probe in probes] == [
        (1, 4, 16, 16),
        (2, 4, 8, 12),
        (3, 4, 16, 8),
    ]
    for probe in probes:
        batch, _, height, width = probe.noisy_BChw.shape
        assert probe.latents_BChw.shape == probe.noisy_BChw.shape
        assert probe.pixels_BCHW.shape == (batch, 3, 8 * height, 8 * width)
        assert probe.text_BLD.shape == (batch, 7, 6)
        assert probe.ids_BL.shape == (batch, 7)
        assert probe.ids_BL[:, -1].tolist() == [49] * batch
        assert probe.steps_B.shape == (batch,)
        assert 0 <= int(probe.steps_B.min()) <= int(probe.steps_B.max()) < 10
        assert float(probe.pixels_BCHW.abs().max()) <= 1


def test_probes_are_a_function_of_the_seed() -> None:
    first, same, other = make_probes(_SHAPE, 3)[1], make_probes(_SHAPE, 3)[1], make_probes(_SHAPE, 4)[1]
    assert torch.equal(first.noisy_BChw, same.noisy_BChw)
    assert torch.equal(first.ids_BL, same.ids_BL)
    assert not torch.equal(first.noisy_BChw, other.noisy_BChw)
    assert not torch.equal(first.noisy_BChw, first.latents_BChw)


def test_error_and_relative_error() -> None:
    check = compare("onnx/unet", torch.tensor([1.0, -4.5]), torch.tensor([1.25, -4.0]), 0.2)
    assert (check.error, check.relative, check.passed) == (0.5, 0.125, True)
    assert not compare("onnx/unet", torch.tensor([1.0, -4.5]), torch.tensor([1.25, -4.0]), 0.1).passed


@pytest.mark.parametrize(
    "got",
    [
        torch.tensor([1.0, math.nan]),
        torch.tensor([1.0, math.inf]),
        torch.tensor([1.0]),
        torch.tensor([[1.0, 2.0]]),
    ],
    ids=["nan", "infinite", "short", "another shape"],
)
def test_what_cannot_be_compared_fails(got: torch.Tensor) -> None:
    check = compare("x", got, torch.tensor([1.0, 2.0]), 1e9)
    assert not check.passed
    assert check.error == math.inf


def test_a_reference_of_zeros() -> None:
    zeros = torch.zeros(2)
    assert compare("x", zeros, zeros, 1e-6).passed
    assert not compare("x", zeros + 1e-9, zeros, 1e-6).passed


def test_nan_in_the_reference_does_not_pass() -> None:
    assert not compare("x", torch.zeros(2), torch.tensor([0.0, math.nan]), 1.0).passed


def test_psnr_is_the_worst_of_the_batch() -> None:
    expected = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    got = expected.clone()
    assert psnr(got, expected) == 100.0
    got[1] = 5
    assert psnr(got, expected) == pytest.approx(20 * math.log10(255 / 5))
    # 200 levels apart would wrap around in uint8.
    assert psnr(got + 195, expected) == pytest.approx(20 * math.log10(255 / 200))


def _checks(relative: float) -> list[Check]:
    return [
        Check(artefact="lora/unet", shape=(1, 4), error=0.0, relative=0.0, limit=1e-4),
        Check(artefact="onnx/unet", shape=(2, 4), error=3.0, relative=relative, limit=1e-4),
    ]


def test_failure_names_the_culprit_and_shows_the_whole_table() -> None:
    with pytest.raises(ParityError, match=r"^onnx/unet does not compute what the trained") as caught:
        parity.require(_checks(0.5))
    lines = str(caught.value).splitlines()
    assert lines[1].split() == ["artefact", "shape", "max", "abs", "error", "relative", "limit"]
    assert lines[2].split() == ["lora/unet", "1x4", "0", "0", "0.0001"]
    assert lines[3].split() == ["onnx/unet", "2x4", "3", "0.5", "0.0001", "FAILED"]
    assert "export.tolerance_float32" in caught.value.remedy


def test_success_is_silent_and_summarised_in_one_line() -> None:
    checks = _checks(5e-5)
    parity.require(checks)
    assert parity.summary(checks, 61.23) == (
        "parity: 2 comparisons passed; closest to its limit onnx/unet (5e-05 of 0.0001); pictures at 61.2 dB"
    )


def test_psnr_below_the_limit_or_nan_is_refused() -> None:
    parity.require_psnr(40.0, 40.0)
    with pytest.raises(ParityError, match=r"pipeline: its pictures are at 39\.9 dB .* limit is 40\.0 dB"):
        parity.require_psnr(39.9, 40.0)
    with pytest.raises(ParityError, match="nan dB"):
        parity.require_psnr(math.nan, 40.0)


def test_facts_hold_no_measurement() -> None:
    facts = parity.facts([*_checks(1e-5), *_checks(2e-5)])
    assert facts["onnx/unet"] == {"limit": 1e-4, "shapes": ["2x4", "2x4"], "passed": True}
    assert json.dumps(facts) == json.dumps(parity.facts([*_checks(3e-5), *_checks(4e-6)]))
    assert parity.measured([*_checks(1e-5), *_checks(2e-5)]) == {"lora/unet": 0.0, "onnx/unet": 2e-5}
