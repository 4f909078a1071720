"""Optimiser and learning-rate schedule, both timm's."""

from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn
from torch.optim import Optimizer

from reproduction.config import Recipe


def build_optimizer(model: nn.Module, recipe: Recipe) -> Optimizer:
    """AdamW or SGD with momentum (without Nesterov); vectors, biases and the like do not decay."""
    lr, weight_decay = recipe.lr, recipe.weight_decay
    if recipe.optimizer == "adamw":
        return create_optimizer_v2(model, opt="adamw", lr=lr, weight_decay=weight_decay)
    return create_optimizer_v2(
        model,
        opt="momentum",  # timm's "sgd" is Nesterov's
        lr=lr,
        weight_decay=weight_decay,
        momentum=recipe.momentum,
    )


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
