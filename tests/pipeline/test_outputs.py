"""Every output opens in the library that it is meant for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.project import Project

pytestmark = pytest.mark.slow

Copy = Callable[[], Project]


def draw(pipeline: Any) -> "np.ndarray[Any, Any]":
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(7)
    return pipeline("a grinning face", num_inference_steps=3, generator=generator, output_type="np").images[0]


def test_the_pipeline_folder_draws_in_diffusers(finished: Project) -> None:
    from diffusers import StableDiffusionPipeline

    folder = finished.root / "data/export/pipeline"
    picture = draw(
        StableDiffusionPipeline.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    )
    assert picture.shape == (64, 64, 3)
    base = finished.root / "data/embedded/tiny-sd"
    before = draw(StableDiffusionPipeline.from_pretrained(base, dtype=torch.float32, local_files_only=True))
    assert np.abs(picture - before).max() > 0.01, "the export is the base: nothing was fine-tuned"


def test_onnx_networks_run_in_onnxruntime(finished: Project) -> None:
    import onnxruntime

    folder = finished.root / "data/export/onnx"
    unet = onnxruntime.InferenceSession(folder / "unet" / "model.onnx", providers=["CPUExecutionProvider"])
    shapes = {node.name: node.shape for node in unet.get_inputs()}
    assert len(shapes) == 3
    for name in ("text_encoder", "vae_decoder", "vae_encoder"):
        session = onnxruntime.InferenceSession(
            folder / name / "model.onnx", providers=["CPUExecutionProvider"]
        )
        assert len(session.get_inputs()) == 1


def test_sums_hold(finished: Project) -> None:
    output = finished.run("sh", "-c", "cd data/export && sha256sum --check --quiet --strict SHA256SUMS")
    assert output == ""


def test_the_sheet_shows_three_rows_of_pictures(finished: Project) -> None:
    sheet = Image.open(finished.root / "data/evaluate/sheets/before_after.png")
    assert sheet.mode == "RGB"
    assert len(sheet.getcolors(maxcolors=1 << 24) or []) > 100


def test_lora_loads_into_the_base(copy: Copy) -> None:
    from diffusers import StableDiffusionPipeline

    project = copy()
    project.set("  method: full ", "  method: lora ")
    project.dvc("repro", "train")
    pipeline: Any = StableDiffusionPipeline.from_pretrained(
        project.root / "data/embedded/tiny-sd", dtype=torch.float32, local_files_only=True
    )
    before = draw(pipeline)
    pipeline.load_lora_weights(project.root / "data/train/weights")
    assert np.abs(draw(pipeline) - before).max() > 0


def test_mlflow_holds_one_parent_and_a_child_for_each_stage(copy: Copy) -> None:
    from mlflow import MlflowClient

    project = copy()
    project.dvc("repro", "--force", "--no-run-cache", DARKROOM_TRACKING="on")
    output = project.run("python", "-m", "stages.cli", "tracking", "sync", DARKROOM_TRACKING="on")
    assert "MLflow holds everything" in output
    client = MlflowClient(f"sqlite:///{project.root / '.darkroom/mlflow/mlflow.db'}")
    experiments = [found.experiment_id for found in client.search_experiments()]
    runs = client.search_runs(experiments)
    parents = [run for run in runs if run.data.tags.get("role") == "pipeline"]
    children = {run.data.tags["stage"]: run for run in runs if run.data.tags.get("role") == "stage"}
    assert len(parents) == 1
    assert sorted(children) == ["base", "encode", "evaluate", "export", "ingest", "preprocess", "train"]
    assert {run.data.tags["mlflow.parentRunId"] for run in children.values()} == {parents[0].info.run_id}
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert children["ingest"].data.metrics["ingest/accepted"] == 24
    assert children["train"].data.params["train.steps"] == "6"
    history = client.get_metric_history(children["train"].info.run_id, "train/loss")
    # The steps were trained before: the run holds them all the same.
    assert [metric.step for metric in history] == [1, 2, 3, 4, 5, 6]
    names = [entry.path for entry in client.list_artifacts(children["evaluate"].info.run_id)]
    assert names, "the sheet is missing"


def test_a_fresh_train_logs_every_step(copy: Copy, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    project = copy()
    extra = {"DARKROOM_TRACKING": "on", "DARKROOM_STORE": str(tmp_path / "store")}
    project.dvc("repro", "--force", "--no-run-cache", "--single-item", "train", **extra)
    project.run("python", "-m", "stages.cli", "tracking", "sync", DARKROOM_TRACKING="on")
    client = MlflowClient(f"sqlite:///{project.root / '.darkroom/mlflow/mlflow.db'}")
    experiments = [found.experiment_id for found in client.search_experiments()]
    child = next(run for run in client.search_runs(experiments) if run.data.tags.get("stage") == "train")
    history = client.get_metric_history(child.info.run_id, "train/loss")
    assert [metric.step for metric in history] == [1, 2, 3, 4, 5, 6]
