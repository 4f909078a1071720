"""One training step: from a batch of uint8 images to updated parameters.

The optimiser is torch's, the schedule timm's.

Letters: b batch, c classes, h w image.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from reproduction.config import Recipe
from reproduction.data.inputs import TrainingInputs
from reproduction.data.seeding import Purpose, seed_device
from reproduction.training.distributed import World
from reproduction.training.evaluate import autocast
from tokenmixup import Output, TokenMixup, training_loss


class MicroBatch(NamedTuple):
    """The mean loss of a micro-batch and the model's output for it."""

    loss: Tensor
    output: Output


class TrainingStep:
    """Updates the parameters of `module` by one batch per call, together with all other ranks.

    Holds the optimiser, the gradient scaler and the averaged weights. After a step `not_finite`, on
    the device, is 1 if a loss or gradient was not finite, else 0. All ranks skip such a step if
    `recipe.non_finite=skip`, or if float16's scaler finds the overflow.
    """

    def __init__(
        self, module: TokenMixup, inputs: TrainingInputs, recipe: Recipe, world: World, seed: int
    ):
        self.module, self.inputs, self.recipe, self.world = module, inputs, recipe, world
        self.seed = seed
        self.parameters = [*module.parameters()]
        self.average: ModelEmaV3 | None = None
        if recipe.ema_decay is not None:
            self.average = ModelEmaV3(module.model, decay=recipe.ema_decay)
        self.mixes = True
        self.clones = False  # the output, whose memory CUDA graphs use again
        self.parallel = self._wrap_module()
        self.optimizer = build_optimizer(module, recipe)
        self.uses_scaler = recipe.precision == "float16"
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=self.uses_scaler)
        self.skips = recipe.non_finite == "skip"
        self.not_finite = torch.zeros((), device=world.device)
        if self.skips:
            self.optimizer.register_step_pre_hook(partial(_skip_if, self.not_finite))

    def __call__(
        self, images: Tensor, classes: Tensor, step: int, global_size: int
    ) -> list[MicroBatch]:
        """Updates the parameters by the mean loss over a global batch of `global_size` images.

        `images` (`b 3 h w`, uint8) and `classes` (`b`) are this rank's share of it. All random
        draws are a function of seed, `step` and rank. The share is cut into `grad_accum_steps`
        consecutive micro-batches, whose sizes differ by at most one; HTM matches pairs within each.
        Raises FloatingPointError if a gain is not finite, unless `recipe.non_finite=skip`.
        """
        device, key = self.world.device, (self.seed, step, self.world.rank)
        images = images.to(device, non_blocking=True)
        images, targets = self.inputs(images, classes.to(device, non_blocking=True), *key)
        seed_device(device, Purpose.DROPOUT, *key)

        # A skipped step also restores the buffers and the averaged weights.
        restorable = self._buffers_and_average() if self.skips or self.uses_scaler else []
        backup = [value.clone() for value in restorable]

        count = self.recipe.grad_accum_steps
        no_sync = getattr(self.parallel, "no_sync", nullcontext)  # DistributedDataParallel has it
        micro_batches: list[MicroBatch] = []
        for micro_images, micro_targets in zip(
            images.tensor_split(count), targets.tensor_split(count), strict=True
        ):
            # Only the last backward pass reduces the gradients over the ranks.
            is_last = len(micro_batches) == count - 1
            with nullcontext() if is_last else no_sync():
                with autocast(device, self.recipe.precision):
                    output: Output = self.parallel(micro_images, micro_targets)
                if self.clones:
                    output = tree_map_only(Tensor, Tensor.clone, output)
                loss = training_loss(output)
                # DDP averages over the ranks: the world size turns that mean into a sum.
                weight = len(micro_images) * self.world.size / global_size
                self.scaler.scale(loss * weight).backward()
            micro_batches.append(MicroBatch(loss.detach(), output))
        norm = self._clip_gradients()

        losses = [micro_batch.loss for micro_batch in micro_batches]
        self.not_finite.copy_((~torch.stack([norm, *losses]).isfinite()).any())
        if self.skips:
            self.world.sum(self.not_finite).clamp_(max=1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.module.model)
        for value, old in zip(restorable, backup, strict=True):
            value.copy_(torch.where(self.not_finite > 0, old, value))
        return micro_batches

    def _clip_gradients(self) -> Tensor:
        """Clips the gradients and returns their norm before clipping.

        With a scaler this is the norm of the scaled gradients: the scaler skips the step if it
        overflows, and querying the scaler would wait for the device.
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm, max_norm = get_total_norm(gradients), self.recipe.clip_grad_norm
        if max_norm is not None:
            self.scaler.unscale_(self.optimizer)
            true_norm = get_total_norm(gradients) if self.uses_scaler else norm
            clip_grads_with_norm_(self.parameters, max_norm, true_norm)
        return norm

    def _buffers_and_average(self) -> list[Tensor]:
        average = {} if self.average is None else self.average.module.state_dict()
        return [*self.module.buffers(), *average.values()]

    def _wrap_module(self) -> nn.Module:
        if self.world.size == 1:
            return self.module
        devices = [self.world.device] if self.world.device.type == "cuda" else None
        return DistributedDataParallel(self.module, device_ids=devices)

    def stop_mixing(self) -> None:
        """Stops the mixing of images and tokens for the rest of the run; idempotent."""
        if not self.mixes:
            return
        self.mixes = False
        self.inputs.stop_mixing()
        self.module.stop_mixing()
        self.parallel = self._wrap_module()  # the old wrapper would wait for ScoreNet's gradients

    @property
    def evaluated(self) -> nn.Module:
        """The plain model to evaluate and save: the averaged one, if weights are averaged."""
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


def _skip_if(not_finite: Tensor, optimizer: Optimizer, *_: Any) -> None:
    """Lets the fused kernels skip a step, also where a scaler has found the gradients finite."""
    setattr(optimizer, "found_inf", not_finite)


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


def build_schedule(
    optimizer: Optimizer, recipe: Recipe, batches_per_epoch: int
) -> Callable[[int, int], float]:
    """Returns `schedule(epoch, batch)`, which sets and returns the learning rate of a batch.

    Both count from 0. Linear warm-up, half a cosine down to `min_lr`, then cooldown at `min_lr`.
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

    def schedule(epoch: int, batch: int) -> float:
        scheduler.step(epoch)
        scheduler.step_update(epoch * batches_per_epoch + batch)
        return optimizer.param_groups[0]["lr"]

    return schedule
