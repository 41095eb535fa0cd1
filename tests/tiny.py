"""A Stable Diffusion small enough for tests: random weights, a real folder, the same bytes each time."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    EulerDiscreteScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from safetensors.torch import load_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from stages.core.record import describe
from stages.core.safetensors_io import canonicalise, save_file
from stages.core.store import write_json

# Whole words for the tokenizer; everything else falls apart into bytes (one token each).
_WORDS = """
a an the of on in and with red green blue yellow white black small large circle square triangle face smiling
grinning eyes picture photo background plain style table ball
"""
TEXT_LIMIT = 32  # tokens, begin and end marks included
PICTURE_SIZE = 64
DOWNSAMPLE = 4
_START, _END = "<|startoftext|>", "<|endoftext|>"


def make_tiny_base(
    folder: Path, seed: int = 0, *, prediction: str = "v_prediction", zero_snr: bool = True
) -> Path:
    """Write a random StableDiffusionPipeline folder (about 1 MB) and return `folder`.

    The family of the embedded base: VAE with 4 channels and factor 4, CLIP text tower with 32 positions, U-Net
    with cross-attention on its lower level, DDIM scheduler. Equal seeds give equal bytes.
    """
    tokenizer = _tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline: Any = StableDiffusionPipeline(
            vae=_vae(),
            text_encoder=_text_encoder(len(tokenizer)),
            tokenizer=tokenizer,
            unet=_unet(),
            scheduler=DDIMScheduler(
                beta_start=0.00085,
                beta_end=0.012,
                beta_schedule="scaled_linear",
                clip_sample=False,
                set_alpha_to_one=False,
                steps_offset=1,
                prediction_type=prediction,
                rescale_betas_zero_snr=zero_snr,
                timestep_spacing="trailing" if zero_snr else "leading",
            ),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    pipeline.save_pretrained(folder, safe_serialization=True)
    for path in folder.rglob("*.safetensors"):
        canonicalise(path)
    return folder


XL_WIDTH, XL_POOLED = 32 + 48, 24


def make_tiny_xl(folder: Path, seed: int = 0) -> Path:
    """Write a random StableDiffusionXLPipeline folder and return `folder`: two text encoders, of width 32 and 48."""
    tokenizer = _tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline: Any = StableDiffusionXLPipeline(
            vae=_vae(),
            text_encoder=_text_encoder(len(tokenizer)),
            text_encoder_2=CLIPTextModelWithProjection(
                _text_config(len(tokenizer), hidden_size=48, projection_dim=XL_POOLED)
            ),
            tokenizer=tokenizer,
            tokenizer_2=_tokenizer(),
            unet=_unet(
                cross_attention_dim=XL_WIDTH,
                addition_embed_type="text_time",
                addition_time_embed_dim=8,
                projection_class_embeddings_input_dim=6 * 8 + XL_POOLED,
            ),
            scheduler=EulerDiscreteScheduler(),
        )
    pipeline.save_pretrained(folder, safe_serialization=True)
    for path in folder.rglob("*.safetensors"):
        canonicalise(path)
    return folder


def scale_output(folder: Path, factor: float) -> None:
    """Multiply the last convolution of the U-Net saved in `folder` by `factor`: a plainly different model."""
    path = folder / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    weights["conv_out.weight"] *= factor
    save_file(path, weights, {"format": "pt"})


def write_record(base: Path, root: Path) -> Path:
    """Write `data/base/record.json` under `root` for the diffusers folder `base` (inside `root`)."""
    path = root / "data" / "base" / "record.json"
    record = describe(base, {"kind": "folder", "path": base.relative_to(root).as_posix()})
    write_json(path, record.to_json())
    return path


def _tokenizer() -> Any:
    letters = list(bytes_to_unicode().values())
    merges: list[tuple[str, str]] = []
    for word in _WORDS.split():
        parts = [*word[:-1], f"{word[-1]}</w>"]
        while len(parts) > 1:
            if (parts[0], parts[1]) not in merges:
                merges.append((parts[0], parts[1]))
            parts = [parts[0] + parts[1], *parts[2:]]
    vocabulary = [*letters, *(f"{letter}</w>" for letter in letters)]
    vocabulary += dict.fromkeys(first + second for first, second in merges)
    vocabulary += [_START, _END]
    return CLIPTokenizer(
        # transformers 5 silently builds a 2-token vocabulary from vocab_file= and merges_file=.
        vocab={token: number for number, token in enumerate(vocabulary)},
        merges=merges,
        bos_token=_START,
        eos_token=_END,
        unk_token=_END,
        pad_token=_END,
        model_max_length=TEXT_LIMIT,
    )


def _text_encoder(vocabulary: int) -> Any:
    return CLIPTextModel(_text_config(vocabulary, hidden_size=32, projection_dim=32))


def _text_config(vocabulary: int, **sizes: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=vocabulary,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TEXT_LIMIT,
        bos_token_id=vocabulary - 2,
        eos_token_id=vocabulary - 1,
        pad_token_id=vocabulary - 1,
        **sizes,
    )


def _vae() -> Any:
    return AutoencoderKL(
        block_out_channels=(8, 8, 16),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        sample_size=PICTURE_SIZE,
        scaling_factor=0.6,
    )


def _unet(cross_attention_dim: int = 32, **fields: Any) -> Any:
    return UNet2DConditionModel(
        sample_size=PICTURE_SIZE // DOWNSAMPLE,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=cross_attention_dim,
        attention_head_dim=4,
        **fields,
    )


def read_model_index(folder: Path) -> dict[str, Any]:
    """`model_index.json` of a diffusers folder."""
    return json.loads((folder / "model_index.json").read_text())
