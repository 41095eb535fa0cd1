"""Memory at real size: Stable Diffusion 1.5's own U-Net (860 million parameters, random weights) in training on the CPU.

    python benchmarks/memory.py [--method lora|full] [--latents 32] [--steps 3] [--threads 1] [--folder DIR]

For LoRA (rank 16 on the attention's four projections) and for the whole U-Net, each without and with gradient
checkpointing, in a fresh process: what `estimate` says before the first step; what the process held at most in the steps,
over what it held before the U-Net was made; seconds of a step; one checkpoint saved. Then, in another fresh process, that
checkpoint is loaded, compared with the saved one byte for byte, and one more step is taken.

<name>_estimate_vs_measured    estimated bytes over measured ones; <name> as lora_plain or full_checkpointing
<method>_checkpointing_memory  measured bytes with checkpointing over those without
<method>_checkpointing_time    the same for seconds of a step

The whole U-Net needs about 16 GB of RAM and 11 GB of disk in --folder. A process that the kernel ends for want of memory is
reported as such, and the others go on. A table, then one JSON object as the last line; bytes and seconds throughout.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from stages.core.determinism import DeterminismConfig, apply, environment  # noqa: E402

WAYS = ("plain", "checkpointing")
RANK, TOKENS = 16, 77
COLUMNS = (
    "trained",
    "estimate",
    "measured",
    "ratio",
    "step s",
    "file",
    "save s",
    "load s",
    "resumed",
    "process",
)


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = found.add_argument
    add("--method", choices=("lora", "full"), action="append", help="only this one (default: both)")
    add("--latents", type=int, default=32, help="side of the latents: pixels / 8 (default: 32)")
    add("--batch", type=int, default=1, help="pictures a step (default: 1)")
    add("--steps", type=int, default=3, help="steps, of which the first is not timed (default: 3)")
    add("--threads", type=int, default=1, help="CPU threads (default: 1)")
    add("--folder", type=Path, help="where checkpoints are written meanwhile (default: the temporary folder)")
    add("--tiny", action="store_true", help="a U-Net of 0.8 million parameters instead, to try it out")
    add("--child", help=argparse.SUPPRESS)
    return found


def machine(asked: argparse.Namespace) -> DeterminismConfig:
    """Instruction set and threads."""
    return DeterminismConfig(mode="portable", threads=asked.threads)


def build(asked: argparse.Namespace, method: str, way: str, folder: Path) -> Any:
    """The trainer; the latent cache that it reads is written to `folder`."""
    from benchmarks.training import (
        SD15,
        SD15_PARAMETERS,
        TINY,
        random_unet,
        settings,
        trainer_of,
        write_sd15_cache,
    )

    config = TINY if asked.tiny else SD15
    write_sd15_cache(
        folder / "cache", items=4, latents=asked.latents, tokens=TOKENS, width=config["cross_attention_dim"]
    )
    cfg = settings(method, batch_size=asked.batch, rank=RANK, checkpointing=way == "checkpointing")
    unet = random_unet(config, "cpu")
    count = sum(value.numel() for value in unet.parameters())
    assert asked.tiny or count == SD15_PARAMETERS, count
    return trainer_of(cfg, unet, folder / "cache", "cpu")


def train(asked: argparse.Namespace, method: str, way: str, folder: Path) -> dict[str, Any]:
    """Estimate, steps, one checkpoint."""
    from benchmarks.training import forget_peak, resident, timed
    from stages.core.training.checkpoints import Checkpoints
    from stages.core.training.estimate import estimate

    start = resident()
    trainer = build(asked, method, way, folder)
    batch = trainer.batches.largest()
    parts = estimate(
        trainer.bare,
        {"sample": batch.noisy_BChw, "timestep": batch.steps_B, **batch.conditions.arguments()},
        optimizer=trainer.cfg.optimizer.name,
        average=False,
        checkpointing=way == "checkpointing",
        autocast=None,
    )
    forget_peak()
    first = timed(trainer.advance, 1, "cpu")
    later = timed(trainer.advance, asked.steps - 1, "cpu") if asked.steps > 1 else first
    peak = resident("VmHWM")
    found: dict[str, Any] = {
        "trained": sum(value.numel() for value in trainer.parameters.values()),
        "estimate": parts.total,
        "estimate_parts": vars(parts),
        "start": start,
        "peak": peak,
        "measured": peak - start,
        "first_step_seconds": first,
        "step_seconds": later,
        "loss": trainer.row["loss"],
    }
    begin = time.perf_counter()
    path = Checkpoints(folder / "checkpoints", print).save(trainer.state())
    found |= {"save_seconds": time.perf_counter() - begin, "file": path.stat().st_size}
    found["peak_with_save"] = resident("VmHWM")
    trainer.close()
    return found


def resume(asked: argparse.Namespace, method: str, way: str, folder: Path) -> dict[str, Any]:
    """Load the checkpoint, compare, take one step."""
    import hashlib

    from benchmarks.training import forget_peak, resident
    from stages.core.safetensors_io import chunks
    from stages.core.training.checkpoints import Checkpoints

    trainer = build(asked, method, way, folder)
    checkpoints = Checkpoints(folder / "checkpoints", print)
    forget_peak()
    begin = time.perf_counter()
    state = checkpoints.at(asked.steps)
    assert state
    trainer.load(state)
    del state
    found: dict[str, Any] = {"load_seconds": time.perf_counter() - begin}
    digest = hashlib.sha256()
    again = trainer.state()
    for piece in chunks(again.tensors, {"state": json.dumps(again.plain, sort_keys=True)}):
        digest.update(piece)
    (file,) = (folder / "checkpoints").glob("step-*.safetensors")
    found["same_state"] = digest.hexdigest() in file.name
    trainer.advance()
    found |= {"peak_resumed": resident("VmHWM"), "resumed_at": trainer.step}
    trainer.close()
    return found


def run(asked: argparse.Namespace, what: str, method: str, way: str, folder: Path) -> dict[str, Any]:
    """One child process; {"failed": text} when it did not end well."""
    options = [f"--{name}={getattr(asked, name)}" for name in ("latents", "batch", "steps", "threads")]
    command = [sys.executable, __file__, *options, *["--tiny"] * asked.tiny, "--method", method]
    command += ["--folder", str(folder), "--child", f"{what},{way}"]
    variables = environment(machine(asked)) | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    if done.returncode == -9:
        return {"failed": "killed, most likely for want of memory"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def line(name: str, row: dict[str, Any]) -> str:
    """One row of the table."""
    if "failed" in row and "peak" not in row:
        return f"{name:>20}  {row['failed']}"
    values = [
        f"{row['trained'] / 1e6:.1f} M",
        *(f"{row[part] / 1e9:.2f} GB" for part in ("estimate", "measured")),
        f"{row['estimate'] / row['measured']:.2f}",
        f"{row['step_seconds']:.2f}",
        f"{row['file'] / 1e9:.2f} GB",
        f"{row['save_seconds']:.1f}",
    ]
    if "failed" in row:
        return f"{name:>20}" + "".join(f"{value:>10}" for value in values) + f"  resumed: {row['failed']}"
    values += [
        f"{row['load_seconds']:.1f}",
        f"{row['peak_resumed'] / 1e9:.2f} GB",
        f"{row['peak'] / 1e9:.2f} GB",
    ]
    return f"{name:>20}" + "".join(f"{value:>10}" for value in values)


def ratios(rows: dict[str, dict[str, Any]], methods: list[str]) -> dict[str, float]:
    """The named ratios of what was measured."""
    found = {
        f"{name}_estimate_vs_measured": row["estimate"] / row["measured"]
        for name, row in rows.items()
        if "measured" in row
    }
    for method in methods:
        plain, other = (rows[f"{method}_{way}"] for way in WAYS)
        if "measured" in plain and "measured" in other:
            found[f"{method}_checkpointing_memory"] = other["measured"] / plain["measured"]
            found[f"{method}_checkpointing_time"] = other["step_seconds"] / plain["step_seconds"]
    return {name: round(value, 4) for name, value in found.items()}


def main() -> None:
    """Run every configuration, print the table and the JSON."""
    asked = parser().parse_args()
    if asked.child:
        apply(machine(asked))
        what, way = asked.child.split(",")
        work = {"train": train, "resume": resume}[what]
        print(json.dumps(work(asked, asked.method[0], way, asked.folder)))
        return
    methods: list[str] = list(dict.fromkeys(asked.method or ("lora", "full")))
    rows: dict[str, dict[str, Any]] = {}
    print(f"{'':>20}" + "".join(f"{name:>10}" for name in COLUMNS), flush=True)
    for method in methods:
        for way in WAYS:
            with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
                row = run(asked, "train", method, way, Path(folder))
                if "failed" not in row:
                    row |= run(asked, "resume", method, way, Path(folder))
            rows[f"{method}_{way}"] = row
            print(line(f"{method}_{way}", row), flush=True)
    facts = {name: getattr(asked, name) for name in ("latents", "batch", "steps", "threads", "tiny")}
    # Not of harness.provenance: this process stays small.
    print(json.dumps({"benchmark": "memory", **facts, **ratios(rows, methods), "rows": rows}))


if __name__ == "__main__":
    main()
