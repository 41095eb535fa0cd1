"""The training benchmarks at their smallest: what they print holds together. What they measure is in benchmarks/results/."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stages.harness.closure import PROJECT

BENCHMARKS = PROJECT / "benchmarks"
SMALL = ("--steps", "1", "--rounds", "1", "--items", "4", "--batch", "2")
# Stands for diffusers' script: its options, as many as are given, and a time that grows with the steps.
FAKE = """
import argparse, pathlib, time
parser = argparse.ArgumentParser()
for name, kind in {options}.items():
    parser.add_argument("--" + name, type=kind, required=True)
asked = parser.parse_args()
pictures = list(pathlib.Path(asked.train_data_dir).glob("*.png"))
lines = pathlib.Path(asked.train_data_dir, "metadata.jsonl").read_text().splitlines()
assert len(pictures) == len(lines) == 4, lines
assert pathlib.Path(asked.pretrained_model_name_or_path, "model_index.json").is_file()
assert asked.resolution == 64 and asked.train_batch_size == 2 and asked.lr_scheduler == "cosine"
time.sleep(0.3 + 0.2 * asked.max_train_steps)
"""
OPTIONS = (
    "{'pretrained_model_name_or_path': str, 'train_data_dir': str, 'output_dir': str, 'cache_dir': str, "
    "'resolution': int, 'train_batch_size': int, 'max_train_steps': int, 'gradient_accumulation_steps': int, "
    "'learning_rate': float, 'lr_scheduler': str, 'lr_warmup_steps': int, 'max_grad_norm': float, 'adam_beta1': float, "
    "'adam_beta2': float, 'adam_epsilon': float, 'adam_weight_decay': float, 'mixed_precision': str, "
    "'dataloader_num_workers': int, 'checkpointing_steps': int, 'seed': int%s}"
)


def run(
    name: str, *options: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), *options],
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def checkout(root: Path, name: str, options: str) -> Path:
    """A folder that looks like diffusers' with the fake script in it."""
    script = root / "examples" / "text_to_image" / name
    script.parent.mkdir(parents=True)
    script.write_text(FAKE.format(options=options))
    return root


@pytest.mark.slow
def test_train_against_the_bare_loop_and_with_checkpointing() -> None:
    found = last_line(run("train", *SMALL, "--checkpointing"))
    assert (found["method"], found["batch"], found["threads"]) == ("full", 2, 1)
    assert 0.1 < found["train_vs_bare_loop"] < 10
    assert 0 <= found["train_waiting_share"] < 0.9
    assert 0.2 < found["checkpointing_time"] < 20
    assert 0.5 < found["checkpointing_memory"] < 1.5
    assert len(found["rounds_seconds"]["ours"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "script", "more"),
    [("full", "train_text_to_image.py", ""), ("lora", "train_text_to_image_lora.py", ", 'rank': int")],
)
def test_train_against_a_script(tmp_path: Path, method: str, script: str, more: str) -> None:
    folder = checkout(tmp_path / "diffusers", script, OPTIONS % more)
    found = last_line(run("train", *SMALL, "--method", method, "--diffusers", str(folder)))
    assert found["step_seconds_script"] == pytest.approx(0.2, abs=0.15)
    ratio = found["step_seconds_script"] / found["step_seconds_ours"]
    assert found["train_vs_diffusers_script"] == pytest.approx(ratio, rel=1e-3)


def test_a_checkout_without_the_script_is_one_line(tmp_path: Path) -> None:
    done = run("train", "--diffusers", str(tmp_path))
    assert done.returncode == 1
    path = tmp_path / "examples" / "text_to_image" / "train_text_to_image.py"
    assert done.stderr == (
        f"train: error: {path} is not there; give --diffusers the root of a checkout of diffusers\n"
    )


@pytest.mark.slow
def test_a_script_that_fails_is_told(tmp_path: Path) -> None:
    folder = checkout(tmp_path / "diffusers", "train_text_to_image.py", "{'unknown': str}")
    done = run("train", *SMALL, "--diffusers", str(folder))
    assert done.returncode == 1
    assert "train: error: train_text_to_image.py ended with 2: " in done.stderr
    assert "the following arguments are required: --unknown" in done.stderr


@pytest.mark.slow
def test_memory_estimates_measures_and_resumes(tmp_path: Path) -> None:
    options = ("--tiny", "--latents", "8", "--steps", "2", "--method", "full", "--folder", str(tmp_path))
    done = run("memory", *options)
    found = last_line(done)
    assert {"full_checkpointing_memory", "full_checkpointing_time", "full_plain_estimate_vs_measured"} < set(
        found
    )
    assert list(found["rows"]) == ["full_plain", "full_checkpointing"]
    for row in found["rows"].values():
        # Weights and gradients once, the optimiser's state twice, in float32; the file holds no gradients.
        assert row["estimate"] > 16 * row["trained"]
        assert 12 * row["trained"] < row["file"] < 13 * row["trained"]
        assert row["measured"] > 0
        assert (row["same_state"], row["resumed_at"]) == (True, 3)
    assert "full_checkpointing" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_memory_goes_on_after_a_process_that_fails(tmp_path: Path) -> None:
    found = last_line(run("memory", "--tiny", "--batch", "0", "--method", "lora", "--folder", str(tmp_path)))
    assert all("failed" in row for row in found["rows"].values())


@pytest.mark.slow
def test_gpu_check_on_a_cpu(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--tiny", "--batch", "2", "--steps", "1", "--budget", "60")
    done = run("gpu_check", *options, "--output", str(tmp_path / "found.json"))
    found = last_line(done)
    assert json.loads((tmp_path / "found.json").read_text()) == found
    assert found["parity"]["difference_float32"] == 0
    assert 0 < found["parity"]["difference_bfloat16"] < 1e-2
    assert {name: part["equal"] for name, part in found["equal_bytes"].items()} == {
        "lora": True,
        "full": True,
    }
    eager = {name: row for name, row in found["rows"].items() if name.endswith("eager")}
    late = {name: row for name, row in found["rows"].items() if name.endswith("compiled")}
    assert len(eager) == len(late) == 4
    for name, row in eager.items():
        assert 0.05 < row["ours_vs_bare"] < 20
        assert (
            row["flops"] == eager[name.replace("checkpointing", "plain")]["flops"]
        )  # what is run again does not count
    assert eager["lora_plain_eager"]["flops"] < eager["full_plain_eager"]["flops"]
    # Compiling takes minutes on a small machine: said, not left out.
    assert all("skipped" in row and "s are left" in row["skipped"] for row in late.values())
    assert "full_checkpointing_compiled  skipped: needs about" in done.stdout


@pytest.mark.slow
def test_gpu_check_with_no_time_lists_all_as_skipped() -> None:
    found = last_line(run("gpu_check", "--device", "cpu", "--tiny", "--budget", "0"))
    assert len(found["rows"]) == 8
    assert all("skipped" in part for part in (*found["rows"].values(), *found["equal_bytes"].values()))


@pytest.mark.slow
def test_gpu_check_imports_no_tracking_and_no_pipeline() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(PROJECT)!r}); import benchmarks.gpu_check\n"
        "print(sorted({'.'.join(name.split('.')[:2]) for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"DARKROOM_BENCHMARK": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    names = {name.replace("'", "").strip() for name in done.stdout.strip().strip("[]").split(",")}
    assert "stages.core" in names
    assert not names & {"dvc", "mlflow", "omegaconf", "stages.harness", "stages.train"}


@pytest.mark.parametrize("name", ["train", "memory"])
def test_help_teaches(name: str) -> None:
    done = run(name, "--help")
    assert done.returncode == 0
    assert f"python benchmarks/{name}.py" in done.stdout
    assert "The last line is one JSON object" in done.stdout or "as the last line" in done.stdout
