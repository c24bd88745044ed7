"""Muon: momentum whose matrix update is made orthogonal by a few Newton-Schulz steps.

PyTorch ships one too, but it works in bfloat16 and one matrix at a time; on a CPU without bfloat16
arithmetic, float32 and one batch per shape are several times faster.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def orthogonal(batch: Tensor, steps: int = 5) -> Tensor:
    """For each matrix of the batch, roughly the nearest orthogonal one."""
    tall = batch.shape[-2] > batch.shape[-1]
    x = batch.mT if tall else batch
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


def shared_orthogonal(batch: Tensor) -> Tensor:
    """The same on every worker, though each computes only its share of the matrices."""
    if not dist.is_initialized():
        return orthogonal(batch)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    result = torch.zeros_like(batch)
    result[mine] = orthogonal(batch[mine])
    dist.all_reduce(result)
    return result


class Muon(torch.optim.Optimizer):
    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                self._step_shape(shape, parameters, group)

    def _step_shape(self, shape: torch.Size, parameters: list[Tensor], group: dict[str, Any]) -> None:
        updates = []
        for parameter in parameters:
            assert parameter.grad is not None
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
            updates.append(parameter.grad.lerp(state["momentum"], group["momentum"]))
        scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
        for parameter, update in zip(parameters, shared_orthogonal(torch.stack(updates)), strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update, alpha=-scale)
