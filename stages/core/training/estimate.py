"""Memory that training will need, before the first step is taken, and what it took.

Letters: B batch, C latent channels, h w latents, L tokens, D width.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

# Bytes of state for each trained value: two float32 moments, two of 8 bits, prodigy's four float32.
_STATE = {"adamw": 8, "adamw8bit": 2, "adafactor": 0, "prodigy": 16}
_RECOMPUTED = (
    "ResnetBlock2D",
    "Transformer2DModel",
)  # what diffusers' checkpointing runs again, one at a time


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes, by what they are for."""

    weights: int
    gradients: int
    optimizer: int
    average: int
    activations: int

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        return self.weights + self.gradients + self.optimizer + self.average + self.activations


def estimate(
    unet: nn.Module,
    inputs: dict[str, Any],
    *,
    optimizer: str,
    average: bool,
    checkpointing: bool,
    autocast: torch.dtype | None,
) -> MemoryEstimate:
    """What one step over `inputs` (keyword arguments of the U-Net's forward, tensors) needs.

    The forward is run on tensors without data, and what it keeps for the backward pass is added up; with checkpointing,
    what is kept between the parts that are run again and the largest of them. The allocator's own loss and the libraries
    are not in it (docs/memory.md compares it with what was measured).
    """
    values = list(unet.parameters())
    trained = sum(value.numel() for value in values if value.requires_grad)
    kept, largest = _saved(unet, inputs, autocast)
    if checkpointing:
        outside, _ = _saved(unet, inputs, autocast, recomputed=True)
        kept = outside + largest
    return MemoryEstimate(
        weights=sum(value.numel() * value.element_size() for value in values),
        gradients=4 * trained,
        optimizer=_STATE[optimizer] * trained,
        average=4 * trained if average else 0,
        activations=kept,
    )


@dataclass
class _Count:
    """Storages that were saved: each is counted once, however many tensors look at it."""

    ignored: set[int]
    seen: dict[int, tuple[int, Tensor]] = field(
        default_factory=dict
    )  # the tensor keeps its storage's address taken

    def pack(self, value: Tensor) -> Tensor:
        if (address := _address(value)) not in self.ignored:
            self.seen[address] = (value.untyped_storage().nbytes(), value)
        return value

    @property
    def total(self) -> int:
        return sum(size for size, _ in self.seen.values())


def _address(value: Tensor) -> int:
    """What two tensors share when they look at the same memory; without data there is no pointer to compare."""
    return value.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _without_data(inputs: dict[str, Any], convert: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The inputs with tensors, also those in dicts, converted."""
    found: dict[str, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, dict):
            found[name] = _without_data(cast(dict[str, Any], value), convert)
        else:
            found[name] = convert(value) if isinstance(value, Tensor) else value
    return found


def _saved(
    unet: nn.Module, inputs: dict[str, Any], autocast: torch.dtype | None, *, recomputed: bool = False
) -> tuple[int, int]:
    """Bytes kept for the backward pass, and those of the largest part that checkpointing runs again.

    recomputed: those parts keep nothing but what goes in.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.func import functional_call

    device = next(unet.parameters()).device.type
    with FakeTensorMode() as mode:
        state: dict[str, Tensor] = {
            name: mode.from_tensor(value) for name, value in [*unet.named_parameters(), *unet.named_buffers()]
        }
        count = _Count({_address(value) for value in state.values()})
        given = _without_data(inputs, mode.from_tensor)
        largest = _Largest(count)
        handles = (
            [
                handle
                for part in unet.modules()
                if type(part).__name__ in _RECOMPUTED
                for handle in largest.watch(part)
            ]
            if not recomputed
            else []
        )
        was = getattr(unet, "is_gradient_checkpointing", False)
        _set(unet, recomputed)
        try:
            with (
                torch.autograd.graph.saved_tensors_hooks(count.pack, lambda value: value),
                torch.autocast(device, dtype=autocast, enabled=autocast is not None),
            ):
                functional_call(unet, state, (), given, strict=False)
        finally:
            _set(unet, was)
            for handle in handles:
                handle.remove()
    return count.total, largest.bytes


class _Largest:
    """The most bytes that are saved inside one of the watched modules."""

    def __init__(self, count: _Count) -> None:
        self.count, self.bytes, self._before = count, 0, 0

    def watch(self, part: nn.Module) -> list[Any]:
        return [part.register_forward_pre_hook(self._enter), part.register_forward_hook(self._leave)]

    def _enter(self, *_: Any) -> None:
        self._before = self.count.total

    def _leave(self, *_: Any) -> None:
        self.bytes = max(self.bytes, self.count.total - self._before)


def _set(unet: Any, on: bool) -> None:
    if on:
        unet.enable_gradient_checkpointing()
    else:
        unet.disable_gradient_checkpointing()


def measured_peak(device: str) -> int:
    """The most bytes that this process has held: on a GPU those that torch allocated, else in RAM, with the libraries."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    # Not getrusage's: a process inherits that one from the process that started it.
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")
    )
    return int(line.split()[1]) * 1024
