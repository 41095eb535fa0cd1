"""Export: what users load is what was trained, and nothing half-done or wrong looks finished."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionPipeline,
)
from safetensors.torch import load_file

from stages import export as stage_export
from stages.core.determinism import DeterminismConfig
from stages.core.errors import BaseModelError, ConfigError, LockedError, ParityError, StoreError
from stages.core.models import folder as diffusers_folder
from stages.core.models import onnx as onnx_files
from stages.core.models.lora import LoraConfig, add_lora, save_lora
from stages.core.models.schedule import NoiseSchedule, base_schedule, objective_schedule
from stages.core.models.trained import load_trained_unet
from stages.core.models.unet import Conditions, load_unet, predict, save_unet, trainable
from stages.core.safetensors_io import save_file
from stages.core.store import Store, sha256_file, write_json
from stages.core.sums import verify_sums
from stages.export import ExportConfig, Trained, compare_files, export
from stages.harness.config import SharedConfig
from stages.harness.run import Stage
from tests.tiny import make_tiny_base, read_model_index, scale_output, write_record

CONFIG = ExportConfig(
    dtype="float32",
    onnx=True,
    opset=17,
    tolerance_float32=1e-4,
    tolerance_float16=1e-2,
    psnr_minimum=30.0,
)


class _Tracker:
    def __init__(self) -> None:
        self.seen: dict[str, float] = {}

    def metrics(self, values: dict[str, float]) -> None:
        self.seen |= values


def make_stage(root: Path) -> Stage:
    shared = SharedConfig(
        seed=7, device="cpu", runtime="native", determinism=DeterminismConfig(mode="native", threads=1)
    )
    tracker: Any = _Tracker()
    return Stage(name="export", root=root, shared=shared, store=Store(root / "store"), tracker=tracker)


def _lora(rank: int, *targets: str) -> LoraConfig:
    return LoraConfig(rank=rank, alpha=2.0, dropout=0.0, targets=list(targets), rslora=False, dora=False)


def make_inputs(root: Path, method: str) -> Stage:
    """A base and trained weights under `root`, both plainly different from untrained."""
    base = make_tiny_base(root / "base")
    write_record(base, root)
    (root / "data" / "encode").mkdir()
    (root / "data" / "encode" / "index.json").write_text("{}\n")
    unet = load_unet(base / "unet", "cpu")
    generator = torch.Generator().manual_seed(1)
    if method == "lora":
        add_lora(unet, _lora(4, "to_q", "to_k", "to_v", "to_out.0"), seed=1)
    with torch.no_grad():
        for parameter in trainable(unet).values():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    weights = root / "data" / "train" / "weights"
    if method == "lora":
        save_lora(unet, weights)
    else:
        save_unet(unet, weights, torch.float32)
    return make_stage(root)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """A finished export of LoRA factors in float32."""
    stage = make_inputs(tmp_path_factory.mktemp("lora"), "lora")
    export(CONFIG, stage)
    return stage


@pytest.fixture
def fresh(tmp_path: Path) -> Stage:
    """Inputs of a full fine-tune, nothing exported."""
    return make_inputs(tmp_path, "full")


QUICK = dataclasses.replace(CONFIG, onnx=False)


def _prediction(unet: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    noisy, text = torch.randn(2, 4, 16, 16, generator=generator), torch.randn(2, 32, 32, generator=generator)
    with torch.inference_mode():
        return predict(unet, noisy, torch.tensor([10, 800]), Conditions(text))


def _trained(stage: Stage) -> torch.Tensor:
    return _prediction(load_trained_unet(stage.root / "base", stage.folder("train") / "weights", "cpu"))


def test_files(done: Stage) -> None:
    found = {path.relative_to(done.out).as_posix() for path in done.out.rglob("*") if path.is_file()}
    shared = {
        "model_index.json",
        "scheduler/scheduler_config.json",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
    }
    pipeline = {
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
    }
    graphs = {f"{part}/{name}" for part in onnx_files.PARTS for name in ("config.json", "model.onnx")}
    assert found == {
        *(f"pipeline/{name}" for name in shared | pipeline),
        *(f"onnx/{name}" for name in shared | graphs),
        "lora/pytorch_lora_weights.safetensors",
        "parity.json",
        "provenance.json",
        "SHA256SUMS",
    }


def test_sums_hold_every_file(done: Stage) -> None:
    subprocess.run(["sha256sum", "-c", "--quiet", "--strict", "SHA256SUMS"], cwd=done.out, check=True)
    assert verify_sums(done.out) == 25


def test_no_path_is_in_any_file(done: Stage) -> None:
    for path in done.out.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert str(done.root).encode() not in data, path
            assert b'_name_or_path": "' not in data, path


def test_pipeline_is_the_trained_model(done: Stage) -> None:
    pipeline: Any = StableDiffusionPipeline.from_pretrained(done.out / "pipeline", local_files_only=True)
    assert {pipeline.unet.dtype, pipeline.vae.dtype, pipeline.text_encoder.dtype} == {torch.float32}
    torch.testing.assert_close(_prediction(pipeline.unet), _trained(done), atol=1e-5, rtol=0)
    model: Any = type(pipeline.unet)
    _, info = model.from_pretrained(done.out / "pipeline" / "unet", output_loading_info=True)
    assert (info["missing_keys"], info["unexpected_keys"]) == ([], [])
    for name in ("tokenizer/tokenizer.json", "scheduler/scheduler_config.json"):
        assert (done.out / "pipeline" / name).read_bytes() == (done.root / "base" / name).read_bytes()


def test_lora_loads_on_the_base_without_a_word_about_the_unet(
    done: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline: Any = StableDiffusionPipeline.from_pretrained(done.root / "base", local_files_only=True)
    before = _prediction(pipeline.unet)
    with caplog.at_level("WARNING"):
        pipeline.load_lora_weights(done.out / "lora")
    assert "UNet" not in caplog.text
    assert torch.equal(_prediction(pipeline.unet), _trained(done))
    assert not torch.allclose(before, _trained(done), atol=1e-3)


def test_parity_file_holds_facts_and_the_tracker_measurements(done: Stage) -> None:
    parity = json.loads((done.out / "parity.json").read_text())
    assert sorted(parity["artefacts"]) == [
        "lora/unet",
        "onnx/text_encoder",
        "onnx/unet",
        "onnx/vae_decoder",
        "onnx/vae_encoder",
        "pipeline/text_encoder",
        "pipeline/unet",
        "pipeline/vae_decoder",
        "pipeline/vae_encoder",
    ]
    assert parity["artefacts"]["onnx/unet"] == {
        "limit": 1e-4,
        "passed": True,
        "shapes": ["1x4x16x16", "2x4x4x6", "3x4x8x4"],
    }
    assert parity["pictures"]["psnr_minimum"] == 30.0
    seen = cast(_Tracker, done.tracker).seen
    assert 0 < seen["export/error/onnx/unet"] < 1e-5
    assert seen["export/error/lora/unet"] == 0.0
    assert seen["export/psnr"] > 50


def test_provenance(done: Stage) -> None:
    provenance = json.loads((done.out / "provenance.json").read_text())
    record = json.loads((done.folder("base") / "record.json").read_text())
    weights = done.folder("train") / "weights" / "pytorch_lora_weights.safetensors"
    assert provenance["base"] == record["digest"]
    assert provenance["method"] == "lora"
    assert provenance["weights"] == {weights.name: sha256_file(weights)}
    assert provenance["encode"] == sha256_file(done.folder("encode") / "index.json")
    assert provenance["export"] == dataclasses.asdict(CONFIG)
    assert sha256_file(done.out / "lora" / weights.name) == sha256_file(weights)


def test_half_precision(fresh: Stage) -> None:
    export(dataclasses.replace(QUICK, dtype="float16"), fresh)
    assert not (fresh.out / "lora").exists()
    assert not (fresh.out / "onnx").exists()
    trained = load_file(fresh.folder("train") / "weights" / "diffusion_pytorch_model.safetensors")
    stored = load_file(fresh.out / "pipeline" / "unet" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(stored[name], value.half()) for name, value in trained.items())
    for name in ("text_encoder", "vae"):
        (path,) = (fresh.out / "pipeline" / name).glob("*.safetensors")
        assert {value.dtype for value in load_file(path).values()} == {torch.float16}
    pipeline: Any = StableDiffusionPipeline.from_pretrained(
        fresh.out / "pipeline", dtype=torch.float16, local_files_only=True
    )
    assert {pipeline.unet.dtype, pipeline.vae.dtype, pipeline.text_encoder.dtype} == {torch.float16}
    seen = cast(_Tracker, fresh.tracker).seen
    assert 1e-5 < seen["export/error/pipeline/unet"] < 1e-2


def test_a_base_as_the_hub_holds_it(fresh: Stage) -> None:
    """Weights under a variant's name, and parts in the index that stage base never fetches."""
    base = fresh.root / "base"
    unet = load_unet(base / "unet", "cpu")
    for path in base.rglob("*.safetensors"):
        path.rename(path.with_name(path.name.replace(".safetensors", ".fp16.safetensors")))
    index = json.loads((base / "model_index.json").read_text())
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    index["feature_extractor"] = ["transformers", "CLIPImageProcessor"]
    index["requires_safety_checker"] = True
    index["_name_or_path"] = "/somewhere/else"
    (base / "model_index.json").write_text(json.dumps(index))
    write_record(base, fresh.root)
    weights = fresh.folder("train") / "weights"
    shutil.rmtree(weights)
    add_lora(unet, _lora(2, "to_q"), seed=1)
    save_lora(unet, weights)
    export(QUICK, fresh)
    assert sorted(path.name for path in (fresh.out / "pipeline" / "vae").iterdir()) == [
        "config.json",
        "diffusion_pytorch_model.safetensors",
    ]
    written = read_model_index(fresh.out / "pipeline")
    assert written["safety_checker"] == written["feature_extractor"] == [None, None]
    assert "_name_or_path" not in written


def _samplers() -> dict[str, Any]:
    """Samplers as bases have them; Stable Diffusion 1's is the PNDM."""
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
    return {
        "DDIMScheduler": DDIMScheduler(**betas, clip_sample=False),
        "EulerDiscreteScheduler": EulerDiscreteScheduler(**betas),
        "PNDMScheduler": PNDMScheduler(**betas, skip_prk_steps=True),
    }


def _with_objective(
    root: Path, method: str, sampler: str, *, prediction: str, zero_terminal_snr: bool
) -> tuple[Stage, dict[str, Any]]:
    """Inputs whose base predicts the noise and names `sampler`, trained for another objective, and its fields."""
    stage = make_inputs(root, method)
    base = root / "base"
    shutil.rmtree(base / "scheduler")
    _samplers()[sampler].save_pretrained(base / "scheduler")
    index = read_model_index(base) | {"scheduler": ["diffusers", sampler]}
    (base / "model_index.json").write_text(json.dumps(index))
    write_record(base, root)
    fields = objective_schedule(
        base_schedule(base), prediction=prediction, zero_terminal_snr=zero_terminal_snr
    )
    write_json(stage.folder("train") / "weights" / "scheduler_config.json", fields)
    return stage, fields


@pytest.mark.parametrize(
    ("sampler", "zero_terminal_snr", "written"),
    [
        ("DDIMScheduler", True, "DDIMScheduler"),
        ("EulerDiscreteScheduler", True, "EulerDiscreteScheduler"),
        ("PNDMScheduler", False, "PNDMScheduler"),
        ("PNDMScheduler", True, "DDIMScheduler"),  # PNDM has no zero-terminal betas
    ],
)
def test_another_objective_reaches_every_artefact(
    tmp_path: Path, sampler: str, zero_terminal_snr: bool, written: str
) -> None:
    stage, fields = _with_objective(
        tmp_path, "lora", sampler, prediction="v_prediction", zero_terminal_snr=zero_terminal_snr
    )
    export(QUICK, stage)

    stored = base_schedule(stage.out / "pipeline")
    assert stored["_class_name"] == written
    swapped = set() if written == sampler else {"_class_name", "clip_sample", "steps_offset"}
    assert {name for name in stored if stored[name] != fields.get(name)} <= swapped
    own = stage.folder("train") / "weights" / "scheduler_config.json"
    file = (stage.out / "pipeline" / "scheduler" / "scheduler_config.json").read_bytes()
    assert swapped or file == own.read_bytes()
    assert (stage.out / "lora" / "scheduler_config.json").read_bytes() == file
    provenance = json.loads((stage.out / "provenance.json").read_text())
    assert provenance["weights"][own.name] == sha256_file(own)
    assert verify_sums(stage.out) == 14

    pipeline: Any = StableDiffusionPipeline.from_pretrained(
        stage.out / "pipeline", dtype=torch.float32, local_files_only=True
    )
    pipeline.set_progress_bar_config(disable=True)
    assert type(pipeline.scheduler).__name__ == written
    assert pipeline.scheduler.config.prediction_type == "v_prediction"
    alphas = NoiseSchedule(fields, "cpu").alphas_cumprod
    # Euler stores 2^-24 in place of the last 0.
    torch.testing.assert_close(pipeline.scheduler.alphas_cumprod, alphas, atol=1e-7, rtol=0)
    latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(2))

    def drawn() -> Any:
        return pipeline("a ball", latents=latents, num_inference_steps=2, output_type="np").images

    picture = drawn()
    assert picture.shape == (1, 64, 64, 3)
    pipeline.scheduler = _samplers()[sampler]
    assert abs(picture - drawn()).max() > 0.01

    based: Any = StableDiffusionPipeline.from_pretrained(
        stage.root / "base", dtype=torch.float32, local_files_only=True
    )
    based.set_progress_bar_config(disable=True)
    based.load_lora_weights(stage.out / "lora")
    assert torch.equal(_prediction(based.unet), _trained(stage))
    reader = type(_samplers()[written])
    based.scheduler = reader.from_pretrained(stage.out / "lora", local_files_only=True)
    again = based("a ball", latents=latents, num_inference_steps=2, output_type="np").images
    assert abs(picture - again).max() < 1e-3


def test_another_objective_of_a_whole_model_is_in_both_folders(tmp_path: Path) -> None:
    stage, fields = _with_objective(
        tmp_path, "full", "DDIMScheduler", prediction="v_prediction", zero_terminal_snr=True
    )
    export(CONFIG, stage)
    assert base_schedule(stage.out / "onnx") == base_schedule(stage.out / "pipeline") == fields
    assert not (stage.out / "lora").exists()
    assert not (stage.out / "pipeline" / "unet" / "scheduler_config.json").exists()


def test_a_pipeline_with_the_bases_scheduler_fails_where_another_was_trained_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, _ = _with_objective(
        tmp_path, "full", "DDIMScheduler", prediction="v_prediction", zero_terminal_snr=True
    )
    write = diffusers_folder.write_pipeline

    def forgetful(folder: Path, base: Path, *rest: Any) -> None:
        write(folder, base, *rest)
        shutil.copytree(base / "scheduler", folder / "scheduler", dirs_exist_ok=True)

    monkeypatch.setattr(diffusers_folder, "write_pipeline", forgetful)
    with pytest.raises(ParityError, match=r"pipeline: its pictures are at .* the limit is 30\.0 dB"):
        export(QUICK, stage)
    assert not (stage.out / "SHA256SUMS").exists()


def _perturb(folder: Path, part: str) -> None:
    if part == "unet":
        scale_output(folder / "unet", 1.01)
        return
    (path,) = (folder / part).glob("*.safetensors")
    weights = load_file(path)
    name = max(weights, key=lambda name: weights[name].numel())
    weights[name] *= 1.5
    save_file(path, weights)


@pytest.mark.parametrize("part", ["unet", "text_encoder", "vae"])
def test_a_perturbed_weight_fails_by_name_and_leaves_nothing_finished(
    fresh: Stage, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    write = diffusers_folder.write_pipeline

    def damaged(folder: Path, *rest: Any) -> None:
        write(folder, *rest)
        _perturb(folder, part)

    monkeypatch.setattr(diffusers_folder, "write_pipeline", damaged)
    culprit = {"vae": r"pipeline/vae_decoder|pipeline/vae_encoder"}.get(part, f"pipeline/{part}")
    with pytest.raises(ParityError, match=f"^({culprit}).* does not compute what the trained") as caught:
        export(QUICK, fresh)
    assert str(caught.value).count("FAILED") >= 3
    assert not (fresh.out / "SHA256SUMS").exists()
    assert not (fresh.out / "parity.json").exists()


def test_perturbed_onnx_and_lora_fail_by_name(done: Stage, tmp_path: Path) -> None:
    import onnx
    from onnx import numpy_helper

    trained = Trained(done.root / "base", done.folder("train") / "weights", 7)
    stage = dataclasses.replace(done, root=tmp_path)
    stage.out.parent.mkdir()
    subprocess.run(["cp", "-r", str(done.out), str(stage.out)], check=True)
    path = stage.out / "onnx" / "vae_decoder" / "model.onnx"
    model = onnx.load(path)
    tensor = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * 1.01, tensor.name))
    onnx.save(model, path)
    lora = stage.out / "lora" / "pytorch_lora_weights.safetensors"
    save_file(lora, {name: value * 1.1 for name, value in load_file(lora).items()})
    checks = compare_files(CONFIG, stage, done.root / "base", trained, ["pipeline", "lora", "onnx"])
    assert {check.artefact for check in checks if not check.passed} == {"lora/unet", "onnx/vae_decoder"}


def test_an_adapter_left_in_the_unet_is_noticed(
    done: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["cp", "-r", str(done.out / "pipeline"), str(tmp_path / "pipeline")], check=True)
    path = tmp_path / "pipeline" / "unet" / "diffusion_pytorch_model.safetensors"
    save_file(path, {**load_file(path), "conv_in.lora_A": torch.zeros(1)})
    with pytest.raises(ParityError, match=r"missing \[\], unexpected \['conv_in.lora_A'\]"):
        diffusers_folder.load_pipeline(tmp_path / "pipeline")


def test_pictures_too_far_apart_fail(fresh: Stage) -> None:
    with pytest.raises(ParityError, match=r"pipeline: its pictures are at .* the limit is 100\.5 dB"):
        export(dataclasses.replace(QUICK, dtype="float16", psnr_minimum=100.5), fresh)
    assert not (fresh.out / "SHA256SUMS").exists()


def test_a_crash_leaves_nothing_that_looks_finished_and_the_next_run_mends_it(
    fresh: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(QUICK, fresh)
    finished = (fresh.out / "SHA256SUMS").read_bytes()
    (fresh.out / "left over").touch()
    with monkeypatch.context() as patch:

        def crash(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(diffusers_folder, "save_unet", crash)
        with pytest.raises(OSError, match="No space left"):
            export(QUICK, fresh)
    assert not (fresh.out / "SHA256SUMS").exists()
    export(QUICK, fresh)
    assert (fresh.out / "SHA256SUMS").read_bytes() == finished


def test_a_second_copy_is_refused(fresh: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def again(*_: Any) -> None:
        export(QUICK, fresh)

    monkeypatch.setattr(stage_export, "start_over", again)
    with pytest.raises(LockedError, match=f"already running with the same inputs, as process {os.getpid()}"):
        export(QUICK, fresh)


def test_all_wrong_settings_are_listed(fresh: Stage) -> None:
    wrong = ExportConfig(
        dtype="half", onnx=True, opset=21, tolerance_float32=0.0, tolerance_float16=-1.0, psnr_minimum=0.0
    )
    with pytest.raises(ConfigError) as caught:
        export(wrong, fresh)
    assert caught.value.message.splitlines() == [
        "export.dtype is 'half'; set float16 or float32",
        "  export.opset is 21; set 14 to 20",
        "  export.tolerance_float32 is 0.0; set it above 0",
        "  export.tolerance_float16 is -1.0; set it above 0",
        "  export.psnr_minimum is 0.0; set it above 0",
    ]


def test_missing_weights_and_a_changed_base_are_named(fresh: Stage) -> None:
    weights = fresh.folder("train") / "weights" / "diffusion_pytorch_model.safetensors"
    kept = weights.read_bytes()
    weights.unlink()
    with pytest.raises(StoreError, match="weights holds neither"):
        export(QUICK, fresh)
    weights.write_bytes(kept)
    scale_output(fresh.root / "base" / "unet", 2.0)
    with pytest.raises(
        BaseModelError, match=r"base/unet/diffusion_pytorch_model\.safetensors is not the file"
    ):
        export(QUICK, fresh)


_SCRIPT = """
import sys
from pathlib import Path
import torch
torch.use_deterministic_algorithms(True)
torch.set_num_threads(1)
from stages.export import export
from tests.unit.test_export import CONFIG, make_inputs
export(CONFIG, make_inputs(Path(sys.argv[1]), "lora"))
"""


@pytest.mark.slow
def test_two_processes_in_different_folders_give_the_same_bytes(tmp_path: Path) -> None:
    project = Path(stage_export.__file__).parents[1]
    outs: list[Path] = []
    for number, name in enumerate(("one", "quite/another folder")):
        root = tmp_path / name
        root.mkdir(parents=True)
        env = {
            **os.environ,
            "PYTHONHASHSEED": str(number),
            "PYTHONPATH": str(project),
            "OMP_NUM_THREADS": "1",
        }
        subprocess.run([sys.executable, "-c", _SCRIPT, str(root)], cwd=root, env=env, check=True)
        outs.append(root / "data" / "export")
    assert (outs[0] / "SHA256SUMS").read_bytes() == (outs[1] / "SHA256SUMS").read_bytes()
    assert verify_sums(outs[0]) == verify_sums(outs[1]) == 25
