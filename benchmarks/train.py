"""The training loop as stage train runs it, against the same step written bare, and against diffusers' own script.

    python benchmarks/train.py [--method full|lora] [--steps 20] [--rounds 5] [--checkpointing] [--diffusers PATH]

train_vs_bare_loop           steps a second of stage train's loop (batches from a latent cache on disk, a step, the step's
                             records for MLflow), over those of a loop over tensors in RAM: forward, loss, backward,
                             clipping, optimiser; same weights, shapes, optimiser, threads
train_waiting_share          part of the stage's step that is spent waiting for its batch
train_vs_diffusers_script    with --diffusers: steps a second of stage train's loop, over those of diffusers' example script
                             on as many pictures of the same size, with the same base, batch size, optimiser and threads.
                             The script encodes pictures and captions in each step, which stage encode has done once.
                             It needs the packages datasets and torchvision
checkpointing_time           with --checkpointing: seconds of a step with gradient checkpointing, over those without
checkpointing_memory         the same for the peak of RAM of a process of its own, libraries and all

Rounds are interleaved, medians reported. The last line is one JSON object. Everything runs on the CPU, under
determinism.mode portable. `benchmarks/results/` holds what was measured.
"""

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from stages.core.determinism import DeterminismConfig, apply, environment  # noqa: E402

BASE = PROJECT / "data" / "embedded" / "tiny-sd"
CAPTIONS = ("a round yellow smiling face", "a red square", "a blue circle", "a green triangle")
SCRIPTS = {"full": "train_text_to_image.py", "lora": "train_text_to_image_lora.py"}
SHORT = 4  # steps of diffusers' script that are taken off, with its start and its end
LEARNING_RATE = 1.5e-3  # with the rest of `benchmarks.training.settings`, the default parameters


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = found.add_argument
    add("--method", choices=("full", "lora"), default="full", help="what is trained (default: full)")
    add("--steps", type=int, default=20, help="steps of each loop in each round (default: 20)")
    add("--rounds", type=int, default=5, help="rounds, each of all loops (default: 5)")
    add("--threads", type=int, default=1, help="CPU threads of every loop (default: 1)")
    add("--items", type=int, default=512, help="pictures that are trained on (default: 512)")
    add("--batch", type=int, default=16, help="pictures a step (default: 16)")
    add("--size", type=int, default=64, help="side of the pictures in pixels (default: 64)")
    add("--base", type=Path, default=BASE, help="folder of Stable Diffusion 1's kind (default: embedded)")
    add("--checkpointing", action="store_true", help="also measure checkpointing, in processes of its own")
    add("--diffusers", type=Path, help="root of a checkout of diffusers, of the installed version")
    add("--child", choices=("on", "off"), help=argparse.SUPPRESS)
    return found


def write_workspace(root: Path, asked: argparse.Namespace) -> None:
    """data/base and data/encode of a project in `root`, the text states by the base's own text encoder."""
    from benchmarks.training import write_cache
    from stages.core.models.text import TextEncoder
    from stages.core.models.vae import LatentSpace
    from stages.core.record import describe
    from stages.core.store import write_json

    record = describe(asked.base, {"kind": "folder", "path": str(asked.base.resolve())})
    write_json(root / "data" / "base" / "record.json", record.to_json())
    states = TextEncoder(asked.base, "cpu").encode(["", *CAPTIONS])
    write_cache(
        root / "data" / "encode",
        items=asked.items,
        size=asked.size,
        space=LatentSpace.of(record.components["vae"]["config"]).to_json(),
        texts=dict(zip(["", *CAPTIONS], states.unbind(), strict=True)),
        vae=record.vae_digest,
        text_encoder=record.text_digest,
    )


class StageLoop:
    """Stage train's own objects and its loop, in this process: `stages.train.run` without its beginning and end."""

    def __init__(self, root: Path, asked: argparse.Namespace, *, checkpointing: bool = False) -> None:
        from benchmarks.training import SEED, settings
        from stages.core.ranks import Ranks
        from stages.core.store import Store
        from stages.core.training.checkpoints import Checkpoints
        from stages.harness.config import SharedConfig
        from stages.harness.journal import Journal
        from stages.harness.run import Stage
        from stages.train import Job, Pace, after_step

        journal = root / "journal.jsonl"
        journal.touch()
        shared = SharedConfig(seed=SEED, device="cpu", runtime="native", determinism=machine(asked))
        self.stage = Stage(
            name="train", root=root, shared=shared, store=Store(root / "store"), tracker=Journal(journal)
        )
        self.cfg = settings(
            asked.method, batch_size=asked.batch, learning_rate=LEARNING_RATE, checkpointing=checkpointing
        )
        self.job = Job(self.cfg, self.stage, Ranks(0, 1, "cpu"))
        # What would stand there after the validation before the first step.
        self.job.validation.append(dict.fromkeys(self.job.columns, 1.0) | {"step": 0})
        self.checkpoints = Checkpoints(root / "store", self.stage.say)
        self.pace, self.after_step = Pace(self.job.trainer), after_step

    def seconds(self, steps: int) -> float:
        """Of a step, over `steps` of them."""
        from stages.train import exhausted

        job = self.job
        start = time.perf_counter()
        for _ in self.stage.progress(range(steps), total=steps, what=self.cfg.method, unit="steps"):
            job.team.gather(exhausted(job.validation, self.cfg.stopping.patience))
            row = job.trainer.advance()
            job.team.gather(False)
            self.after_step(job, self.checkpoints, row, self.pace, ended=False)
        return (time.perf_counter() - start) / steps


def bare_loop(ours: StageLoop) -> Any:
    """The same step without anything around it, on a copy of the weights and batches that were made before."""
    from benchmarks.training import BareLoop
    from stages.core.models.unet import load_unet
    from stages.core.training.trainer import prepare

    unet = load_unet(ours.job.base / "unet", "cpu")
    prepare(unet, ours.cfg, ours.stage.shared.seed)
    return BareLoop(ours.cfg, unet, [ours.job.batches[number] for number in range(8)], "cpu")


def child(asked: argparse.Namespace) -> None:
    """Print, as JSON, seconds of a step and peak of RAM in bytes, with or without checkpointing."""
    from benchmarks.training import forget_peak, resident

    with tempfile.TemporaryDirectory() as folder:
        write_workspace(Path(folder), asked)
        ours = StageLoop(Path(folder), asked, checkpointing=asked.child == "on")
        start = resident()
        forget_peak()
        ours.seconds(2)
        found = {"seconds": ours.seconds(asked.steps), "start": start, "peak": resident("VmHWM")}
        ours.job.trainer.close()
    print(json.dumps(found))


def checkpointing(asked: argparse.Namespace) -> dict[str, float]:
    """Time and memory with gradient checkpointing over those without."""
    options = ["--method", asked.method, "--base", str(asked.base)]
    for name in ("steps", "threads", "items", "batch", "size"):
        options += [f"--{name}", str(getattr(asked, name))]
    found: dict[str, list[dict[str, float]]] = {"on": [], "off": []}
    for _ in range(asked.rounds):
        for way, runs in found.items():
            command = [sys.executable, __file__, *options, "--child", way]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"train: error: a child process failed: {done.stderr.strip()[-2000:]}")
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    on, off = (
        {name: statistics.median(run[name] for run in runs) for name in runs[0]} for runs in found.values()
    )
    return {
        "checkpointing_time": on["seconds"] / off["seconds"],
        "checkpointing_memory": on["peak"] / off["peak"],
        "checkpointing_memory_besides_libraries": (on["peak"] - on["start"]) / (off["peak"] - off["start"]),
        "checkpointing_peak_bytes": on["peak"],
        "plain_peak_bytes": off["peak"],
    }


def script_of(checkout: Path, method: str) -> Path:
    """diffusers' example script. Ends with one line when the checkout lacks it."""
    path = checkout / "examples" / "text_to_image" / SCRIPTS[method]
    if not path.is_file():
        raise SystemExit(
            f"train: error: {path} is not there; give --diffusers the root of a checkout of diffusers"
        )
    return path


def write_imagefolder(folder: Path, items: int, size: int) -> None:
    """`items` pictures of noise and their captions, as the package datasets reads an imagefolder."""
    from PIL import Image

    from stages.core.sampler import stream

    folder.mkdir(parents=True)
    lines: list[str] = []
    for number in range(items):
        pixels = stream(1, "pixels", number).integers(0, 256, size=(size, size, 3), dtype="uint8")
        Image.fromarray(pixels).save(folder / f"{number}.png")
        lines.append(json.dumps({"file_name": f"{number}.png", "text": CAPTIONS[number % len(CAPTIONS)]}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")


def script_command(script: Path, asked: argparse.Namespace, root: Path, steps: int) -> list[str]:
    """The script's command line for the training that `StageLoop` does; `root` holds its data and takes its outs."""
    from benchmarks.training import NEVER, SEED, settings

    cfg = settings(asked.method, batch_size=asked.batch, learning_rate=LEARNING_RATE)
    options: dict[str, object] = {
        "pretrained_model_name_or_path": asked.base.resolve(),
        "train_data_dir": root / "pictures",
        "output_dir": root / "out",
        "cache_dir": root / "cache",
        "resolution": asked.size,
        "train_batch_size": cfg.batch_size,
        "max_train_steps": steps,
        "gradient_accumulation_steps": cfg.accumulation,
        "learning_rate": cfg.learning_rate,
        "lr_scheduler": cfg.lr_schedule,
        "lr_warmup_steps": cfg.warmup,
        "max_grad_norm": cfg.max_grad_norm,
        "adam_beta1": cfg.optimizer.beta1,
        "adam_beta2": cfg.optimizer.beta2,
        "adam_epsilon": cfg.optimizer.epsilon,
        "adam_weight_decay": cfg.optimizer.weight_decay,
        "mixed_precision": cfg.mixed_precision,
        "dataloader_num_workers": cfg.loader.num_workers,
        "checkpointing_steps": NEVER,
        "seed": SEED,
    }
    if asked.method == "lora":
        options["rank"] = cfg.lora.rank
    return [sys.executable, str(script), *(f"--{name}={value}" for name, value in options.items())]


def seconds_of_script(script: Path, asked: argparse.Namespace, root: Path, steps: int) -> float:
    """Of the script's whole process, without network and without a GPU."""
    command = script_command(script, asked, root, steps)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    caches = {"HF_DATASETS_CACHE": str(root / "cache")}
    start = time.perf_counter()
    done = subprocess.run(
        command, env=os.environ | offline | caches, cwd=root, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(
            f"train: error: {script.name} ended with {done.returncode}: {done.stderr.strip()[-2000:]}"
        )
    return time.perf_counter() - start


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """All loops, round by round; `train_*` and what they are made of."""
    script = script_of(asked.diffusers, asked.method) if asked.diffusers else None
    seconds: dict[str, list[float]] = {"bare": [], "ours": []}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_workspace(root, asked)
        ours = StageLoop(root, asked)
        bare = bare_loop(ours)
        if script:
            write_imagefolder(root / "pictures", asked.items, asked.size)
            seconds_of_script(script, asked, root, 1)  # datasets writes its own copy of the pictures
            seconds["script"] = []
        from benchmarks.training import timed

        ours.seconds(2)
        timed(bare.step, 2, "cpu")
        waited = ours.job.trainer.waited
        for number in range(asked.rounds):
            seconds["bare"].append(timed(bare.step, asked.steps, "cpu"))
            seconds["ours"].append(ours.seconds(asked.steps))
            if script:
                short = seconds_of_script(script, asked, root, SHORT)
                long = seconds_of_script(script, asked, root, SHORT + asked.steps)
                seconds["script"].append((long - short) / asked.steps)
            texts = ", ".join(f"{name} {values[-1]:.4f} s a step" for name, values in seconds.items())
            print(f"round {number + 1}: {texts}", file=sys.stderr)
        waited = ours.job.trainer.waited - waited
        ours.job.trainer.close()
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    found: dict[str, Any] = {
        "rounds_seconds": {name: [round(x, 6) for x in v] for name, v in seconds.items()}
    }
    found |= {f"step_seconds_{name}": value for name, value in middle.items()}
    found["train_vs_bare_loop"] = middle["bare"] / middle["ours"]
    found["train_waiting_share"] = waited / (sum(seconds["ours"]) * asked.steps)
    if script:
        if middle["script"] <= 0:
            raise SystemExit("train: error: the script's steps are lost in its start; raise --steps")
        found["train_vs_diffusers_script"] = middle["script"] / middle["ours"]
    return found


def machine(asked: argparse.Namespace) -> DeterminismConfig:
    """Instruction set and threads."""
    return DeterminismConfig(mode="portable", threads=asked.threads)


def main() -> None:
    """Measure and print."""
    asked = parser().parse_args()
    if asked.diffusers:
        script_of(asked.diffusers, asked.method)
    if "DARKROOM_BENCHMARK" not in os.environ:  # the caps are read when torch loads
        variables = environment(machine(asked)) | {"HF_HUB_OFFLINE": "1", "DARKROOM_BENCHMARK": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | variables)
    apply(machine(asked))
    from stages.harness.provenance import cpu_kind

    gc.freeze()  # as harness.run does
    if asked.child:
        child(asked)
        return
    found: dict[str, Any] = {"benchmark": "train", "machine": cpu_kind()}
    found |= {
        name: getattr(asked, name)
        for name in ("method", "threads", "batch", "size", "items", "steps", "rounds")
    }
    with contextlib.redirect_stdout(sys.stderr):
        found |= measure(asked)
        if asked.checkpointing:
            found |= checkpointing(asked)
    print(json.dumps({name: round(x, 6) if isinstance(x, float) else x for name, x in found.items()}))


if __name__ == "__main__":
    main()
