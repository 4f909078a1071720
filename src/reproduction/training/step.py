"""One training step, from the images of the workers to updated parameters, top to bottom.

Below it the optimiser, torch's, and the schedule, timm's.

Letters: b batch, c classes, h w image.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from reproduction.config import Recipe
from reproduction.data.inputs import TrainingInputs
from reproduction.data.seeding import Purpose, seed_device
from reproduction.training.distributed import World
from reproduction.training.evaluate import autocast
from tokenmixup import Output, TokenMixup, training_loss


class MicroBatch(NamedTuple):
    """The mean loss of a micro-batch and what the model returned for it."""

    loss: Tensor
    output: Output


class TrainingStep:
    """One call is one update of the parameters of `module`, together with all ranks.

    Holds the state of optimiser, scaler and averaged weights. `not_finite`, on the device, is 1 if
    a loss or gradient of the last step was not finite, else 0. `recipe.non_finite=skip`, or
    float16's scaler, then leaves the step out on all ranks.
    """

    def __init__(
        self, module: TokenMixup, inputs: TrainingInputs, recipe: Recipe, world: World, seed: int
    ):
        self.module, self.inputs, self.recipe, self.world = module, inputs, recipe, world
        self.seed, self.parameters = seed, [*module.parameters()]
        self.average: ModelEmaV3 | None = None
        if recipe.ema_decay is not None:
            self.average = ModelEmaV3(module.model, decay=recipe.ema_decay)
        self.score_loss_weight = 0.0 if module.htm is None else module.htm.score_loss_weight
        self.parallel, self.mixes = self._parallel(), True
        self.optimizer = build_optimizer(module, recipe)
        self.uses_scaler = recipe.precision == "float16"
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=self.uses_scaler)
        self.skips = recipe.non_finite == "skip"
        self.not_finite = torch.zeros((), device=world.device)

    def __call__(
        self, images: Tensor, classes: Tensor, step: int, global_size: int
    ) -> list[MicroBatch]:
        """Updates by the mean loss of `global_size` images, of which these are this rank's.

        `images`: `b 3 h w` uint8, `classes`: `b`. All that is drawn is a function of seed, `step`
        and rank. The batch is cut into `grad_accum_steps` consecutive micro-batches, whose sizes
        differ by one at most; pairs are matched within each. Raises FloatingPointError where HTM
        finds a gain that is not finite, unless such are skipped.
        """
        device, key = self.world.device, (self.seed, step, self.world.rank)
        images = images.to(device, non_blocking=True)
        images, targets = self.inputs(images, classes.to(device, non_blocking=True), *key)
        seed_device(device, Purpose.DROPOUT, *key)

        followers = self._followers() if self.skips or self.uses_scaler else []
        before = [value.clone() for value in followers]
        count = self.recipe.grad_accum_steps
        parts: list[MicroBatch] = []
        for micro_images, micro_targets in zip(
            images.tensor_split(count), targets.tensor_split(count), strict=True
        ):
            is_last = len(parts) == count - 1  # its backward pass sums over the ranks
            with nullcontext() if is_last else self._no_sync():
                with autocast(device, self.recipe.precision):
                    output: Output = self.parallel(micro_images, micro_targets)
                loss = training_loss(output, self.score_loss_weight)
                # DDP takes the mean over the ranks
                share = len(micro_images) * self.world.size / global_size
                self.scaler.scale(loss * share).backward()
            parts.append(MicroBatch(loss.detach(), output))
        norm = self._clip()

        losses = [part.loss for part in parts]
        self.not_finite = (~torch.stack([norm, *losses]).isfinite()).any().float()
        if self.skips:
            self.world.sum(self.not_finite).clamp_(max=1)
            setattr(self.optimizer, "found_inf", self.not_finite)  # as a scaler tells the kernels
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.module.model)
        for value, old in zip(followers, before, strict=True):
            value.copy_(torch.where(self.not_finite > 0, old, value))
        return parts

    def stop_mixing(self) -> None:
        """From here on neither images nor tokens are mixed; once more changes nothing."""
        if not self.mixes:
            return
        self.mixes = False
        self.inputs.stop_mixing()
        self.module.stop_mixing()
        self.parallel = self._parallel()  # the other would wait for ScoreNet's gradients

    def _parallel(self) -> nn.Module:
        if self.world.size == 1:
            return self.module
        devices = [self.world.device] if self.world.device.type == "cuda" else None
        return DistributedDataParallel(self.module, device_ids=devices)

    def _no_sync(self) -> AbstractContextManager[None]:
        if isinstance(self.parallel, DistributedDataParallel):
            return self.parallel.no_sync()
        return nullcontext()

    def _followers(self) -> list[Tensor]:
        """What a step changes besides parameters and the optimiser's state."""
        average = {} if self.average is None else self.average.module.state_dict()
        return [*self.module.buffers(), *average.values()]

    def _clip(self) -> Tensor:
        """Clips the gradients; returns their norm before, with a scaler that of the scaled ones.

        Where that overflows the scaler leaves the step out; asking it would wait for the device.
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm, most = get_total_norm(gradients), self.recipe.clip_grad_norm
        if most is not None:
            self.scaler.unscale_(self.optimizer)
            true_norm = get_total_norm(gradients) if self.uses_scaler else norm
            clip_grads_with_norm_(self.parameters, most, true_norm)
        return norm

    @property
    def evaluated(self) -> nn.Module:
        """The plain model whose weights are the result: the average, if there is one."""
        return self.module.model if self.average is None else self.average.module

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "model_ema": None if self.average is None else self.average.module.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.average is not None:
            self.average.module.load_state_dict(state["model_ema"])


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
        for group in optimizer.param_groups:  # frozen parameters are in none
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def build_schedule(
    optimizer: Optimizer, recipe: Recipe, batches_per_epoch: int
) -> Callable[[int, int], float]:
    """Sets and returns the learning rate of a batch of an epoch, both counted from 0.

    Linear warm-up, half a cosine down to `min_lr`, then cooldown at `min_lr`.
    """
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

    def schedule(epoch: int, batch: int) -> float:
        scheduler.step(epoch)
        scheduler.step_update(epoch * batches_per_epoch + batch)
        return optimizer.param_groups[0]["lr"]

    return schedule
