"""Factors on linear layers and convolutions: against the formulas by hand, and through files as their users load them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline
from peft.utils.save_and_load import get_peft_model_state_dict
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

from stages.core.errors import BaseModelError
from stages.core.models.folder import load_with_lora
from stages.core.models.lora import (
    WEIGHTS_NAME,
    LoraConfig,
    add_lora,
    check_lora,
    load_lora,
    lora_state,
    merge_lora,
    save_lora,
    set_lora_state,
)
from stages.core.models.trained import load_plain_unet, load_trained_unet
from stages.core.models.unet import Conditions, load_unet, predict, set_checkpointing, trainable
from tests.tiny import TEXT_LIMIT, make_tiny_base

CONFIG = LoraConfig(rank=4, alpha=3.0, dropout=0.0, targets=["to_q"], rslora=False, dora=False)
METHODS = {
    "lora": CONFIG,
    "rslora": replace(CONFIG, rslora=True),
    "dora": replace(CONFIG, dora=True),
}
LINEAR = ["to_q", "to_k", "to_v", "to_out.0", "proj", "net.2", "time_emb_proj", "linear_1", "linear_2"]
CONVOLUTIONS = ["conv_in", "conv_out", "conv1", "conv2", "conv_shortcut", "conv", "proj_in", "proj_out"]
TARGETS = {"linear": LINEAR, "convolutions": CONVOLUTIONS, "both": LINEAR + CONVOLUTIONS}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=TARGETS)
def config(request: pytest.FixtureRequest, method: str) -> LoraConfig:
    return replace(METHODS[method], targets=TARGETS[request.param])


def _fresh(base: Path, config: LoraConfig) -> nn.Module:
    unet = load_unet(base / "unet", "cpu")
    add_lora(unet, config, seed=1)
    return unet.eval()


def _trained(base: Path, config: LoraConfig) -> nn.Module:
    """A U-Net whose factors and norms are all away from where they start."""
    unet = _fresh(base, config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, value in trainable(unet).items():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(value * (1 + 0.1 * noise) if "magnitude" in name else 0.1 * noise)
    return unet


def _forward(unet: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    noisy = torch.randn(2, 4, 16, 16, generator=generator)
    text = torch.randn(2, TEXT_LIMIT, 32, generator=generator)
    return predict(unet, noisy, torch.tensor([3, 900]), Conditions(text))


@torch.inference_mode()
def _predict(unet: nn.Module) -> Tensor:
    return _forward(unet)


def _named(unet: nn.Module, targets: list[str]) -> set[str]:
    names = [name for name, _ in unet.named_modules()]
    return {name for name in names for target in targets if name == target or name.endswith(f".{target}")}


# At the start


def test_new_factors_change_nothing(base: Path, config: LoraConfig) -> None:
    plain = load_unet(base / "unet", "cpu")
    unet = _fresh(base, config)
    # DoRA too: m is computed as the norm that divides it, from the same bits.
    assert torch.equal(_predict(unet), _predict(plain))
    per_module = 3 if config.dora else 2
    assert len(trainable(unet)) == len(lora_state(unet)) == per_module * len(_named(plain, config.targets))
    assert {name.rsplit(".lora_", 1)[0] for name in trainable(unet)} == _named(plain, config.targets)


def test_factors_are_a_function_of_the_seed(base: Path, config: LoraConfig) -> None:
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    state = lora_state(_fresh(base, config))
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(100)
    same = lora_state(_fresh(base, config))
    assert all(torch.equal(state[name], same[name]) for name in state)
    other = load_unet(base / "unet", "cpu")
    add_lora(other, config, seed=2)
    assert not any(
        torch.equal(value, state[name]) for name, value in lora_state(other).items() if "_A" in name
    )


# In training


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointing_gives_the_same_gradients(base: Path, config: LoraConfig, dropout: float) -> None:
    unet = _trained(base, replace(config, dropout=dropout)).train()

    def gradients(checkpointing: bool) -> dict[str, Tensor]:
        set_checkpointing(unet, checkpointing)
        unet.zero_grad()
        torch.manual_seed(3)  # for dropout
        _forward(unet).square().mean().backward()
        return {name: value.grad.clone() for name, value in trainable(unet).items() if value.grad is not None}

    with_, without = gradients(True), gradients(False)
    assert list(with_) == list(trainable(unet))
    assert all(torch.equal(with_[name], without[name]) and without[name].any() for name in without)


def test_dropout_acts_in_training_alone(base: Path, config: LoraConfig) -> None:
    unet, dropping = _trained(base, config), _trained(base, replace(config, dropout=0.5))
    assert torch.equal(_predict(dropping), _predict(unet))
    dropping.train()
    assert not torch.equal(_predict(dropping), _predict(unet))


def test_the_state_can_be_put_back(base: Path, config: LoraConfig) -> None:
    unet, other = _trained(base, config), _fresh(base, config)
    set_lora_state(other, lora_state(unet))
    assert torch.equal(_predict(other), _predict(unet))


# Through files


@pytest.mark.filterwarnings(
    "error::RuntimeWarning"
)  # peft's, about modules of the file that it does not find
def test_a_file_gives_the_same_output_to_every_reader(base: Path, tmp_path: Path, config: LoraConfig) -> None:
    unet = _trained(base, config)
    wanted, state = _predict(unet), lora_state(unet)
    assert not torch.allclose(wanted, _predict(load_unet(base / "unet", "cpu")), atol=1e-2)
    save_lora(unet, tmp_path)

    bare = load_unet(base / "unet", "cpu")
    load_lora(bare, tmp_path)
    by_pipeline = load_with_lora(base, tmp_path)
    for loaded in (bare, by_pipeline, load_trained_unet(base, tmp_path, "cpu")):
        assert torch.equal(_predict(loaded), wanted)
        found = get_peft_model_state_dict(loaded, adapter_name="default_0")
        assert sorted(found) == sorted(state)  # none missing, none unexpected
        assert all(torch.equal(found[name], state[name]) for name in state)

    merged = load_plain_unet(base, tmp_path, "cpu")
    assert sorted(merged.state_dict()) == sorted(load_unet(base / "unet", "cpu").state_dict())
    # Measured: 2.5e-6 of outputs around 1.
    assert float((_predict(merged) - wanted).abs().max()) < 1e-5


def test_dropout_does_not_follow_into_the_pipeline(base: Path, tmp_path: Path, config: LoraConfig) -> None:
    unet = _trained(base, replace(config, dropout=0.5))
    save_lora(unet, tmp_path)
    pipeline: Any = StableDiffusionPipeline.from_pretrained(base, dtype=torch.float32, local_files_only=True)
    pipeline.load_lora_weights(tmp_path)
    # Without eval(), as its user draws.
    assert torch.equal(_predict(pipeline.unet), _predict(unet))


def test_file_holds_settings_and_no_path(base: Path, tmp_path: Path, config: LoraConfig) -> None:
    path = save_lora(_trained(base, replace(config, dropout=0.5)), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [WEIGHTS_NAME]
    assert not [text for text in (tmp_path, base) if str(text).encode() in path.read_bytes()]
    with safe_open(path, framework="pt") as handle:
        metadata = handle.metadata()
        keys = list(handle.keys())
    assert sorted(metadata) == ["format", "lora_adapter_metadata"]
    settings = json.loads(metadata["lora_adapter_metadata"])
    # What is not in this list is peft's default, without anything of this machine or of this day.
    assert {name: value for name, value in settings.items() if value} == {
        "unet.bias": "none",
        "unet.init_lora_weights": True,
        "unet.lora_alpha": 3.0,
        "unet.megatron_core": "megatron.core",
        "unet.peft_type": "LORA",
        "unet.peft_version": settings["unet.peft_version"],
        "unet.qalora_group_size": 16,
        "unet.r": 4,
        "unet.target_modules": sorted(config.targets),
        **({"unet.use_dora": True} if config.dora else {}),
        **({"unet.use_rslora": True} if config.rslora else {}),
    }
    # One form of keys: diffusers takes a file whose first key is in peft's form to be in it as a whole.
    assert not [key for key in keys if ".lora_A." in key or ".lora_B." in key]


_SCRIPT = """
import sys
from pathlib import Path
from tests.unit.core.test_lora import MANY, _trained
from stages.core.models.lora import save_lora
save_lora(_trained(Path(sys.argv[1]), MANY), Path(sys.argv[2]))
"""
# From 20 targets on peft puts a smaller set in their place.
MANY = replace(
    METHODS["dora"], targets=[*TARGETS["both"], "attn1.to_q", "attn2.to_q", "attn1.to_k", "attn2.to_k"]
)


def test_two_processes_write_the_same_bytes(base: Path, tmp_path: Path) -> None:
    first = save_lora(_trained(base, MANY), tmp_path / "a")
    assert save_lora(_trained(base, MANY), tmp_path / "b").read_bytes() == first.read_bytes()
    subprocess.run(
        [sys.executable, "-c", _SCRIPT, base, tmp_path / "c"],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        check=True,
    )
    assert (tmp_path / "c" / WEIGHTS_NAME).read_bytes() == first.read_bytes()


# By hand

# Shapes [out, in]: with a bias; [out, in, k, k]: kernel 3; kernel 3 and stride 2; kernel 1.
LAYERS = {
    "mid_block.attentions.0.transformer_blocks.0.attn1.to_out.0": (32, 32),
    "mid_block.resnets.0.conv1": (32, 32, 3, 3),
    "down_blocks.0.downsamplers.0.conv": (16, 16, 3, 3),
    "mid_block.attentions.0.proj_in": (32, 32, 1, 1),
}
SCALES = {"lora": 3 / 4, "rslora": 3 / 2, "dora": 3 / 4}  # alpha 3, rank 4


def _changed(weight: Tensor, state: dict[str, Tensor], name: str, scale: float) -> Tensor:
    """The formulas in the module's docstring, in float64."""
    first, second = (state[f"{name}.lora_{letter}.weight"].double() for letter in "AB")
    product = second.flatten(1) @ first.flatten(1)  # a convolution's B has kernel 1
    changed = weight.double() + scale * product.reshape(weight.shape)
    if (norms := state.get(f"{name}.lora_magnitude_vector")) is None:
        return changed
    rows = changed.flatten(1)
    return (norms.double().view(-1, 1) * rows / rows.square().sum(1, keepdim=True).sqrt()).view(weight.shape)


@pytest.mark.parametrize("name", LAYERS)
def test_one_layer_by_hand(base: Path, method: str, name: str) -> None:
    layer: Any = load_unet(base / "unet", "cpu").requires_grad_(False).get_submodule(name)
    unet = _trained(base, replace(METHODS[method], targets=[name]))
    state = lora_state(unet)
    assert layer.weight.shape == LAYERS[name]
    assert layer.bias is not None
    wanted = _changed(layer.weight, state, name, SCALES[method])

    generator = torch.Generator().manual_seed(6)
    width = LAYERS[name][1]
    linear = layer.weight.ndim == 2
    inputs = torch.randn(2, 8, width, generator=generator) if linear else None
    call: Callable[..., Tensor] = functional.linear
    if inputs is None:
        inputs = torch.randn(2, width, 8, 8, generator=generator)
        call = functional.conv2d
    options = {} if linear else {"stride": layer.stride, "padding": layer.padding}
    expected = call(inputs.double(), wanted, layer.bias.double(), **options)
    with torch.inference_mode():
        attached = unet.get_submodule(name)(inputs)
    torch.testing.assert_close(attached.double(), expected, atol=1e-5, rtol=0)

    merge_lora(unet)
    merged: Any = unet.get_submodule(name)
    torch.testing.assert_close(merged.weight.double(), wanted, atol=1e-6, rtol=0)
    assert torch.equal(merged.bias, layer.bias)
    # The other methods' weights are another thing altogether.
    for other in {3 / 4, 3 / 2} - {SCALES[method]}:
        assert float((_changed(layer.weight, state, name, other) - wanted).abs().max()) > 1e-2


def test_norms_start_as_those_of_the_weights(base: Path) -> None:
    plain = load_unet(base / "unet", "cpu")
    state = lora_state(_fresh(base, replace(METHODS["dora"], targets=list(LAYERS))))
    for name, shape in LAYERS.items():
        norms = state[f"{name}.lora_magnitude_vector"]
        assert norms.shape == ((shape[0],) if len(shape) == 2 else (1, shape[0], 1, 1))
        weight: Any = plain.get_submodule(name).weight
        torch.testing.assert_close(norms.flatten(), weight.flatten(1).norm(dim=1), atol=1e-6, rtol=0)


def test_rslora_and_dora_together(base: Path, tmp_path: Path) -> None:
    name = "mid_block.resnets.0.conv1"
    unet = _trained(base, replace(CONFIG, rslora=True, dora=True, targets=[name]))
    save_lora(unet, tmp_path)
    assert torch.equal(_predict(load_with_lora(base, tmp_path)), _predict(unet))
    layer: Any = load_unet(base / "unet", "cpu").requires_grad_(False).get_submodule(name)
    wanted = _changed(layer.weight, lora_state(unet), name, 3 / 2)
    merge_lora(unet)
    merged: Any = unet.get_submodule(name)
    torch.testing.assert_close(merged.weight.double(), wanted, atol=1e-6, rtol=0)


# What cannot work


def test_usable_settings_have_no_problems() -> None:
    assert check_lora(CONFIG) == []
    assert check_lora(replace(CONFIG, rank=1, alpha=0.5, dropout=0.99, rslora=True, dora=True)) == []


def test_all_problems_are_told_at_once() -> None:
    assert check_lora(replace(CONFIG, rank=0, alpha=0, dropout=1, targets=[])) == [
        "train.lora.rank is 0; set it to 1 or more",
        "train.lora.alpha is 0; set it above 0",
        "train.lora.dropout is 1; set it to 0 up to below 1",
        "train.lora.targets is empty; usual targets are to_q, to_k, to_v, to_out.0",
    ]
    assert check_lora(replace(CONFIG, alpha=float("nan"), dropout=-0.1)) == [
        "train.lora.alpha is nan; set it above 0",
        "train.lora.dropout is -0.1; set it to 0 up to below 1",
    ]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("to_x", r"train\.lora\.targets holds 'to_x', which no module of the U-Net is called"),
        (
            "conv_norm_out",
            r"holds 'conv_norm_out', but module conv_norm_out \(GroupNorm\) is neither a linear",
        ),
        ("norm1", r"holds 'norm1', but module down_blocks\.0\.resnets\.0\.norm1 \(GroupNorm\) is neither"),
        ("norm3", r"holds 'norm3', but module down_blocks\.1\.\S+\.norm3 \(LayerNorm\) is neither"),
        (
            "to_out",
            r"holds 'to_out', but module down_blocks\.1\.\S+\.attn1\.to_out \(ModuleList\) is neither",
        ),
        ("attn2", r"holds 'attn2', but module \S+\.attn2 \(Attention\) is neither a linear layer nor a conv"),
        ("0", r"holds '0', but module down_blocks\.0 \(DownBlock2D\) is neither"),
        ("", r"holds '', but the U-Net \(UNet2DConditionModel\) is neither"),
    ],
)
def test_targets_without_factors_are_named(base: Path, target: str, message: str) -> None:
    unet = load_unet(base / "unet", "cpu")
    with pytest.raises(BaseModelError, match=message):
        add_lora(unet, replace(CONFIG, targets=["to_q", target]), seed=1)
    assert not [name for name in unet.state_dict() if "lora" in name]
    assert all(value.requires_grad for value in unet.parameters())


def test_dora_refuses_to_divide_by_zero(base: Path) -> None:
    unet: Any = load_unet(base / "unet", "cpu")
    with torch.no_grad():
        unet.conv_out.weight[1] = 0
    config = replace(METHODS["dora"], targets=["to_q", "conv_out"])
    with pytest.raises(
        BaseModelError, match=r"train\.lora\.dora .* module conv_out has an output whose weights"
    ) as caught:
        add_lora(unet, config, seed=1)
    assert (
        caught.value.remedy == "leave 'conv_out' out of train.lora.targets, or set train.lora.dora to false"
    )
    add_lora(unet, replace(config, dora=False), seed=1)
