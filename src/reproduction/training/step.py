"""The training step, top to bottom: from a batch of images to new weights.

The epochs around it are in fit.py. Letters: b batch, c classes, h w image.
"""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import SGD

from reproduction.config import LOSS, Config, Recipe
from reproduction.data.inputs import Draws, Mixed, build_training_inputs
from reproduction.data.seeding import Purpose, seed_device
from reproduction.models.build import compile_module, place
from reproduction.models.weights import load_state
from reproduction.training.evaluate import autocast
from reproduction.training.graph import StepGraph
from reproduction.training.metrics import constant
from reproduction.training.optimizers import build_optimizer, skips
from reproduction.training.ranks import World
from tokenmixup import Output, TokenMixup, training_loss
from tokenmixup.assignment import Diverged
from tokenmixup.output import Stat

# The figures of a micro-batch's log, on the device: `loss`, its mean over the samples, `skipped`,
# `input_mixed_samples` and those of `Output.sums`.
Stats = dict[str, Stat]

SEEN = ("loss", "gain_max")  # figures that are finite in a good step; all have the first one


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


class Average:
    """The moving average of a model's weights and buffers, in `module`, a model of its own.

    Its update, x + (1 - decay) (new - x), is a step of SGD with 1 - decay as its rate, `new` as the
    gradient to follow, and a decay of x by all of it: fused, it does nothing while `is_held` is 1.
    """

    def __init__(self, model: nn.Module, decay: float, is_held: Tensor):
        self.module = copy.deepcopy(model).eval()
        self.values = [*self.module.state_dict().values()]
        averaged = [value for value in self.values if value.is_floating_point()]
        self.sgd = SGD(averaged, lr=1 - decay, weight_decay=1, maximize=True, fused=True)
        setattr(self.sgd, "found_inf", is_held)

    def update(self, model: nn.Module) -> None:
        for value, new in zip(self.values, model.state_dict().values(), strict=True):
            if value.is_floating_point():
                value.grad = new
            else:  # a count
                value.copy_(new)
        self.sgd.step()


class Trainer:
    """Trains `module` step by step, together with all other ranks; every rank has one.

    A step that is not finite on any rank changes nothing, and neither does a later one, until the
    host reads of it in the log and ends the run: `has_diverged` stays 1 on the device. While
    `is_held` is 1, also for a step that float16's scaler skips, the fused optimisers do nothing.
    """

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
        self.has_diverged = torch.zeros((), device=device)
        self.is_held = self.has_diverged  # the same tensor: nothing else holds a step
        if self.uses_scaler:  # for which gradients that overflow are normal
            self.is_held = torch.zeros((), device=device)
        self.average: Average | None = None
        if recipe.ema_decay is not None:
            self.average = Average(module.model, recipe.ema_decay, self.is_held)
        self.parallel = world.parallel(module)
        self.optimizer = build_optimizer(module, recipe)
        self.skips = skips(self.optimizer)
        if self.skips:  # others refuse it
            setattr(self.optimizer, "found_inf", self.is_held)
        self.lr = recipe.lr  # of the last step
        self.loss = build_loss(recipe, device)
        self.lr_of_graphs = torch.zeros((), device=device)
        self.step_of_graphs = torch.zeros((), dtype=torch.int64, device=device)
        self.graph: StepGraph | None = None
        if config.compile == "cuda-graph":
            self.graph = StepGraph(self._update, self.inputs.generators, device)

    def train_step(self, images: Tensor, classes: Tensor, global_size: int) -> list[Stats]:
        """Updates the parameters by the mean loss over a global batch of `global_size` images.

        `images` (`b 3 h w`, uint8) and `classes` (`b`) are this rank's share of it. All random
        draws are a function of seed, step and rank. The share is cut into `grad_accum_steps`
        consecutive micro-batches, whose sizes differ by at most one; HTM matches pairs within each.
        Raises Diverged as `tokenmixup.assignment.optimal_donors`, with nothing changed.
        """
        key = self.config.seed, self.step, self.world.rank
        draws = self.inputs.draw(images.shape, *key)
        seed_device(self.world.device, Purpose.MODEL, *key)
        self.lr = learning_rate(self.recipe, self.step, self.steps_per_epoch)
        if self.graph is None:
            self._set_optimizer(lr=self.lr, capturable=False)
            parts = self._update(images, classes, global_size, draws)
        else:  # has captured `_update`
            self.lr_of_graphs.fill_(self.lr)
            self.step_of_graphs.fill_(self.step)
            self._set_optimizer(lr=self.lr_of_graphs, capturable=True)
            parts = cast(list[Stats], self.graph(images, classes, global_size, draws))
        self.step += 1
        return parts

    def _set_optimizer(self, lr: float | Tensor, capturable: bool) -> None:
        """Sets the learning rate: a number or, for a graph, the tensor that it reads."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            group["capturable"] = capturable

    def _update(
        self, images: Tensor, classes: Tensor, global_size: int, draws: Draws
    ) -> list[Stats]:
        """The step, given its draws.

        Batches of one size get the same operations, so that a CUDA graph can replay them.
        """
        device = self.world.device
        images = images.to(device, non_blocking=True)
        classes = classes.to(device, non_blocking=True)
        mixed = self.inputs.apply(images, classes, draws.to(device))
        buffers = [*self.module.buffers()]
        before = [buffer.clone() for buffer in buffers]

        # Gradients; only the last backward pass reduces them over the ranks
        parts = list[Stats]()
        count = self.recipe.grad_accum_steps
        no_sync = getattr(self.parallel, "no_sync", nullcontext)  # DistributedDataParallel has it
        try:
            for part in mixed.split(count):
                is_last = len(parts) == count - 1
                with nullcontext() if is_last else no_sync():
                    parts.append(self._forward_and_backward(part, global_size))
        except Diverged:  # where matching waits for the host
            for buffer, old in zip(buffers, before, strict=True):
                buffer.copy_(old)
            raise

        # Weights
        norm = self._clip_gradients()
        self._judge(norm, parts)
        # If it is not fused, it does not skip a step by itself: the host waits for the norm.
        if self.skips or self.is_held.item() == 0:
            self.optimizer.step()  # not by `scaler.step`, which would replace its `found_inf`
        self.scaler.update()
        self.optimizer.zero_grad()

        # Statistics and averages
        for buffer, old in zip(buffers, before, strict=True):
            torch.where(self.is_held > 0, old, buffer, out=buffer)
        if self.average is not None:
            self.average.update(self.module.model)
        return parts

    def _judge(self, norm: Tensor, parts: list[Stats]) -> None:
        """Sets `has_diverged` and `is_held` by what is seen of a step, without waiting for it."""
        seen = [part[name].total for part in parts for name in SEEN if name in part]
        if not self.uses_scaler:
            seen.append(norm)
        total = torch.stack(cast(list[Tensor], seen)).sum()
        # x - x is nan, which counts as true, unless x is finite; isfinite would launch three more
        self.has_diverged.logical_or_(total - total)
        self.world.any(self.has_diverged)  # gradients are those of all ranks, but losses are not
        if self.uses_scaler:
            self.is_held.copy_(norm - norm).logical_or_(self.has_diverged)

    def _forward_and_backward(self, part: Mixed, global_size: int) -> Stats:
        """Adds the gradients of a micro-batch: labels, the mixing of tokens, loss, backward."""
        targets = part.targets(len(self.classes), self.recipe.label_smoothing)
        with autocast(self.world.device, self.recipe.precision):
            # This is TokenMixup.forward; what it does to the blocks of the model is in
            # Pass.run_block (tokenmixup/passes.py).
            output: Output = self.parallel(part.images, targets)
        loss = self.loss(output, part, self.step if self.graph is None else self.step_of_graphs)
        n = len(part.images)
        # DDP averages over the ranks: the world size turns that mean into a sum.
        weight = n * self.world.size / global_size
        self.scaler.scale(loss).backward(constant(weight, loss.device, loss.dtype))
        input_mixed = Stat(0)
        if part.is_mixed is not None:
            input_mixed = Stat(part.is_mixed.sum(dtype=torch.float32))
        return {
            "loss": Stat(loss.detach() * n, n),
            # The tensor itself: `_judge` writes it later, BatchMetrics reads it after the step.
            "skipped": Stat(self.is_held, is_max=True),
            "input_mixed_samples": input_mixed,
            **output.sums,
        }

    def _clip_gradients(self) -> Tensor:
        """Clips the gradients, no longer scaled, and returns their norm before clipping.

        It is not finite if the scaler skips the step: asking the scaler would wait for the device.
        """
        self.scaler.unscale_(self.optimizer)  # none without a scaler
        norm = get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if self.recipe.clip_grad_norm is not None:
            clip_grads_with_norm_(self.parameters, self.recipe.clip_grad_norm, norm)
        return norm

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
