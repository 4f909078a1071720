"""Optimiser and learning-rate schedule, both timm's."""

from typing import Any

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from reproduction.config.schema import Recipe


def build_optimizer(model: nn.Module, recipe: Recipe) -> Optimizer:
    """AdamW or SGD with momentum (without Nesterov); vectors, biases and the like do not decay.

    Both are torch's fused ones, which take one pass over each parameter, and with a scaler leave
    the skipping of a step to the device.
    """
    settings: dict[str, Any] = {"lr": recipe.lr, "weight_decay": recipe.weight_decay, "fused": True}
    if recipe.optimizer == "adamw":
        return create_optimizer_v2(model, opt="adamw", **settings)
    # timm's "sgd" is Nesterov's
    optimizer = create_optimizer_v2(model, opt="momentum", momentum=recipe.momentum, **settings)
    if recipe.momentum > 0:  # the kernel leaves them uninitialised if a scaler skips the first step
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Goes on from a saved state, but by the kernels that `optimizer` was built with.

    A state names those it was saved by. Fused kernels walk through memory, whatever the strides:
    what is kept of a parameter gets its strides, which a file from elsewhere need not have.
    """
    kernels = {key: optimizer.defaults[key] for key in ("fused", "foreach")}
    groups = [{**group, **kernels} for group in state["param_groups"]]
    optimizer.load_state_dict({**state, "param_groups": groups})
    for parameter, kept in optimizer.state.items():
        for name, value in kept.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                kept[name] = torch.empty_like(parameter).copy_(value)


def build_schedule(optimizer: Optimizer, recipe: Recipe, batches_per_epoch: int) -> "Schedule":
    """The recipe's schedule."""
    every_batch = recipe.schedule_step == "batch"
    unit = batches_per_epoch if every_batch else 1
    scheduler = CosineLRScheduler(
        optimizer,
        t_initial=max(1, (recipe.epochs - recipe.cooldown_epochs) * unit),
        lr_min=recipe.min_lr,
        warmup_t=recipe.warmup_epochs * unit,
        warmup_lr_init=recipe.warmup_lr,
        t_in_epochs=not every_batch,
    )
    return Schedule(optimizer, scheduler, batches_per_epoch)


class Schedule:
    """Linear warm-up, half a cosine down to `min_lr`, then cooldown at `min_lr`."""

    def __init__(self, optimizer: Optimizer, scheduler: CosineLRScheduler, batches_per_epoch: int):
        self.optimizer, self.scheduler = optimizer, scheduler
        self.batches_per_epoch = batches_per_epoch

    def set(self, epoch: int, batch: int) -> float:
        """Sets and returns the learning rate of a batch of an epoch, both counted from 0."""
        self.scheduler.step(epoch)
        self.scheduler.step_update(epoch * self.batches_per_epoch + batch)
        return self.optimizer.param_groups[0]["lr"]
