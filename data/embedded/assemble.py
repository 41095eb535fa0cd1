"""Put the trained parts together: scheduler, model_index.json, and the sample sheet that the README shows."""

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image, ImageDraw
from transformers import CLIPModel, CLIPTextModel, CLIPTokenizer

from data.embedded import common
from stages.core.store import sha256_file, write_atomic, write_json

SCHEDULER = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "set_alpha_to_one": True,
    "steps_offset": 1,
    "prediction_type": "v_prediction",
    "timestep_spacing": "trailing",
    "rescale_betas_zero_snr": True,
}
_LIMIT = 12_000_000  # bytes of tiny-sd in all
PROMPTS = (
    "a red ball on a plain white background",
    "a big yellow star on a blue table",
    "a green tree on orange stripes",
    "a purple heart on yellow checks",
    "a small black cross on a pink table, on the left",
    "a magenta ring on a plain green background, at the top",
    "a teal house on a brown table, on the right",
    "a red triangle and a blue square on a plain yellow background",
    "an orange moon on purple stripes",
    "a big pink flower on black checks",
    "a brown diamond on a plain teal background",
    "a yellow ball and a green cross on a grey table",
)


def pipeline(unet: UNet2DConditionModel) -> StableDiffusionPipeline:
    """The pipeline around `unet`, in float32, from the parts in data/embedded/tiny-sd."""
    pipe = StableDiffusionPipeline(
        vae=AutoencoderKL.from_pretrained(common.SD / "vae", dtype=torch.float32),
        text_encoder=CLIPTextModel.from_pretrained(common.SD / "text_encoder", dtype=torch.float32),
        tokenizer=CLIPTokenizer.from_pretrained(common.SD / "tokenizer"),
        unet=unet,
        scheduler=DDIMScheduler.from_config(SCHEDULER),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def sheet_of(pipe: StableDiffusionPipeline, path: Path, repeats: int = 2) -> None:
    """Draw every prompt `repeats` times, each with a noise of its own, and save one PNG, captions below."""
    drawn = [picture for repeat in range(repeats) for picture in common.draw(pipe, PROMPTS, 1000 * repeat)]
    columns, cell, line = 4, 128, 26
    rows = -(-len(PROMPTS) // columns)
    sheet = Image.new("RGB", (columns * (cell * repeats + 8), rows * (cell + line)), "white")
    pen = ImageDraw.Draw(sheet)
    for index, prompt in enumerate(PROMPTS):
        x, y = (index % columns) * (cell * repeats + 8), (index // columns) * (cell + line)
        for repeat in range(repeats):
            picture = drawn[repeat * len(PROMPTS) + index].resize((cell, cell), Image.Resampling.NEAREST)
            sheet.paste(picture, (x + repeat * cell, y))
        cut = prompt.find(" on ") if len(prompt) > 40 else len(prompt)
        pen.text((x + 2, y + cell), f"{prompt[:cut]}\n{prompt[cut + 1 :]}", "black", spacing=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.quantize(128).save(path, optimize=True)


def write_pipeline_files(folder: Path) -> None:
    """Write scheduler/scheduler_config.json and model_index.json."""
    DDIMScheduler.from_config(SCHEDULER).save_pretrained(folder / "scheduler")
    common.scrub(folder / "scheduler" / "scheduler_config.json")
    version = json.loads((folder / "unet" / "config.json").read_text())["_diffusers_version"]
    index = {
        "_class_name": "StableDiffusionPipeline",
        "_diffusers_version": version,
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
        "requires_safety_checker": False,
        "safety_checker": [None, None],
        "scheduler": ["diffusers", "DDIMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    write_json(folder / "model_index.json", index)


def main() -> None:
    """Finish data/embedded/tiny-sd; draw samples.png; write figures.json (losses, dB, retrieval, sizes, digests)."""
    # Here, because train_unet draws its sheets by this module and shall not depend on `follow`.
    from data.embedded import follow

    common.start()
    write_pipeline_files(common.SD)
    pipe = pipeline(UNet2DConditionModel.from_pretrained(common.SD / "unet", dtype=torch.float32))
    sheet_of(pipe, common.HERE / "samples.png")
    figures = {
        name: json.loads((common.WORK / f"{name}.json").read_text()) for name in ("vae", "clip", "unet")
    }
    clip = CLIPModel.from_pretrained(common.CLIP, dtype=torch.float32)
    figures["follows"] = follow.shares(pipe, clip, pipe.tokenizer)
    print(figures["follows"])
    files = [
        path for folder in (common.SD, common.CLIP) for path in sorted(folder.rglob("*")) if path.is_file()
    ]
    figures["files"] = {
        str(path.relative_to(common.HERE)): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in files
    }
    total = sum(path.stat().st_size for path in common.SD.rglob("*") if path.is_file())
    print(f"tiny-sd has {total:,} bytes")
    assert total <= _LIMIT, "tiny-sd is too large for the repository"
    text = json.dumps(figures, indent=1, sort_keys=True) + "\n"
    write_atomic(common.HERE / "figures.json", text.encode())


if __name__ == "__main__":
    main()
