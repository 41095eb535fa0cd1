"""What the makers of the embedded base share: parameters, fixed threads, pictures as tensors, checkpoints.

Everything that takes long is kept in the git-ignored `.darkroom/embedded/`: a killed maker, started again, goes on at
its last checkpoint and ends in the same bytes. Randomness is a function of (seed, purpose, step), never of the past.

Legend: B pictures, C channels, H W pixels.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from torch import Tensor, nn

from stages.core import determinism
from stages.core.safetensors_io import canonicalise
from stages.core.store import file_digests, write_atomic

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "data" / "embedded"
WORK = ROOT / ".darkroom" / "embedded"
SD = HERE / "tiny-sd"
CLIP = HERE / "tiny-clip"


def start(part: str = "") -> dict[str, Any]:
    """Read params.yaml and fix threads and instruction set; the process starts itself anew if they were not set.

    part: the section of params.yaml whose own `threads`, if it has them, count.
    """
    params: dict[str, Any] = yaml.safe_load((HERE / "params.yaml").read_text())
    threads = params.get(part, {}).get("threads", params["determinism"]["threads"])
    config = determinism.DeterminismConfig(**params["determinism"] | {"threads": threads})
    # A second thread that waits spinning takes the core from whatever else runs: a step took 1.12 s, not 0.73.
    wanted = determinism.environment(config) | {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | wanted)
    determinism.apply(config)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs 2%
    return params


def generator(seed: int, purpose: str, step: int) -> torch.Generator:
    """The random numbers of one step, whatever came before."""
    digest = hashlib.sha256(f"{seed} {purpose} {step}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7]))


def order(seed: int, purpose: str, count: int, batch: int, step: int) -> Tensor:
    """Indices (batch,) int64 of step `step`: every epoch is a new permutation of `count` items, a rest is skipped."""
    per_epoch = count // batch
    epoch, position = divmod(step, per_epoch)
    permutation = torch.randperm(count, generator=generator(seed, f"{purpose} order", epoch))
    return permutation[position * batch : (position + 1) * batch]


def stack(pictures: Iterable[Image.Image]) -> Tensor:
    """RGB pictures as one tensor (B, 3, H, W), uint8."""
    arrays_BHWC = np.stack([np.asarray(picture) for picture in pictures])
    return torch.from_numpy(arrays_BHWC).permute(0, 3, 1, 2).contiguous()


def to_float(pictures_BCHW: Tensor) -> Tensor:
    """uint8 in 0..255 to float32 in -1..1, channels last in memory (measured: nearly twice as fast)."""
    scaled = pictures_BCHW.to(torch.float32) / 127.5 - 1.0
    return scaled.contiguous(memory_format=torch.channels_last)


def learning_rate(peak: float, step: int, warmup: int, steps: int) -> float:
    """Linear warm-up, then half a cosine that reaches zero at `steps`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1.0 + float(np.cos(np.pi * (step - warmup) / max(1, steps - warmup))))


class Checkpoint:
    """The full state of one maker in `.darkroom/embedded/NAME.pt`, used again only under the same parameters."""

    def __init__(self, name: str, params: Any) -> None:
        self.path = WORK / f"{name}.pt"
        self.key = json.dumps(params, sort_keys=True)

    def load(self) -> dict[str, Any] | None:
        """The state last saved, or None when there is none for these parameters."""
        if not self.path.is_file():
            return None
        state: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True)
        return state if state.pop("key") == self.key else None

    def save(self, **state: Any) -> None:
        """Replace the last state by this one, whole or not at all."""
        buffer = BytesIO()
        torch.save(state | {"key": self.key}, buffer)
        write_atomic(self.path, buffer.getvalue())


def train(
    checkpoint: Checkpoint,
    modules: dict[str, nn.Module],
    optimizer: torch.optim.Optimizer,
    steps: int,
    step_loss: Callable[[int], Tensor],
    rate: Callable[[int], float],
    *,
    every: int,
    averaged: tuple[nn.Module, nn.Module, float] | None = None,
    at_checkpoint: Callable[[int], None] | None = None,
) -> list[tuple[int, float]]:
    """Run `step_loss` for steps 0..steps-1 with gradient clipping at 1; return (step, mean loss) per checkpoint.

    modules: whatever has weights, by name; all of it is in the checkpoint. averaged: (source, copy, decay), the copy
    follows the source as an exponential moving average and should be among `modules`.
    """
    log: list[tuple[int, float]] = []
    first, total, counted = 0, 0.0, 0
    state = checkpoint.load()
    if state is not None:
        for name, module in modules.items():
            module.load_state_dict(state["modules"][name])
        optimizer.load_state_dict(state["optimizer"])
        first, log = state["step"], [tuple(entry) for entry in state["log"]]
        print(f"going on at step {first}", flush=True)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.zero_grad(set_to_none=True)
        loss = step_loss(step)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        if averaged is not None:
            source, copy, decay = averaged
            decay = min(decay, (step + 1) / (step + 10))
            with torch.no_grad():
                torch._foreach_lerp_(list(copy.parameters()), list(source.parameters()), 1.0 - decay)
        total, counted = total + float(loss.detach()), counted + 1
        if (step + 1) % every == 0 or step + 1 == steps:
            log.append((step + 1, total / counted))
            print(f"step {step + 1}/{steps} loss {total / counted:.4f}", flush=True)
            total, counted = 0.0, 0
            states = {name: module.state_dict() for name, module in modules.items()}
            checkpoint.save(step=step + 1, modules=states, optimizer=optimizer.state_dict(), log=log)
            if at_checkpoint is not None:
                at_checkpoint(step + 1)
    return log


def kept(name: str, key: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What `make` returns, from `.darkroom/embedded/NAME.pt` when it was made under the same key."""
    path = WORK / f"{name}.pt"
    if path.is_file():
        state: dict[str, Any] = torch.load(path, weights_only=True)
        if state.pop("key") == key:
            return state
    made = make()
    buffer = BytesIO()
    torch.save(made | {"key": key}, buffer)
    write_atomic(path, buffer.getvalue())
    return made


def digests(part: str) -> list[str]:
    """sha256 of the files of one part of tiny-sd, in the order of their names."""
    return list(file_digests(SD / part).values())


def draw(pipe: Any, prompts: Sequence[str], first_seed: int) -> list[Image.Image]:
    """One 64x64 RGB picture for each prompt: 25 steps, guidance 4, noise of seed `first_seed` plus the prompt's place."""
    noise = [torch.Generator().manual_seed(first_seed + index) for index in range(len(prompts))]
    return pipe(
        list(prompts), height=64, width=64, num_inference_steps=25, guidance_scale=4.0, generator=noise
    ).images


def record(name: str, figures: dict[str, Any]) -> None:
    """Keep the figures of one maker in `.darkroom/embedded/NAME.json`, for the README and the tests."""
    write_atomic(WORK / f"{name}.json", (json.dumps(figures, indent=2, sort_keys=True) + "\n").encode())


def save_pretrained(model: Any, folder: Path) -> None:
    """Save a diffusers or transformers model in fp16, with canonical safetensors bytes."""
    model.to(torch.float16).save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        canonicalise(path)
    scrub(folder / "config.json")


def scrub(path: Path) -> None:
    """Rewrite a JSON configuration sorted, without where it was loaded from."""
    config = json.loads(path.read_text())
    config.pop("_name_or_path", None)
    write_atomic(path, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())
