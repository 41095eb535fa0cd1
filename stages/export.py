"""export: the trained model in the forms that others load, each compared with what was trained.

Reads   data/base/record.json and the base's folder, data/train/weights/, data/encode/index.json (its sha256 alone)
Writes  data/export/pipeline/      StableDiffusionPipeline folder; LoRA factors are merged into its U-Net
        data/export/lora/          pytorch_lora_weights.safetensors, as trained (method lora alone), with the
                                   scheduler_config.json that it needs where it was trained for another than the base's
        data/export/onnx/          text_encoder, unet, vae_decoder, vae_encoder: float32, free batch and size
        data/export/parity.json    what was compared, at which shapes and limits
        data/export/provenance.json  digests of what went in
        data/export/SHA256SUMS     of all files above; written last, so a folder without it is unfinished

Everything runs on the CPU, also where training used a GPU: the files then do not depend on the machine's GPU.
"""

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stages.core import determinism, parity
from stages.core.errors import ConfigError
from stages.core.models import folder as diffusers_folder
from stages.core.models import onnx
from stages.core.models.lora import WEIGHTS_NAME
from stages.core.models.pipeline import Painter
from stages.core.models.schedule import CONFIG_NAME, NoiseSchedule
from stages.core.models.text import TextEncoder
from stages.core.models.trained import is_lora, load_plain_unet, load_trained_unet, trained_schedule
from stages.core.models.vae import Vae
from stages.core.parity import Check, Outputs, Probe
from stages.core.psnr import psnr
from stages.core.record import COMPONENTS, read_record, verified_folder
from stages.core.store import file_digests, sha256_file, write_json
from stages.core.sums import SUMS_NAME, write_sums
from stages.harness.run import Stage, stage_main

# The pictures that trained and exported pipeline both draw: few steps, because each can only add to the difference.
CAPTIONS = ["a picture of a small red ball on a blue table", ""]
STEPS = 4
GUIDANCE = 4.0

_DTYPES = {"float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Section `export` of params.yaml."""

    dtype: str  # of the pipeline folder's weights: float16 | float32; ONNX and LoRA are float32
    onnx: bool  # whether to write onnx/
    opset: int  # ONNX operator set, 14 to 20
    tolerance_float32: float  # largest error of a float32 artefact, relative to the largest output
    tolerance_float16: float  # the same for float16 weights
    psnr_minimum: float  # dB between pictures of the exported and of the trained pipeline


def export(cfg: ExportConfig, stage: Stage) -> None:
    """Write the artefacts, read each back, compare it with the trained model, and seal the folder."""
    check(cfg)
    record = read_record(stage.folder("base") / "record.json")
    base = verified_folder(record, stage.root, *COMPONENTS)
    weights = stage.folder("train") / "weights"
    method = "lora" if is_lora(weights) else "full"
    inputs = file_digests(weights)
    latents = sha256_file(stage.folder("encode") / "index.json")
    print_ = stage.fingerprint(
        base=record.digest, weights=inputs, latents=latents, config=cfg, seed=stage.shared.seed
    )
    with stage.store.lock("export", print_):
        trained = Trained(base, weights, stage.shared.seed)
        start_over(stage.out)
        written = write(cfg, stage, base, weights, trained)
        checks = compare_files(cfg, stage, base, trained, written)
        parity.require(checks)
        decibels = compare_pictures(stage, base, trained)
        parity.require_psnr(decibels, cfg.psnr_minimum)
        stage.say(parity.summary(checks, decibels))
        errors = {f"export/error/{name}": value for name, value in parity.measured(checks).items()}
        stage.tracker.metrics({**errors, "export/psnr": decibels})
        write_json(stage.out / "parity.json", parity_facts(cfg, checks, trained.size, stage.shared.seed))
        write_json(
            stage.out / "provenance.json",
            {
                "base": record.digest,
                "components": {name: record.components[name]["digest"] for name in COMPONENTS},
                "method": method,
                "weights": inputs,
                "encode": latents,
                "export": dataclasses.asdict(cfg),
            },
        )
        write_sums(stage.out)


def check(cfg: ExportConfig) -> None:
    """Raise one ConfigError that lists all settings that cannot work."""
    problems: list[str] = []
    if cfg.dtype not in _DTYPES:
        problems.append(f"export.dtype is {cfg.dtype!r}; set float16 or float32")
    if cfg.opset not in onnx.OPSETS:
        problems.append(f"export.opset is {cfg.opset}; set {onnx.OPSETS[0]} to {onnx.OPSETS[-1]}")
    for name in ("tolerance_float32", "tolerance_float16", "psnr_minimum"):
        if not getattr(cfg, name) > 0:
            problems.append(f"export.{name} is {getattr(cfg, name)}; set it above 0")
    if problems:
        raise ConfigError("\n  ".join(problems), remedy="correct section export of params.yaml")


class Trained:
    """The trained model in torch, LoRA factors attached and not merged: what all artefacts are held to."""

    def __init__(self, base: Path, weights: Path, seed: int) -> None:
        self.text = TextEncoder(base, "cpu")
        self.vae = Vae(base, "cpu")
        self.unet = load_trained_unet(base, weights, "cpu")
        self.schedule = trained_schedule(base, weights)
        timesteps = NoiseSchedule(self.schedule, "cpu").steps
        shape = diffusers_folder.model_shape(self.unet, self.vae, self.text, timesteps)
        self.probes: list[Probe] = parity.make_probes(shape, seed)
        self.outputs: list[Outputs] = [
            diffusers_folder.run_torch(probe, text=self.text.model, unet=self.unet, vae=self.vae.model)
            for probe in self.probes
        ]
        pixels = self.probes[0].pixels_BCHW.shape
        self.size = (pixels[2], pixels[3])


def start_over(out: Path) -> None:
    """Empty the folder; its checksums go first, so that a crash here leaves nothing that looks finished."""
    (out / SUMS_NAME).unlink(missing_ok=True)
    if out.is_dir():
        shutil.rmtree(out)
    out.mkdir(parents=True)


def write(cfg: ExportConfig, stage: Stage, base: Path, weights: Path, trained: Trained) -> list[str]:
    """Write all artefacts; returns the names of their folders."""
    written = ["pipeline"]
    unet = load_plain_unet(base, weights, "cpu")
    stage.say(f"pipeline in {cfg.dtype}")
    diffusers_folder.write_pipeline(stage.out / "pipeline", base, unet, trained.schedule, _DTYPES[cfg.dtype])
    if is_lora(weights):
        written.append("lora")
        (stage.out / "lora").mkdir()
        shutil.copyfile(weights / WEIGHTS_NAME, stage.out / "lora" / WEIGHTS_NAME)
        if (weights / CONFIG_NAME).is_file():
            # The pipeline's: it names a class that reads all of its fields, which the base's need not.
            own = stage.out / "pipeline" / "scheduler" / CONFIG_NAME
            shutil.copyfile(own, stage.out / "lora" / CONFIG_NAME)
    if cfg.onnx:
        written.append("onnx")
        text, vae = TextEncoder(base, "cpu").model, Vae(base, "cpu").model
        models = {"text_encoder": text, "unet": unet, "vae_decoder": vae, "vae_encoder": vae}
        onnx.write_support(stage.out / "onnx", base, trained.schedule)
        for name in stage.progress(onnx.PARTS, total=len(onnx.PARTS), what="onnx", unit="parts"):
            onnx.write_part(name, models[name], stage.out / "onnx", trained.probes[1], opset=cfg.opset)
    return written


def compare_files(
    cfg: ExportConfig, stage: Stage, base: Path, trained: Trained, written: list[str]
) -> list[Check]:
    """Load every artefact as its user would, and compare its parts with the trained model's at all probes."""
    limits = {"float32": cfg.tolerance_float32, "float16": cfg.tolerance_float16}
    pipeline: Any = diffusers_folder.load_pipeline(stage.out / "pipeline")
    outputs = [
        diffusers_folder.run_torch(probe, text=pipeline.text_encoder, unet=pipeline.unet, vae=pipeline.vae)
        for probe in trained.probes
    ]
    checks = parity.compare_all("pipeline", outputs, trained.outputs, limits[cfg.dtype])
    if "lora" in written:
        unet = diffusers_folder.load_with_lora(base, stage.out / "lora")
        outputs = [diffusers_folder.run_unet(probe, unet) for probe in trained.probes]
        checks += parity.compare_all("lora", outputs, trained.outputs, cfg.tolerance_float32)
    if "onnx" in written:
        model = onnx.OnnxModel(stage.out / "onnx")
        outputs = [model.run(probe) for probe in trained.probes]
        checks += parity.compare_all("onnx", outputs, trained.outputs, cfg.tolerance_float32)
    return checks


def compare_pictures(stage: Stage, base: Path, trained: Trained) -> float:
    """PSNR in dB between pictures of the trained and of the exported pipeline, the worse of two."""
    seeds = [stage.shared.seed, stage.shared.seed + 1]
    painter = Painter(
        base,
        unet=trained.unet,
        vae=trained.vae,
        text=trained.text,
        device="cpu",
        schedule=trained.schedule,
    )
    expected = painter.paint(CAPTIONS, seeds, size=trained.size, steps=STEPS, guidance=GUIDANCE, batch=2)
    got = diffusers_folder.draw(
        stage.out / "pipeline", CAPTIONS, seeds, size=trained.size, steps=STEPS, guidance=GUIDANCE
    )
    return psnr(got, expected)


def parity_facts(cfg: ExportConfig, checks: list[Check], size: tuple[int, int], seed: int) -> dict[str, Any]:
    """What `parity.json` holds: the same on every machine, so no measured error."""
    return {
        "artefacts": parity.facts(checks),
        "pictures": {
            "captions": CAPTIONS,
            "seeds": [seed, seed + 1],
            "size": list(size),
            "steps": STEPS,
            "guidance": GUIDANCE,
            "psnr_minimum": cfg.psnr_minimum,
            "passed": True,
        },
    }


if __name__ == "__main__":
    stage_main("export", ExportConfig, export, fix=determinism.apply)
