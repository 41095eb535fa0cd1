"""What determinism costs on this CPU: training steps under instruction-set caps and thread counts, and their bytes.

    python benchmarks/caps.py [--steps 6] [--rounds 3]

Each variant runs in a process of its own (the caps are read when torch loads), rounds interleaved; the median of the
rounds' seconds a step is reported, as a ratio to `portable` (AVX2, one thread). The last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

VARIANTS = {
    "portable": ("portable", 1, {}),
    "portable_2_threads": ("portable", 2, {}),
    "native": ("native", 1, {}),
    "native_2_threads": ("native", 2, {}),
    "mkl_compatible": ("portable", 1, {"MKL_CBWR": "COMPATIBLE"}),
}


def child(steps: int) -> None:
    """Train the embedded base's whole U-Net for `steps` steps of 16 drawn latents; print seconds a step and the sha256."""
    import time

    import torch

    from stages.core.models.unet import Conditions, load_unet, predict
    from stages.core.safetensors_io import save_bytes
    from stages.core.sampler import normal
    from stages.core.store import sha256_bytes

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.use_deterministic_algorithms(True)
    unet = load_unet(PROJECT / "data/embedded/tiny-sd/unet", "cpu").train()
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1.0e-4)
    seconds: list[float] = []
    for step in range(steps):
        start = time.perf_counter()
        noisy = normal(1, "noisy", step, shape=(16, 4, 16, 16))
        text = normal(1, "text", step, shape=(16, 32, 128))
        times = torch.arange(16) * 60 + step
        loss = (
            (predict(unet, noisy, times, Conditions(text)) - normal(1, "target", step, shape=(16, 4, 16, 16)))
            .square()
            .mean()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    digest = sha256_bytes(save_bytes({name: value.detach() for name, value in unet.named_parameters()}))
    print(json.dumps({"seconds": statistics.median(seconds[1:]), "sha256": digest}))


def main() -> None:
    """Run all variants, interleaved, and print one line each and the JSON."""
    from stages.core.determinism import DeterminismConfig, environment
    from stages.harness.provenance import cpu_kind

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.steps)
        return
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    digests: dict[str, set[str]] = {name: set() for name in VARIANTS}
    for _ in range(options.rounds):
        for name, (mode, threads, extra) in VARIANTS.items():
            variables = environment(DeterminismConfig(mode=mode, threads=threads))
            done = subprocess.run(
                [sys.executable, __file__, "--child", "--steps", str(options.steps)],
                env={**os.environ, **variables, **extra},
                capture_output=True,
                text=True,
                check=True,
            )
            found = json.loads(done.stdout.strip().splitlines()[-1])
            seconds[name].append(found["seconds"])
            digests[name].add(found["sha256"])
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        prints = ", ".join(sorted(digest[:12] for digest in digests[name]))
        print(f"{name:>20}  {value:.3f} s a step  {value / medians['portable']:.2f} x portable  {prints}")
    print(
        json.dumps(
            {
                "cpu": cpu_kind(),
                "seconds_portable": round(medians["portable"], 4),
                "ratio_to_portable": {
                    name: round(value / medians["portable"], 3) for name, value in medians.items()
                },
                "sha256": {name: sorted(values) for name, values in digests.items()},
            },
            sort_keys=True,
        )
    )


if __name__ == "__main__":
    main()
