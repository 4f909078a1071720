"""The training step, top to bottom: from a batch of images to new weights.

The epochs around it are in fit.py. Letters: b batch, c classes, h w image.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from reproduction.config import LOSS, Config, Recipe
from reproduction.data.inputs import Draws, Mixed, build_training_inputs
from reproduction.data.seeding import Purpose, seed_device
from reproduction.models.build import compile_module, place
from reproduction.models.weights import load_state
from reproduction.training.evaluate import autocast
from reproduction.training.graph import StepGraph
from reproduction.training.metrics import constant
from reproduction.training.optimizers import build_optimizer
from reproduction.training.ranks import World
from tokenmixup import Output, TokenMixup, training_loss
from tokenmixup.output import Stat

# The figures of a micro-batch's log, on the device: `loss`, its mean over the samples,
# `gradient_norm` of the whole step, `input_mixed_samples` and those of `Output.sums`.
Stats = dict[str, Stat]

Loss = Callable[[Output, Mixed, int | Tensor], Tensor]


def build_loss(recipe: Recipe, device: torch.device) -> Loss:
    """Returns the loss of an output, its batch and the step, from 0: the mean over the samples.

    One that is a module, such as a teacher, is frozen: neither trained nor saved.
    """
    loss: Loss = LOSS.made(recipe.loss, recipe.loss_options)
    if isinstance(loss, nn.Module):
        loss.to(device).eval().requires_grad_(False)
    return loss


def cross_entropy() -> Loss:
    """The loss of the method: of the mixed targets, and lambda times ScoreNet's."""
    return lambda output, batch, step: training_loss(output)


class Trainer:
    """Trains `module` step by step, together with all other ranks; every rank has one."""

    def __init__(
        self,
        config: Config,
        world: World,
        module: TokenMixup,
        classes: list[str],
        steps_per_epoch: int,
    ):
        recipe, device = config.recipe, world.device
        self.config = config
        self.recipe = recipe
        self.world = world
        self.classes = classes
        self.steps_per_epoch = steps_per_epoch
        self.step = 0  # completed ones
        self.mixes = True
        self.module = module
        place(module, device)
        self.inputs = build_training_inputs(config, device)
        if config.compile:
            compile_module(module)
        self.parameters = [*module.parameters()]
        self.uses_scaler = recipe.precision == "float16"
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.uses_scaler)
        self.average: ModelEmaV3 | None = None
        if recipe.ema_decay is not None:
            self.average = ModelEmaV3(module.model, recipe.ema_decay, stochastic_rounding=False)
        self.parallel = world.parallel(module)
        self.optimizer = build_optimizer(module, recipe)
        self.lr = recipe.lr  # of the last step
        self.loss = build_loss(recipe, device)
        self.graph: StepGraph | None = None
        if config.compile == "cuda-graph":
            self.graph = StepGraph(self._update, self.inputs.generators, device)

    def train_step(self, images: Tensor, classes: Tensor, global_size: int) -> list[Stats]:
        """Updates the parameters by the mean loss over a global batch of `global_size` images.

        `images` (`b 3 h w`, uint8) and `classes` (`b`) are this rank's share of it. All random
        draws are a function of seed, step and rank. The share is cut into `grad_accum_steps`
        consecutive micro-batches, whose sizes differ by at most one; HTM matches pairs within each.
        Raises Diverged as `tokenmixup.assignment.optimal_donors`.
        """
        key = self.config.seed, self.step, self.world.rank
        draws = self.inputs.draw(images.shape, *key)
        seed_device(self.world.device, Purpose.MODEL, *key)
        self.lr = learning_rate(self.recipe, self.step, self.steps_per_epoch)
        update: Callable[..., list[Stats]] = self._update
        if self.graph is not None:
            update = self.graph
        parts = update(images, classes, global_size, draws, lr=self.lr, step=self.step)
        self.step += 1
        return parts

    def _update(
        self,
        images: Tensor,
        classes: Tensor,
        global_size: int,
        draws: Draws,
        *,
        lr: float | Tensor,
        step: int | Tensor,
    ) -> list[Stats]:
        """The step, given its draws; a CUDA graph of it has tensors for `lr` and `step`.

        Batches of one size get the same operations, so that the graph can replay them.
        """
        # Inputs
        device = self.world.device
        images = images.to(device, non_blocking=True)
        classes = classes.to(device, non_blocking=True)
        mixed = self.inputs.apply(images, classes, draws.to(device))

        # Forward, loss and backward; only the last backward pass reduces gradients over the ranks
        parts = list[Stats]()
        count = self.recipe.grad_accum_steps
        no_sync = getattr(self.parallel, "no_sync", nullcontext)  # DistributedDataParallel has it
        for part in mixed.split(count):
            is_last = len(parts) == count - 1
            with nullcontext() if is_last else no_sync():
                parts.append(self._forward_and_backward(part, global_size, step))

        # Clip and step; the scaler is that of float16, and does nothing otherwise
        self.scaler.unscale_(self.optimizer)
        norm = get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if self.recipe.clip_grad_norm is not None:
            clip_grads_with_norm_(self.parameters, self.recipe.clip_grad_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            group["capturable"] = isinstance(lr, Tensor)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

        # Average
        if self.average is not None:
            self.average.update(self.module.model)

        # Figures
        for stats in parts:
            stats["gradient_norm"] = Stat(norm, is_max=True)
        return parts

    def _forward_and_backward(self, part: Mixed, global_size: int, step: int | Tensor) -> Stats:
        """Adds the gradients of a micro-batch: labels, the mixing of tokens, loss, backward."""
        targets = part.targets(len(self.classes), self.recipe.label_smoothing)
        with autocast(self.world.device, self.recipe.precision):
            # This is TokenMixup.forward; what it does to the blocks of the model is in
            # Pass.run_block (tokenmixup/passes.py).
            output: Output = self.parallel(part.images, targets)
        loss = self.loss(output, part, step)
        n = len(part.images)
        # DDP averages over the ranks: the world size turns that mean into a sum.
        weight = n * self.world.size / global_size
        self.scaler.scale(loss).backward(constant(weight, loss.device, loss.dtype))
        input_mixed = Stat(0)
        if part.is_mixed is not None:
            input_mixed = Stat(part.is_mixed.sum(dtype=torch.float32))
        return {
            "loss": Stat(loss.detach() * n, n),
            "input_mixed_samples": input_mixed,
            **output.sums,
        }

    def begin_epoch(self, epoch: int) -> None:
        """Prepares the model for an epoch, counted from 0; from `off_epoch` on nothing mixes."""
        off_epoch = self.config.augmentation.off_epoch
        if self.mixes and off_epoch is not None and epoch >= off_epoch:
            self.mixes = False
            self.inputs.stop_mixing()
            self.module.stop_mixing()
            # The old wrapper would wait for ScoreNet's gradients.
            self.parallel = self.world.parallel(self.module)
            if self.graph is not None:
                self.graph.forget()
        self.module.train()

    @property
    def evaluated(self) -> nn.Module:
        """The plain model to evaluate and save: the averaged one, if weights are averaged."""
        if self.average is None:
            return self.module.model
        return self.average.module

    def state(self) -> dict[str, Any]:
        """What further steps depend on."""
        averaged = None
        if self.average is not None:
            averaged = self.average.module.state_dict()
        return {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "model_ema": averaged,
            "step": self.step,
        }

    def restore(self, origin: str, state: dict[str, Any]) -> None:
        """Restores a `state`; UserError, which names its `origin`, if its weights do not fit."""
        load_state(origin, state["module"], self.module)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.average is not None:
            self.average.module.load_state_dict(state["model_ema"])
        if self.graph is not None:
            self.graph.forget()  # the optimiser's state is in new tensors
        self.step = state["step"]


def learning_rate(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """The learning rate of a step, from 0, which changes with every batch or with every epoch.

    Linear warm-up, half a cosine down to `min_lr`, then cooldown at `min_lr`, as timm's.
    """
    if recipe.schedule_step == "batch":
        time, unit = step, steps_per_epoch
    else:
        time, unit = step // steps_per_epoch, 1
    warm_up = recipe.warmup_epochs * unit
    end = (recipe.epochs - recipe.cooldown_epochs) * unit
    if time < warm_up:
        return recipe.warmup_lr + time * ((recipe.lr - recipe.warmup_lr) / warm_up)
    if time >= end:
        return recipe.min_lr
    cosine = 1 + math.cos(math.pi * time / end)
    return recipe.min_lr + 0.5 * (recipe.lr - recipe.min_lr) * cosine
