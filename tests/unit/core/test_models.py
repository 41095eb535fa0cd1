"""The facades over diffusers, transformers and peft, against closed forms and against each other, to the last digit."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, PNDMScheduler
from safetensors.torch import load_file
from torch import Tensor, nn

from stages.core.errors import BaseModelError, StoreError
from stages.core.models.lora import (
    WEIGHTS_NAME,
    LoraConfig,
    add_lora,
    load_lora,
    lora_state,
    merge_lora,
    save_lora,
    set_lora_state,
)
from stages.core.models.pipeline import Painter, ddim
from stages.core.models.schedule import NoiseSchedule, base_schedule, objective_schedule
from stages.core.models.text import TextEncoder
from stages.core.models.trained import is_lora, load_plain_unet, load_trained_unet, trained_schedule
from stages.core.models.unet import Conditions, Ema, check_targets, load_unet, predict, save_unet, trainable
from stages.core.models.vae import LatentSpace, Vae, to_uint8
from tests.tiny import DOWNSAMPLE, TEXT_LIMIT, make_tiny_base

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def text(base: Path) -> TextEncoder:
    return TextEncoder(base, "cpu")


@pytest.fixture(scope="module")
def vae(base: Path) -> Vae:
    return Vae(base, "cpu")


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    noisy = torch.randn(2, 4, 16, 16, generator=generator)
    return noisy, torch.tensor([3, 900]), torch.randn(2, TEXT_LIMIT, 32, generator=generator)


@torch.inference_mode()
def _predict(unet: nn.Module) -> Tensor:
    noisy, steps, text = _inputs()
    return predict(unet, noisy, steps, Conditions(text))


def _lora(*, rank: int, alpha: float) -> LoraConfig:
    return LoraConfig(rank=rank, alpha=alpha, dropout=0.0, targets=TARGETS, rslora=False, dora=False)


def _with_lora(base: Path, *, rank: int = 4, alpha: float = 2.0, seed: int = 1) -> nn.Module:
    """A U-Net with factors that do something: B is zero at the start."""
    unet = load_unet(base / "unet", "cpu")
    add_lora(unet, _lora(rank=rank, alpha=alpha), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainable(unet).values():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return unet.eval()


# The noise schedule


def _alphas(zero_snr: bool) -> np.ndarray[Any, Any]:
    """Cumulative alphas in float64: scaled-linear betas; Lin et al. 2024, algorithm 1, for zero-terminal SNR."""
    betas = np.linspace(math.sqrt(0.00085), math.sqrt(0.012), 1000) ** 2
    roots = np.sqrt(np.cumprod(1 - betas))
    if zero_snr:
        roots = (roots - roots[-1]) * roots[0] / (roots[0] - roots[-1])
    return roots**2


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "zero-snr"])
def zero_snr(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module", params=["epsilon", "v_prediction"])
def prediction(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory, prediction: str, zero_snr: bool) -> NoiseSchedule:
    folder = tmp_path_factory.mktemp("schedule")
    return NoiseSchedule(
        base_schedule(make_tiny_base(folder, prediction=prediction, zero_snr=zero_snr)), "cpu"
    )


def _all_steps() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    clean, noise = torch.randn(2, 1000, 4, 2, 2, generator=generator)
    return clean, noise, torch.arange(1000)


def test_schedule_reads_the_base(schedule: NoiseSchedule, prediction: str) -> None:
    assert (schedule.prediction, schedule.steps) == (prediction, 1000)


def test_zero_terminal_snr_is_told_from_the_betas(schedule: NoiseSchedule, zero_snr: bool) -> None:
    assert schedule.zero_terminal_snr is zero_snr


def test_add_noise_at_every_timestep(schedule: NoiseSchedule, zero_snr: bool) -> None:
    clean, noise, steps = _all_steps()
    alphas = torch.from_numpy(_alphas(zero_snr)).view(-1, 1, 1, 1)
    expected = alphas.sqrt() * clean + (1 - alphas).sqrt() * noise
    torch.testing.assert_close(schedule.add_noise(clean, noise, steps).double(), expected, atol=2e-5, rtol=0)
    if zero_snr:
        assert torch.equal(schedule.add_noise(clean, noise, steps)[-1], noise[-1])


def test_target_at_every_timestep(schedule: NoiseSchedule, prediction: str, zero_snr: bool) -> None:
    clean, noise, steps = _all_steps()
    target = schedule.target(clean, noise, steps)
    if prediction == "epsilon":
        assert torch.equal(target, noise)
        return
    alphas = torch.from_numpy(_alphas(zero_snr)).view(-1, 1, 1, 1)
    expected = alphas.sqrt() * noise - (1 - alphas).sqrt() * clean
    torch.testing.assert_close(target.double(), expected, atol=2e-5, rtol=0)
    if zero_snr:
        assert torch.equal(target[-1], -clean[-1])


@pytest.mark.parametrize("gamma", [1.0, 5.0])
def test_min_snr_weights_at_every_timestep(
    schedule: NoiseSchedule, prediction: str, zero_snr: bool, gamma: float
) -> None:
    alphas = _alphas(zero_snr)
    snr = alphas / (1 - alphas)
    if prediction == "epsilon":
        with np.errstate(invalid="ignore"):
            expected = np.where(snr == 0, 1.0, np.minimum(snr, gamma) / snr)
    else:
        expected = np.minimum(snr, gamma) / (snr + 1)
    weights = schedule.loss_weights(torch.arange(1000), gamma)
    assert weights.dtype == torch.float32
    np.testing.assert_allclose(weights.numpy(), expected, atol=1e-6, rtol=2e-4)
    if zero_snr:
        assert float(weights[-1]) == (1.0 if prediction == "epsilon" else 0.0)


def test_without_gamma_all_weights_are_one(schedule: NoiseSchedule) -> None:
    assert torch.equal(schedule.loss_weights(torch.tensor([0, 999]), None), torch.ones(2))


def test_other_prediction_types_are_refused(tmp_path: Path) -> None:
    make_tiny_base(tmp_path, prediction="sample", zero_snr=False)
    with pytest.raises(BaseModelError, match=r"scheduler_config\.json has prediction_type 'sample'"):
        base_schedule(tmp_path)


def test_error_factors_at_every_timestep(schedule: NoiseSchedule, prediction: str, zero_snr: bool) -> None:
    """A wrong guess, stated as the other kind by hand: the ratio of the squared errors is the factor."""
    clean, noise, steps = (value.double() for value in _all_steps())
    guess = torch.randn(noise.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    alphas = schedule.alphas_cumprod.double().view(-1, 1, 1, 1)
    signal, spread = alphas.sqrt(), (1 - alphas).sqrt()
    noisy, velocity = signal * clean + spread * noise, signal * noise - spread * clean
    if prediction == "epsilon":
        other, asked, told = "v_prediction", (guess - noise), (guess - spread * noisy) / signal - velocity
    else:
        other, asked, told = "epsilon", (guess - velocity), signal * guess + spread * noisy - noise
    ratio = told.square().sum(dim=(1, 2, 3)) / asked.square().sum(dim=(1, 2, 3))
    factors = schedule.error_factors(steps.long(), other)
    assert (factors.dtype, factors.shape) == (torch.float64, (1000,))
    clear = 999 if zero_snr else 1000
    torch.testing.assert_close(factors[:clear], ratio[:clear], rtol=1e-9, atol=0)
    closed = _alphas(zero_snr)[:clear] ** (-1 if prediction == "epsilon" else 1)
    # float32 keeps 1e-3 of the zero-terminal schedule's smallest alphas.
    np.testing.assert_allclose(factors[:clear].numpy(), closed, rtol=2e-3 if zero_snr else 1e-5)
    if zero_snr:
        assert float(factors[-1]) == (math.inf if prediction == "epsilon" else 0.0)
    same = schedule.error_factors(torch.tensor([0, 999]), prediction)
    assert torch.equal(same, torch.ones(2, dtype=torch.float64))


# What is trained on


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The schedule of a base that predicts the noise, with betas that leave some signal at the last timestep."""
    folder = tmp_path_factory.mktemp("plain")
    return base_schedule(make_tiny_base(folder, prediction="epsilon", zero_snr=False))


@pytest.mark.parametrize("prediction", ["base", "epsilon"])
def test_the_bases_own_objective_changes_nothing(plain: dict[str, Any], prediction: str) -> None:
    wanted = objective_schedule(plain, prediction=prediction, zero_terminal_snr=False)
    assert wanted == plain
    assert wanted is not plain


@pytest.mark.parametrize(
    ("prediction", "zero_terminal_snr", "change"),
    [
        ("v_prediction", False, {"prediction_type": "v_prediction"}),
        ("base", True, {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}),
        (
            "v_prediction",
            True,
            {
                "prediction_type": "v_prediction",
                "rescale_betas_zero_snr": True,
                "timestep_spacing": "trailing",
            },
        ),
    ],
)
def test_another_objective(
    plain: dict[str, Any], prediction: str, zero_terminal_snr: bool, change: dict[str, Any]
) -> None:
    before = dict(plain)
    wanted = objective_schedule(plain, prediction=prediction, zero_terminal_snr=zero_terminal_snr)
    assert wanted == plain | change
    assert plain == before
    schedule = NoiseSchedule(wanted, "cpu")
    assert schedule.prediction == change.get("prediction_type", "epsilon")
    assert schedule.zero_terminal_snr is zero_terminal_snr
    np.testing.assert_allclose(schedule.alphas_cumprod.numpy(), _alphas(zero_terminal_snr), atol=1e-6)


def test_a_prediction_that_the_base_does_not_name_is_the_noise(plain: dict[str, Any]) -> None:
    unnamed = {name: value for name, value in plain.items() if name != "prediction_type"}
    assert objective_schedule(unnamed, prediction="epsilon", zero_terminal_snr=False) == unnamed
    wanted = objective_schedule(unnamed, prediction="v_prediction", zero_terminal_snr=False)
    assert wanted == unnamed | {"prediction_type": "v_prediction"}


def test_what_a_base_has_already_stays(base: Path) -> None:
    """Its own spacing too: it is asked for together with the betas alone."""
    fields = base_schedule(base) | {"timestep_spacing": "linspace"}
    assert objective_schedule(fields, prediction="base", zero_terminal_snr=True) == fields
    assert objective_schedule(fields, prediction="base", zero_terminal_snr=False) == fields


def test_the_last_step_of_a_zero_terminal_schedule_is_the_noise(plain: dict[str, Any]) -> None:
    wanted = objective_schedule(plain, prediction="v_prediction", zero_terminal_snr=True)
    clean, noise = torch.randn(2, 3, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    last = torch.full((3,), 999)
    assert torch.equal(NoiseSchedule(wanted, "cpu").add_noise(clean, noise, last), noise)
    assert not torch.allclose(NoiseSchedule(plain, "cpu").add_noise(clean, noise, last), noise, atol=1e-2)
    assert torch.equal(NoiseSchedule(wanted, "cpu").target(clean, noise, last), -clean)


def test_trained_schedule_is_the_one_beside_the_weights_or_the_bases(base: Path, tmp_path: Path) -> None:
    assert trained_schedule(base, tmp_path) == base_schedule(base)
    fields = base_schedule(base) | {"prediction_type": "epsilon"}
    (tmp_path / "scheduler_config.json").write_text(json.dumps(fields))
    assert trained_schedule(base, tmp_path) == fields


# Text


@pytest.mark.parametrize(
    ("caption", "tokens"),
    [("", 2), ("a", 3), ("a red circle", 5), ("A RED  circle", 5), ("zq", 4), ("red " * 40, 42)],
)
def test_length_counts_both_marks_and_never_cuts(text: TextEncoder, caption: str, tokens: int) -> None:
    assert text.length(caption) == tokens


def test_ids_are_padded_to_the_limit_and_cut_there(text: TextEncoder) -> None:
    ids = text.ids(["a red circle", "red " * 40])
    begin, end = text.tokenizer.bos_token_id, text.tokenizer.eos_token_id
    assert ids.shape == (2, TEXT_LIMIT)
    assert ids[0, 0] == begin
    assert ids[0, 4:].tolist() == [end] * (TEXT_LIMIT - 4)
    assert ids[1, -1] == end
    assert len(set(ids[1, 1:-1].tolist())) == 1


def test_encoding_is_what_the_pipeline_feeds_the_unet(base: Path, vae: Vae, text: TextEncoder) -> None:
    painter = Painter(base, unet=load_unet(base / "unet", "cpu"), vae=vae, text=text, device="cpu")
    expected, _ = painter.pipeline.encode_prompt("a red circle", "cpu", 1, do_classifier_free_guidance=False)
    states = text.encode(["a red circle"])
    assert (states.dtype, states.shape) == (torch.float32, (1, TEXT_LIMIT, 32))
    assert torch.equal(states, expected)


# The VAE


def test_latent_space_comes_from_the_configuration(vae: Vae) -> None:
    assert vae.space == LatentSpace(channels=4, downsample=DOWNSAMPLE, scaling_factor=0.6, shift_factor=0.0)
    shifted = LatentSpace(channels=4, downsample=8, scaling_factor=0.5, shift_factor=0.25)
    raw = torch.tensor([0.25, 1.25])
    assert shifted.scale(raw).tolist() == [0.0, 0.5]
    assert torch.equal(shifted.unscale(shifted.scale(raw)), raw)


def test_moments_of_uint8_pixels(vae: Vae) -> None:
    pixels = torch.arange(2 * 3 * 16 * 24).reshape(2, 3, 16, 24).remainder(256).to(torch.uint8)
    mean, logvar = vae.moments(pixels)
    assert mean.shape == logvar.shape == (2, 4, 4, 6)
    with torch.inference_mode():
        posterior = vae.model.encode(pixels.float() / 127.5 - 1).latent_dist
    assert torch.equal(mean, posterior.mean)
    assert torch.equal(logvar, posterior.logvar)


def test_moments_refuse_other_dtypes_and_sizes_that_would_be_cropped(vae: Vae) -> None:
    with pytest.raises(TypeError, match=r"expected uint8 pixels, got torch\.float32"):
        vae.moments(torch.zeros(1, 3, 16, 16))
    with pytest.raises(ValueError, match=r"\(1, 3, 16, 18\): sizes must be multiples of 4"):
        vae.moments(torch.zeros(1, 3, 16, 18, dtype=torch.uint8))


def test_decode_unscales_first(vae: Vae) -> None:
    scaled = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = to_uint8(vae.model.decode(scaled / 0.6).sample)
    assert torch.equal(vae.decode(scaled), expected)


def test_to_uint8_rounds_and_clamps() -> None:
    values = torch.tensor([-2.0, -1.0, -1 + 0.49 / 127.5, -1 + 0.51 / 127.5, 0.999, 1.0, 3.0])
    assert to_uint8(values).tolist() == [0, 0, 0, 1, 255, 255, 255]


# The U-Net


def test_saved_unet_loads_to_the_same_predictions_and_holds_no_path(base: Path, tmp_path: Path) -> None:
    unet = load_unet(base / "unet", "cpu")
    save_unet(unet, tmp_path, torch.float32)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "diffusion_pytorch_model.safetensors",
    ]
    assert str(base) not in (tmp_path / "config.json").read_text()
    assert "_name_or_path" not in json.loads((tmp_path / "config.json").read_text())
    assert torch.equal(_predict(load_unet(tmp_path, "cpu")), _predict(unet))


def test_saving_in_half_rounds_each_weight_and_leaves_the_model_alone(base: Path, tmp_path: Path) -> None:
    unet = load_unet(base / "unet", "cpu")
    save_unet(unet, tmp_path, torch.float16)
    stored = load_file(tmp_path / "diffusion_pytorch_model.safetensors")
    state = unet.state_dict()
    assert sorted(stored) == sorted(state)
    for name, value in state.items():
        assert value.dtype == torch.float32
        assert torch.equal(stored[name], value.half())


def test_predict_returns_float32(base: Path) -> None:
    assert _predict(load_unet(base / "unet", "cpu").bfloat16().float()).dtype == torch.float32


def test_parts_under_a_variants_name_are_found(base: Path, tmp_path: Path) -> None:
    make_tiny_base(tmp_path)
    for path in tmp_path.rglob("*.safetensors"):
        path.rename(path.with_name(path.name.replace(".safetensors", ".fp16.safetensors")))
    assert torch.equal(
        _predict(load_unet(tmp_path / "unet", "cpu")), _predict(load_unet(base / "unet", "cpu"))
    )
    assert TextEncoder(tmp_path, "cpu").encode(["a"]).shape == (1, TEXT_LIMIT, 32)
    assert Vae(tmp_path, "cpu").space.channels == 4


def test_ema_continues_to_the_same_bits(base: Path) -> None:
    def run(reload_at: int | None) -> list[Tensor]:
        parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(2, 2))]
        ema = Ema(parameters, 0.9)
        for step in range(6):
            if step == reload_at:
                averages, plain = ema.state()
                ema = Ema(parameters, 0.9)
                ema.load(averages, plain)
            with torch.no_grad():
                for parameter in parameters:
                    parameter += 0.1 * (step + 1)
            ema.update()
        last = [parameter.detach().clone() for parameter in parameters]
        with ema.applied():
            average = [parameter.detach().clone() for parameter in parameters]
        assert all(torch.equal(*pair) for pair in zip(parameters, last, strict=True))
        assert not any(torch.equal(*pair) for pair in zip(average, last, strict=True))
        return average

    for straight, resumed in zip(run(None), run(3), strict=True):
        assert torch.equal(straight, resumed)


def test_targets_that_name_nothing_are_refused(base: Path) -> None:
    unet = load_unet(base / "unet", "cpu")
    check_targets(unet, [*TARGETS, "conv_in"])
    with pytest.raises(BaseModelError, match="'to_x', which no module"):
        check_targets(unet, ["to_q", "to_x"])


# LoRA


def test_new_factors_change_nothing_and_are_a_function_of_the_seed(base: Path) -> None:
    def build(seed: int) -> nn.Module:
        unet = load_unet(base / "unet", "cpu")
        add_lora(unet, _lora(rank=2, alpha=2.0), seed=seed)
        return unet.eval()

    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    first = build(1)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(100)
    same, other = lora_state(build(1)), lora_state(build(2))
    state = lora_state(first)
    assert all(torch.equal(state[name], same[name]) for name in state)
    assert not all(torch.equal(state[name], other[name]) for name in state)
    assert torch.equal(_predict(first), _predict(load_unet(base / "unet", "cpu")))
    # 3 transformer blocks (down, middle, two up) of two attentions with four targets and two factors.
    assert len(trainable(first)) == len(state) == 4 * 2 * 4 * 2
    assert all("lora" in name for name in trainable(first))


def test_lora_survives_saving_with_its_scale(base: Path, tmp_path: Path) -> None:
    unet = _with_lora(base, rank=4, alpha=3.0)
    path = save_lora(unet, tmp_path)
    assert path == tmp_path / WEIGHTS_NAME
    assert [file.name for file in tmp_path.iterdir()] == [WEIGHTS_NAME]
    assert str(tmp_path).encode() not in path.read_bytes()
    assert str(base).encode() not in path.read_bytes()
    loaded = load_unet(base / "unet", "cpu")
    load_lora(loaded, tmp_path)
    assert torch.equal(_predict(loaded), _predict(unet))
    key = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q.lora.down.weight"
    assert load_file(path)[key].shape == (4, 32)


def test_saving_twice_gives_the_same_bytes(base: Path, tmp_path: Path) -> None:
    first = save_lora(_with_lora(base), tmp_path / "a").read_bytes()
    assert save_lora(_with_lora(base), tmp_path / "b").read_bytes() == first


def test_lora_state_can_be_put_back(base: Path) -> None:
    unet = _with_lora(base, seed=1)
    wanted = {name: value.clone() for name, value in lora_state(unet).items()}
    other = _with_lora(base, seed=2)
    set_lora_state(other, wanted)
    assert torch.equal(_predict(other), _predict(unet))


def test_merged_equals_attached(base: Path) -> None:
    unet = _with_lora(base)
    attached = _predict(unet)
    plain = load_unet(base / "unet", "cpu")
    assert float((attached - _predict(plain)).abs().max()) > 1e-2
    merge_lora(unet)
    assert sorted(unet.state_dict()) == sorted(plain.state_dict())
    assert float((_predict(unet) - attached).abs().max()) < 1e-5


def test_trained_lora(base: Path, tmp_path: Path) -> None:
    unet = _with_lora(base)
    save_lora(unet, tmp_path)
    assert is_lora(tmp_path)
    assert torch.equal(_predict(load_trained_unet(base, tmp_path, "cpu")), _predict(unet))
    merged = load_plain_unet(base, tmp_path, "cpu")
    assert not [name for name in merged.state_dict() if "lora" in name]
    torch.testing.assert_close(_predict(merged), _predict(unet), atol=1e-5, rtol=0)


def test_trained_whole(base: Path, tmp_path: Path) -> None:
    unet = load_unet(base / "unet", "cpu")
    with torch.no_grad():
        next(unet.parameters()).mul_(1.5)
    save_unet(unet, tmp_path, torch.float32)
    assert not is_lora(tmp_path)
    assert torch.equal(_predict(load_trained_unet(base, tmp_path, "cpu")), _predict(unet))
    assert torch.equal(_predict(load_plain_unet(base, tmp_path, "cpu")), _predict(unet))


def test_missing_weights_are_named(base: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"{tmp_path} holds neither pytorch_lora_weights"):
        load_trained_unet(base, tmp_path, "cpu")


# Pictures


@pytest.fixture(scope="module")
def paint(base: Path, vae: Vae, text: TextEncoder) -> Callable[..., Tensor]:
    painter = Painter(base, unet=load_unet(base / "unet", "cpu"), vae=vae, text=text, device="cpu")

    def call(captions: list[str], seeds: list[int], *, size: tuple[int, int] = (32, 48)) -> Tensor:
        return painter.paint(captions, seeds, size=size, steps=2, guidance=3.0, batch=2)

    return call


def test_a_picture_is_the_same_alone_and_in_company(paint: Callable[..., Tensor]) -> None:
    captions, seeds = ["a red circle", "a blue square", ""], [11, 12, 13]
    together = paint(captions, seeds)
    assert (together.dtype, together.shape) == (torch.uint8, (3, 3, 32, 48))
    for number in range(3):
        assert torch.equal(paint([captions[number]], [seeds[number]])[0], together[number])
    assert torch.equal(paint(captions[::-1], seeds[::-1]), together.flip(0))


def test_a_picture_depends_on_caption_and_seed(paint: Callable[..., Tensor]) -> None:
    first, other_seed, other_caption = paint(["a red circle", "a red circle", "a blue square"], [1, 2, 1])
    assert not torch.equal(first, other_seed)
    assert not torch.equal(first, other_caption)


def test_what_cannot_be_painted_is_refused(paint: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match="1 captions but 2 seeds"):
        paint(["a"], [1, 2])
    with pytest.raises(ValueError, match="not a multiple of 4"):
        paint(["a"], [1], size=(32, 50))


def test_latents_are_never_clipped(base: Path, tmp_path: Path) -> None:
    (tmp_path / "scheduler").mkdir()
    config = json.loads((base / "scheduler" / "scheduler_config.json").read_text())
    del config["clip_sample"]
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
    scheduler = ddim(base_schedule(tmp_path))
    assert scheduler.config.clip_sample is False
    assert scheduler.config.prediction_type == "v_prediction"
    assert scheduler.config.rescale_betas_zero_snr is True


@pytest.mark.parametrize("sampler", [DDIMScheduler, EulerDiscreteScheduler, PNDMScheduler])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_any_samplers_file_gives_the_same_ddim(tmp_path: Path, sampler: Any, prediction: str) -> None:
    """Betas, prediction and spacing are the file's, and all of it is what diffusers makes of the folder itself."""
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    sampler(**betas, prediction_type=prediction, timestep_spacing="trailing").save_pretrained(
        tmp_path / "scheduler"
    )
    fields = base_schedule(tmp_path)
    before = dict(fields)
    got = ddim(fields)
    assert fields == before
    expected = DDIMScheduler.from_pretrained(
        tmp_path / "scheduler", clip_sample=False, steps_offset=1, local_files_only=True
    )
    assert dict(got.config) == dict(expected.config)
    assert torch.equal(got.alphas_cumprod, expected.alphas_cumprod)
    np.testing.assert_allclose(got.alphas_cumprod.numpy(), _alphas(zero_snr=False), atol=1e-6)
    assert (got.config.prediction_type, got.config.timestep_spacing) == (prediction, "trailing")
    got.set_timesteps(4)
    assert got.timesteps.tolist() == [999, 749, 499, 249]


def test_a_painter_draws_on_the_schedule_that_it_is_given(base: Path, vae: Vae, text: TextEncoder) -> None:
    fields = base_schedule(base)
    plain = fields | {"prediction_type": "epsilon", "rescale_betas_zero_snr": False}

    def painted(schedule: dict[str, Any] | None) -> Tensor:
        unet = load_unet(base / "unet", "cpu")
        painter = Painter(base, unet=unet, vae=vae, text=text, device="cpu", schedule=schedule)
        wanted = fields if schedule is None else schedule
        for name in ("prediction_type", "rescale_betas_zero_snr", "timestep_spacing"):
            assert painter.pipeline.scheduler.config[name] == wanted[name]
        return painter.paint(["a red circle"], [1], size=(32, 32), steps=2, guidance=1.0, batch=1)

    assert torch.equal(painted(None), painted(fields))
    assert not torch.equal(painted(None), painted(plain))
