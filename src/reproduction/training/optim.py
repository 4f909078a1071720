"""Optimiser and learning-rate schedule, both timm's."""

from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn
from torch.optim import Optimizer


def build_optimizer(
    model: nn.Module, *, name: str, lr: float, weight_decay: float, momentum: float
) -> Optimizer:
    """AdamW or SGD with momentum (without Nesterov); vectors and biases do not decay."""
    opt = {"adamw": "adamw", "sgd": "momentum"}[name]  # timm's "sgd" is Nesterov's
    if name == "adamw":
        return create_optimizer_v2(model, opt=opt, lr=lr, weight_decay=weight_decay)
    return create_optimizer_v2(model, opt=opt, lr=lr, weight_decay=weight_decay, momentum=momentum)


class Schedule:
    """Linear warm-up, half a cosine down to `min_lr`, then cooldown at `min_lr`.

    Steps once an epoch, as published, or with `every_batch`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        epochs: int,
        batches_per_epoch: int,
        every_batch: bool,
        min_lr: float,
        warmup_lr: float,
        warmup_epochs: int,
        cooldown_epochs: int,
    ):
        self.batches_per_epoch = batches_per_epoch
        unit = batches_per_epoch if every_batch else 1
        self.optimizer = optimizer
        self.scheduler = CosineLRScheduler(
            optimizer,
            t_initial=max(1, (epochs - cooldown_epochs) * unit),
            lr_min=min_lr,
            warmup_t=warmup_epochs * unit,
            warmup_lr_init=warmup_lr,
            t_in_epochs=not every_batch,
        )

    def set(self, epoch: int, batch: int) -> float:
        """Sets and returns the learning rate of a batch of an epoch, both counted from 0."""
        self.scheduler.step(epoch)
        self.scheduler.step_update(epoch * self.batches_per_epoch + batch)
        return self.optimizer.param_groups[0]["lr"]
