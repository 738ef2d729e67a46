"""AdamW on one flat vector: float32 master weights beside a bfloat16 model, gradients summed in float32.

Gradients of micro-batches are plain sums, in a buffer that ranks can add up in a few large pieces; they are divided by
the weight sum only then. Weight decay is for matrices, not for norms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

WARM_UP, DECAY, FLOOR = 0.04, 0.2, 0.1  # shares of all steps, of all steps, and of the peak (WSD)
CLIP, WEIGHT_DECAY, BETAS, EPSILON = 1.0, 0.01, (0.9, 0.999), 1e-8
BUCKET = 16 << 20  # elements of one all-reduce, and of one slice of the update


def learning_rate(step: int, total: int, peak: float, schedule: str) -> float:
    """Of step `step` (from 0) of `total`: linear warm-up, then `cosine` to 0, or `wsd`: flat, then down to a floor."""
    warm = max(1, math.ceil(WARM_UP * total))
    if step < warm:
        return peak * (step + 1) / warm
    if schedule == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * (step - warm) / max(1, total - warm)))
    decay = max(1, round(DECAY * total))
    left = max(0, total - step)
    return peak if left > decay else peak * (FLOOR + (1.0 - FLOOR) * left / decay)


class AdamW:
    """Optimiser state of a model, on its device.

    master, grad, first, second: flat [P], float32 (float64 for a float64 model). A model of the master's own type
    holds views of it; any other is written after each update.
    """

    def __init__(self, model: nn.Module) -> None:
        named = sorted(model.named_parameters(), key=lambda item: (item[1].ndim < 2, item[0]))
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        device, dtype = self.parameters[0].device, self.parameters[0].dtype
        kind = torch.promote_types(dtype, torch.float32)
        size = sum(parameter.numel() for parameter in self.parameters)
        self.decayed = sum(parameter.numel() for parameter in self.parameters if parameter.ndim > 1)
        self.master, self.grad, self.first, self.second = (
            torch.zeros(size, dtype=kind, device=device) for _ in range(4)
        )
        self.updates = 0
        self._shared = kind == dtype
        for parameter, master in zip(self.parameters, self._views(self.master), strict=True):
            master.copy_(parameter.detach())
            if self._shared:
                parameter.data = master
        self._grads = self._views(self.grad)

    def _views(self, flat: Tensor) -> list[Tensor]:
        sizes = [parameter.numel() for parameter in self.parameters]
        parts: tuple[Tensor, ...] = flat.split(sizes)  # type: ignore[no-untyped-call]
        return [part.view_as(parameter) for part, parameter in zip(parts, self.parameters, strict=True)]

    def collect(self) -> None:
        """Add the model's gradients to the sum and drop them."""
        for parameter, total in zip(self.parameters, self._grads, strict=True):
            if parameter.grad is not None:
                total += parameter.grad
                parameter.grad = None

    def buckets(self) -> tuple[Tensor, ...]:
        """The gradient sum in pieces, to be summed over ranks in place."""
        pieces: tuple[Tensor, ...] = self.grad.split(BUCKET)  # type: ignore[no-untyped-call]
        return pieces

    @torch.no_grad()
    def step(self, rate: float, divisor: float) -> float:
        """One update from the gradient sum over `divisor`; the norm before clipping. The sum is zeroed.

        Nothing is changed where the norm is not finite.
        """
        norm = float(torch.linalg.vector_norm(self.grad, dtype=torch.promote_types(self.grad.dtype, torch.float32)))
        norm /= divisor
        if math.isfinite(norm):
            self.updates += 1
            scale = min(1.0, CLIP / (norm + 1e-12)) / divisor
            for start in range(0, len(self.master), BUCKET):
                self._slice(slice(start, min(start + BUCKET, len(self.master))), rate, scale)
            self.publish()
        self.grad.zero_()
        return norm

    def _slice(self, part: slice, rate: float, scale: float) -> None:
        master, grad, first, second = (t[part] for t in (self.master, self.grad, self.first, self.second))
        grad *= scale
        first.lerp_(grad, 1.0 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(grad, grad, value=1.0 - BETAS[1])
        decayed = max(0, min(part.stop, self.decayed) - part.start)
        master[:decayed] *= 1.0 - rate * WEIGHT_DECAY
        root = second.sqrt().div_(math.sqrt(1.0 - BETAS[1] ** self.updates)).add_(EPSILON)
        master.addcdiv_(first, root, value=-rate / (1.0 - BETAS[0] ** self.updates))

    @torch.no_grad()
    def publish(self) -> None:
        """Write the master weights into a model of another type."""
        if not self._shared:
            for parameter, master in zip(self.parameters, self._views(self.master), strict=True):
                parameter.copy_(master)

    def state(self) -> dict[str, Tensor]:
        """`master.NAME`, `first.NAME`, `second.NAME`: views, to be copied before the next update."""
        return {
            f"{kind}.{name}": view
            for kind in ("master", "first", "second")
            for name, view in zip(self.names, self._views(getattr(self, kind)), strict=True)
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor], updates: int) -> None:
        """Take over what `state` gave, and the number of updates so far."""
        for name, view in self.state().items():
            view.copy_(state[name])
        self.updates = updates
        self.publish()
