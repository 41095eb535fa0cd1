"""What a GPU makes of the training loop, in under four minutes and without network: speed, memory, parity, equal bytes.

    python benchmarks/gpu_check.py [--budget 220] [--batch 8] [--latents 64] [--only lora] [--output FILE]
    python benchmarks/gpu_check.py --device cpu --tiny --budget 45       the same checks where there is no GPU

With Stable Diffusion 1.5's U-Net (860 million random weights) in bf16, for LoRA and for the whole U-Net, without and with
gradient checkpointing, eager and compiled:

ours, bare      steps a second of the project's loop (Trainer.advance over a latent cache on disk) and of a bare one (tensors
                on the device, forward, loss, backward, clipping, optimiser), both with deterministic kernels
ratio           ours over bare; waiting: the part of our step that waits for its batch
free            the bare loop with torch's deterministic algorithms off: what the choice of equal bytes costs
mfu             model FLOPs utilisation of ours: multiplications and additions of forward and backward (without what
                checkpointing runs again), over what the device can do at most in bf16; so too bare_mfu in the JSON
peak            most bytes that torch allocated on the device, by ours and by the bare loop

Parity: the losses of the same first steps of a small U-Net on the CPU in float32, and on the device in float32 and bf16; the
largest relative difference, and the tolerance it is held against. Equal bytes: two trainings of a few steps end in the same
weights, by sha256. A configuration that no longer fits into the budget is listed as skipped; a compiled one runs in its own
process, which is ended with the budget. A table, a JSON file (--output), and the same JSON as the last line. Ends with 1
when parity or equality fails. It needs torch, diffusers, peft, transformers; no DVC, MLflow or OmegaConf.
"""

import argparse
import gc
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from stages.core.determinism import DeterminismConfig, apply, environment  # noqa: E402

SETTINGS = DeterminismConfig(mode="native", threads=1)
if "DARKROOM_BENCHMARK" not in os.environ:  # read when torch loads
    variables = environment(SETTINGS) | {"HF_HUB_OFFLINE": "1", "DARKROOM_BENCHMARK": str(time.time())}
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | variables)

import torch  # noqa: E402

from benchmarks.training import (  # noqa: E402
    SD15,
    SEED,
    TINY,
    BareLoop,
    batches_of,
    flops_of,
    random_unet,
    settings,
    timed,
    trainer_of,
    write_sd15_cache,
)
from stages.core.errors import DarkroomError  # noqa: E402
from stages.core.safetensors_io import chunks  # noqa: E402
from stages.core.training.config import TrainConfig  # noqa: E402
from stages.core.training.trainer import Trainer, prepare  # noqa: E402

# Dense bf16 multiplications and additions a second, in 10^12, by what the device's name holds: of makers' data sheets. The
# first that fits counts.
PEAKS = {
    **{"B200": 2250, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312, "L40S": 362},
    **{"A10G": 70, "A10": 125, "L4": 121, "RTX 5090": 209, "RTX 4090": 165, "RTX 3090": 71},
}
TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-2}  # relative, of a loss
# Seconds that a configuration takes, before one of its kind has been measured.
GUESSES = {"cuda": {"eager": 20.0, "compiled": 60.0}, "cpu": {"eager": 3.0, "compiled": 150.0}}
COLUMNS = {
    "ours": "ours",
    "bare": "bare",
    "ratio": "ours_vs_bare",
    "free": "bare_free",
    "waiting": "waiting",
    "mfu": "mfu",
}
PARITY_STEPS, EQUAL_STEPS, ITEMS, TOKENS = 5, 3, 64, 77


@dataclass(frozen=True)
class Way:
    """One configuration."""

    method: str  # lora | full
    checkpointing: bool = False
    compiled: bool = False

    @property
    def mode(self) -> str:
        return "compiled" if self.compiled else "eager"

    @property
    def name(self) -> str:
        return f"{self.method}_{'checkpointing' if self.checkpointing else 'plain'}_{self.mode}"


METHODS = ("lora", "full")
WAYS = [Way(method, again, late) for late in (False, True) for again in (False, True) for method in METHODS]


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = found.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="where to train (default: cuda)")
    add("--tiny", action="store_true", help="0.8 million parameters and latents of 8 x 8, to try it")
    add("--budget", type=float, default=220, help="seconds for all of it, imports too (default: 220)")
    add("--batch", type=int, default=8, help="pictures a step (default: 8)")
    add("--latents", type=int, default=64, help="side of the latents: pixels / 8 (default: 64)")
    add("--steps", type=int, default=15, help="timed steps of each loop (default: 15)")
    add("--only", action="append", default=[], help="names must hold this: lora, eager, ...")
    add("--peak-tflops", type=float, help="of the device in dense bf16, if not known here")
    add("--output", type=Path, help="JSON file to write")
    add("--child", help=argparse.SUPPRESS)
    return found


class Check:
    """The machine, the options, and latent caches of two sizes."""

    def __init__(self, asked: argparse.Namespace, root: Path) -> None:
        self.asked, self.device, self.began = asked, asked.device, float(os.environ["DARKROOM_BENCHMARK"])
        self.config, self.latents = (TINY, 8) if asked.tiny else (SD15, asked.latents)
        self.real, self.small = root / "real", root / "small"
        for folder, config, latents in ((self.real, self.config, self.latents), (self.small, TINY, 8)):
            width = config["cross_attention_dim"]
            write_sd15_cache(folder, items=ITEMS, latents=latents, tokens=TOKENS, width=width)
        self.kind = torch.cuda.get_device_name() if self.device == "cuda" else "cpu"
        known = next((value for part, value in PEAKS.items() if part in self.kind), None)
        self.peak_tflops = asked.peak_tflops or known
        self.guesses = dict(GUESSES[self.device])

    def left(self) -> float:
        """Seconds of the budget; 0 when it is spent."""
        return max(self.asked.budget - (time.time() - self.began), 0.0)

    def settings(self, way: Way, precision: str = "bf16") -> TrainConfig:
        """Section `train` for one configuration."""
        return settings(
            way.method, batch_size=self.asked.batch, rank=16, precision=precision, pinned=self.device == "cuda",
            checkpointing=way.checkpointing, compiled=way.compiled
        )  # fmt: skip

    def trainer(self, cfg: TrainConfig, config: dict[str, Any], folder: Path, device: str) -> Trainer:
        """A fresh trainer of a fresh U-Net."""
        return trainer_of(cfg, random_unet(config, device), folder, device)

    def clean(self) -> None:
        """Give the device's memory back, and ask for equal bytes again."""
        torch.use_deterministic_algorithms(True)
        torch.compiler.reset()
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int | None:
        """Most bytes allocated since `clean`; of a GPU alone."""
        return torch.cuda.max_memory_allocated() if self.device == "cuda" else None

    def measure(self, way: Way) -> dict[str, Any]:
        """Our loop, then the bare one, each alone on the device."""
        cfg, steps, device = self.settings(way), self.asked.steps, self.device
        self.clean()
        trainer = self.trainer(cfg, self.config, self.real, device)
        first = timed(trainer.advance, 1, device)
        timed(trainer.advance, 2, device)
        waited = trainer.waited
        ours = timed(trainer.advance, steps, device)
        found: dict[str, Any] = {"ours": 1 / ours, "waiting": (trainer.waited - waited) / (ours * steps)}
        found |= {"peak": self.peak(), "first_step_seconds": first}
        trainer.close()
        del trainer
        self.clean()
        unet = random_unet(self.config, device)
        prepare(unet, cfg, SEED)
        batches = batches_of(cfg, self.real, device)
        loop = BareLoop(cfg, unet, [batches[number] for number in range(4)], device)
        timed(loop.step, 3, device)
        bare = timed(loop.step, steps, device)
        found |= {"bare": 1 / bare, "bare_peak": self.peak(), "ours_vs_bare": bare / ours}
        if not way.compiled:  # it would have to be compiled anew
            torch.use_deterministic_algorithms(False)
            timed(loop.step, 2, device)
            found["bare_free"] = 1 / timed(loop.step, steps, device)
        flops = flops_of(self.config, cfg, latents=self.latents, tokens=TOKENS) * self.asked.batch
        found["flops"] = flops
        for name, seconds in (("mfu", ours), ("bare_mfu", bare)):
            found[name] = flops / seconds / (self.peak_tflops * 1e12) if self.peak_tflops else None
        return found

    def row(self, way: Way) -> dict[str, Any]:
        """`measure`, or why not."""
        if self.left() < (need := self.guesses[way.mode]):
            return {"skipped": f"needs about {need:.0f} s, {self.left():.0f} s are left"}
        start = time.time()
        found = self.apart(way) if way.compiled else self.tried(way)
        if not {"skipped", "failed"} & set(found):
            self.guesses[way.mode] = 1.2 * (time.time() - start)
        return found | {"seconds": time.time() - start}

    def tried(self, way: Way) -> dict[str, Any]:
        """`measure`, or that the memory is too small, or why nothing can be compiled."""
        if way.compiled and (reason := compiler_lacks(self.device)):
            return {"skipped": f"torch.compile does not work here: {reason}"}
        try:
            return self.measure(way)
        except (DarkroomError, RuntimeError) as error:  # out of memory, no deterministic kernel, no number
            return {"failed": first_line(error)}
        finally:
            self.clean()

    def apart(self, way: Way) -> dict[str, Any]:
        """`tried` in a process of its own: nothing else can break off a compilation."""
        command = [sys.executable, *sys.argv, "--child", way.name]
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            out, errors = child.communicate(timeout=self.left())
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # with the compiler's own processes
            child.communicate()
            return {"skipped": "not done when the budget was spent"}
        if child.returncode:
            return {"failed": (errors.strip().splitlines() or [f"exit code {child.returncode}"])[-1]}
        return json.loads(out.splitlines()[-1])

    def parity(self) -> dict[str, Any]:
        """Losses of the small U-Net's first steps against the CPU's in float32."""
        runs = {"cpu": ("cpu", "no"), "float32": (self.device, "no"), "bfloat16": (self.device, "bf16")}
        losses: dict[str, list[float]] = {}
        for name, (device, precision) in runs.items():
            cfg = replace(self.settings(Way("full"), precision), batch_size=4, warmup=0, learning_rate=1e-3)
            cfg = replace(cfg, loader=replace(cfg.loader, pin_memory=device == "cuda"))
            trainer = self.trainer(cfg, TINY, self.small, device)
            losses[name] = [trainer.advance()["loss"] for _ in range(PARITY_STEPS)]
            trainer.close()
        found: dict[str, Any] = {"losses": losses, "tolerances": TOLERANCES}
        for name, limit in TOLERANCES.items():
            most = max(abs(a - b) / abs(b) for a, b in zip(losses[name], losses["cpu"], strict=True))
            found |= {f"difference_{name}": most, f"passed_{name}": most <= limit}
        return found

    def equal(self, method: str) -> dict[str, Any]:
        """Whether two trainings of the real size end in the same weights."""
        if self.left() < (need := self.guesses["eager"]):
            return {"skipped": f"needs about {need:.0f} s, {self.left():.0f} s are left"}
        try:
            digests = [self.digest(method) for _ in range(2)]
        except (DarkroomError, RuntimeError) as error:
            return {"equal": False, "failed": first_line(error)}
        return {"sha256": digests, "equal": digests[0] == digests[1]}

    def digest(self, method: str) -> str:
        """Of what was trained, after the first steps."""
        trainer = self.trainer(self.settings(Way(method)), self.config, self.real, self.device)
        for _ in range(EQUAL_STEPS):
            trainer.advance()
        digest = hashlib.sha256()
        for piece in chunks({name: value.detach() for name, value in trainer.parameters.items()}):
            digest.update(piece)
        trainer.close()
        del trainer
        self.clean()
        return digest.hexdigest()


def compiler_lacks(device: str) -> str:
    """Why torch.compile cannot be used; empty when it can."""
    try:
        torch.compile(torch.square)(torch.ones(8, device=device))
    except Exception as error:  # no compiler, no headers, no Triton: each tells it in its own way
        return first_line(error)
    return ""


def first_line(error: Exception) -> str:
    """What an error says first, or its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def line(name: str, row: dict[str, Any]) -> str:
    """One row of the table."""
    for why in ("skipped", "failed"):
        if why in row:
            return f"{name:>28}  {why}: {row[why]}"
    cells = [None if (value := row.get(key)) is None else f"{value:.3f}" for key in COLUMNS.values()]
    cells += [None if row[key] is None else f"{row[key] / 1e9:.2f} GB" for key in ("peak", "bare_peak")]
    return f"{name:>28}" + "".join(f"{cell or '-':>10}" for cell in cells)


def check(run: Check) -> dict[str, Any]:
    """Everything, what matters most first."""
    found: dict[str, Any] = {"parity": run.parity(), "equal_bytes": {}, "rows": {}}
    for name, limit in TOLERANCES.items():
        word = "passed" if found["parity"][f"passed_{name}"] else "FAILED"
        print(f"parity of {name}: {word}, {found['parity'][f'difference_{name}']:.2e} (at most {limit:g})")
    print(
        f"{'steps a second':>28}" + "".join(f"{name:>10}" for name in (*COLUMNS, "peak", "bare peak")),
        flush=True,
    )
    chosen = [way for way in WAYS if all(part in way.name for part in run.asked.only)]
    for late in (False, True):
        for way in chosen:
            if way.compiled == late:
                found["rows"][way.name] = run.row(way)
                print(line(way.name, found["rows"][way.name]), flush=True)
        for method in dict.fromkeys(way.method for way in chosen if not late):
            found["equal_bytes"][method] = told = run.equal(method)
            print(f"{'equal bytes, ' + method:>28}  {told.get('equal', told)}", flush=True)
    return found


def main() -> None:
    """Check, print, write, and end with 1 when something differs that must not."""
    asked = parser().parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "gpu_check: error: torch sees no GPU; give --device cpu --tiny, or use a CUDA build of torch"
        )
    apply(SETTINGS)
    with tempfile.TemporaryDirectory() as folder:
        run = Check(asked, Path(folder))
        if asked.child:
            (way,) = (way for way in WAYS if way.name == asked.child)
            print(json.dumps(run.tried(way)))
            return
        print(
            f"{run.kind}, torch {torch.__version__}, dense bf16 at most {run.peak_tflops or '(not known)'} TFLOP/s"
        )
        found: dict[str, Any] = {
            "benchmark": "gpu_check",
            "device": run.kind,
            "torch": str(torch.__version__),
        }
        found |= {name: getattr(asked, name) for name in ("batch", "steps", "tiny", "only", "budget")}
        found |= {"latents": run.latents, "peak_tflops": run.peak_tflops} | check(run)
        found["seconds"] = time.time() - run.began
    if asked.output:
        asked.output.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found))
    equal = [part.get("equal", True) for part in found["equal_bytes"].values()]
    if not all([*equal, *(found["parity"][f"passed_{name}"] for name in TOLERANCES)]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
