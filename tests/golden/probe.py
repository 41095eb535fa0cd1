"""Which kernel rounds otherwise on this CPU? One digest per kind of operation, in `portable` mode, one thread.

    python tests/golden/probe.py

Inputs are numpy's Philox, so equal on every machine; shapes are those of the embedded networks. CI prints the table, and
comparing two machines' tables names the operation that sets them apart. operations.json keeps what was seen, by CPU kind.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

if TYPE_CHECKING:
    import torch

from stages.core import determinism  # noqa: E402
from stages.harness.provenance import cpu_kind  # noqa: E402

CONFIG = determinism.DeterminismConfig(mode="portable", threads=1)
SEEN = PROJECT / "tests/golden/operations.json"
# Channels in and out, side; most of a training step is in these.
_CONVOLUTIONS = (
    *((4, 48, 16), (48, 48, 16), (96, 96, 8), (128, 128, 4), (192, 96, 8), (256, 128, 4)),
    *((3, 16, 64), (64, 64, 16)),
)
Operation = Callable[[], "list[torch.Tensor]"]


def digests() -> dict[str, str]:
    """First 12 hex digits of sha256 over each operation's float32 result, forward and gradient."""
    import numpy as np
    import torch
    from torch.nn import functional as f

    determinism.apply(CONFIG)
    random = np.random.Generator(np.random.Philox(20261204))

    def uniform(*shape: int) -> torch.Tensor:
        # Not normal: numpy makes those with the machine's own logarithm.
        return torch.from_numpy(random.random(shape, dtype=np.float32) * 2 - 1).requires_grad_()

    def conv(inside: int, outside: int, side: int, kernel: int = 3, stride: int = 1) -> Operation:
        x, bias = uniform(16, inside, side, side), uniform(outside)
        weight = uniform(outside, inside, kernel, kernel)

        def run() -> list[torch.Tensor]:
            inputs = (tensor.to(memory_format=torch.channels_last) for tensor in (x, weight))
            y = f.conv2d(*inputs, bias, stride, kernel // 2)
            return [y, *torch.autograd.grad(y.square().sum(), (x, weight, bias))]

        return run

    def apply(operation: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Operation:
        def run() -> list[torch.Tensor]:
            y = operation(*inputs)
            return [y, *torch.autograd.grad(y.square().sum(), inputs)]

        return run

    def attention(heads: int, width: int, keys: int, queries: int) -> Operation:
        query, key, value = (uniform(16, heads, length, width) for length in (queries, keys, keys))
        return apply(f.scaled_dot_product_attention, query, key, value)

    operations: dict[str, Operation] = {}
    for inside, outside, side in _CONVOLUTIONS:
        operations[f"conv {inside}->{outside} at {side}x{side}"] = conv(inside, outside, side)
    operations |= {
        "conv 1x1 96->48 at 16x16": conv(96, 48, 16, kernel=1),
        "conv stride 2 48->48": conv(48, 48, 16, stride=2),
        "linear 16x48->192": apply(f.linear, uniform(16, 48), uniform(192, 48), uniform(192)),
        "linear 1024x96->768": apply(f.linear, uniform(1024, 96), uniform(768, 96), uniform(768)),
        "linear 512x128->96": apply(f.linear, uniform(512, 128), uniform(96, 128)),
        "attention 24 heads of 4": attention(24, 4, keys=32, queries=64),
        "attention 4 heads of 32": attention(4, 32, keys=32, queries=32),
        "group norm": apply(lambda x: f.group_norm(x, 16), uniform(16, 48, 16, 16)),
        "layer norm": apply(lambda x: f.layer_norm(x, (96,)), uniform(1024, 96)),
        "silu": apply(f.silu, uniform(16, 48, 16, 16)),
        "gelu": apply(f.gelu, uniform(1024, 384)),
        "softmax": apply(lambda x: f.softmax(x, -1), uniform(64, 64)),
        "exp, sin, cos": apply(lambda x: x.exp() + x.sin() + x.cos(), uniform(16, 24)),
        "mean of squares": apply(lambda x: x.square().mean(), uniform(16, 4, 16, 16)),
        "norm of 100,000": apply(lambda x: x.norm(), uniform(100_000)),
    }
    found: dict[str, str] = {}
    for name, run in operations.items():
        digest = hashlib.sha256()
        for tensor in run():
            digest.update(tensor.detach().contiguous().numpy().tobytes())
        found[name] = digest.hexdigest()[:12]
    return found


def main() -> int:
    """Print the table; say which operations differ from each kind that was seen."""
    wanted = determinism.environment(CONFIG)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)
    kind, found = cpu_kind(), digests()
    print(f"operations on {kind}: {json.dumps(found)}")
    seen: dict[str, dict[str, str]] = json.loads(SEEN.read_text())
    for other, theirs in seen.items():
        differing = [name for name, digest in found.items() if theirs.get(name) != digest]
        print(f"against {other}: {', '.join(differing) or 'all the same'}")
    return 1 if kind in seen and seen[kind] != found else 0


if __name__ == "__main__":
    raise SystemExit(main())
