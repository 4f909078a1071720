"""The optimiser is torch's, the schedule timm's."""

from collections.abc import Callable
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn
from torch.optim import Optimizer

from reproduction.config import Recipe


def build_optimizer(model: nn.Module, recipe: Recipe) -> Optimizer:
    """Builds AdamW, or SGD with (non-Nesterov) momentum; biases and other vectors do not decay.

    The fused kernels take one pass over each parameter and skip a scaler's step on the device.
    """
    settings: dict[str, Any] = {"lr": recipe.lr, "weight_decay": recipe.weight_decay, "fused": True}
    if recipe.optimizer == "adamw":
        return create_optimizer_v2(model, opt="adamw", **settings)
    # timm's "sgd" uses Nesterov momentum
    optimizer = create_optimizer_v2(model, opt="momentum", momentum=recipe.momentum, **settings)
    if recipe.momentum > 0:
        # The kernel leaves the buffers uninitialised if a scaler skips the first step.
        for group in optimizer.param_groups:  # frozen parameters are in none
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def set_capturable(optimizer: Optimizer, is_captured: bool) -> None:
    """Lets a CUDA graph capture the steps of AdamW; SGD's can be always."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = is_captured


def build_schedule(
    optimizer: Optimizer,
    recipe: Recipe,
    batches_per_epoch: int,
    device: torch.device | None = None,
) -> Callable[[int, int], float]:
    """Returns `schedule(epoch, batch)`, which sets and returns the learning rate of a batch.

    Both count from 0. Linear warm-up, half a cosine down to `min_lr`, then cooldown at `min_lr`.
    With a device the optimiser reads it there, from the same float32 tensors in all steps.
    """
    every_batch = recipe.schedule_step == "batch"
    unit = batches_per_epoch if every_batch else 1
    scheduler = CosineLRScheduler(
        optimizer,
        t_initial=max(1, (recipe.epochs - recipe.cooldown_epochs) * unit),
        lr_min=recipe.min_lr,
        warmup_t=recipe.warmup_epochs * unit,
        warmup_lr_init=recipe.warmup_lr,
        cycle_decay=0.0,  # of later cycles, of which there are none; 1 makes timm warn of one epoch
        t_in_epochs=not every_batch,
    )

    held = [torch.zeros((), device=device) for _ in optimizer.param_groups] if device else []

    def hold() -> None:
        for group, tensor in zip(optimizer.param_groups, held, strict=False):
            group["lr"] = tensor.fill_(group["lr"])

    def schedule(epoch: int, batch: int) -> float:
        scheduler.step(epoch)
        scheduler.step_update(epoch * batches_per_epoch + batch)
        lr: float = optimizer.param_groups[0]["lr"]
        hold()
        return lr

    hold()
    return schedule
