"""The training step, top to bottom: from a batch of images to new weights.

Its epochs, with evaluations, logs, checkpoints and signals, are in epochs.py.

Letters: b batch, c classes, h w image.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from reproduction.config import Config
from reproduction.data.inputs import Draws, TrainingInputs
from reproduction.data.seeding import Purpose, seed_device
from reproduction.models.build import compile_module
from reproduction.models.weights import module_state
from reproduction.training.distributed import World, data_parallel
from reproduction.training.evaluate import autocast
from reproduction.training.graph import StepGraph, keep
from reproduction.training.labels import AttentionLabels
from reproduction.training.optim import build_optimizer, build_schedule, set_capturable
from tokenmixup import Output, TokenMixup, training_loss
from tokenmixup.output import Stat


class MicroBatch(NamedTuple):
    """The mean loss of a micro-batch, the model's output for it, and the scalars of its log."""

    loss: Tensor
    output: Output
    metrics: dict[str, Stat]


def metrics_of(loss: Tensor, output: Output, not_finite: Tensor) -> dict[str, Stat]:
    """Names the scalars of the log, on the device; HTM's names are those of `Output.sums`."""
    n = len(output.logits)
    own = {"loss": Stat(loss * n, n), "skipped": Stat(not_finite, is_max=True)}
    return own | output.sums


class Trainer:
    """Trains `module` step by step, together with all other ranks; every rank has one.

    After a step `not_finite`, on the device, is 1 if a loss or gradient was not finite, else 0.
    float16's scaler skips a step whose gradients overflow, on all ranks.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        *,
        module: TokenMixup,
        classes: list[str],
        inputs: TrainingInputs,
        steps_per_epoch: int,
    ):
        recipe, cutmix = config.recipe, config.augmentation.cutmix
        self.config, self.recipe, self.world = config, recipe, world
        self.module, self.classes, self.inputs = module, classes, inputs
        is_graph = config.compile == "cuda-graph"
        if config.compile is True or (is_graph and world.device.type == "cuda"):
            compile_module(module)  # a CPU only rehearses graphs, in tests
        self.parameters = [*module.parameters()]
        self.average: ModelEmaV3 | None = None
        if recipe.ema_decay is not None:
            self.average = ModelEmaV3(module.model, decay=recipe.ema_decay)
        self.attention_labels: AttentionLabels | None = None
        if cutmix is not None and cutmix.labels == "attention":
            self.attention_labels = AttentionLabels(module.model)
        self.parallel = data_parallel(module, world)
        self.optimizer = build_optimizer(module, recipe)
        set_capturable(self.optimizer, is_graph)
        self.schedule = build_schedule(
            self.optimizer, recipe, steps_per_epoch, world.device if is_graph else None
        )
        self.uses_scaler = recipe.precision == "float16"
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=self.uses_scaler)
        self.not_finite = torch.zeros((), device=world.device)
        self.graph: StepGraph | None = None
        if is_graph:
            self.graph = StepGraph(self._update, self._keep, inputs.generators, world.device)
        self.steps_per_epoch = steps_per_epoch
        self.step = 0  # completed
        self.mixes = True

    def train_step(self, images: Tensor, classes: Tensor, global_size: int) -> list[MicroBatch]:
        """Updates the parameters by the mean loss over a global batch of `global_size` images.

        `images` (`b 3 h w`, uint8) and `classes` (`b`) are this rank's share of it. All random
        draws are a function of seed, step and rank. The share is cut into `grad_accum_steps`
        consecutive micro-batches, whose sizes differ by at most one; HTM matches pairs within each.
        On a CPU, raises FloatingPointError if a gain is not finite.
        """
        key = self.config.seed, self.step, self.world.rank
        draws = self.inputs.draw(images.shape, *key)
        seed_device(self.world.device, Purpose.DROPOUT, *key)
        if self.graph is None:
            return self._update(images, classes, global_size, draws)
        # A graph has captured `_update`; another box would be another graph.
        return cast(
            list[MicroBatch], self.graph(images, classes, global_size, draws._replace(box=None))
        )

    def _update(
        self, images: Tensor, classes: Tensor, global_size: int, draws: Draws
    ) -> list[MicroBatch]:
        """The step given its draws: on the device, by the same operations for a batch's size."""
        device = self.world.device
        images, classes = (x.to(device, non_blocking=True) for x in (images, classes))
        mixed = self.inputs.apply(images, classes, draws.to(device))

        # A step that the scaler skips also restores the buffers and the averaged weights.
        restorable = self._buffers_and_average() if self.uses_scaler else []
        backup = [value.clone() for value in restorable]

        # Forward, with the mixing of tokens, loss and backward
        losses, outputs = list[Tensor](), list[Output]()
        labels = len(self.classes), self.recipe.label_smoothing
        no_sync = getattr(self.parallel, "no_sync", nullcontext)  # DistributedDataParallel has it
        for part in mixed.split(count := self.recipe.grad_accum_steps):
            # Only the last backward pass reduces the gradients over the ranks.
            is_last = len(losses) == count - 1
            with nullcontext() if is_last else no_sync():
                with autocast(device, self.recipe.precision):
                    # This is TokenMixup.forward; what it does to the blocks of the model is in
                    # Pass.run_block (tokenmixup/module.py).
                    output: Output = self.parallel(part.images, part.targets(*labels))
                    if self.attention_labels is not None:
                        targets = self.attention_labels(part).targets(*labels)
                        output = output._replace(targets=targets)
                loss = training_loss(output)
                # DDP averages over the ranks: the world size turns that mean into a sum.
                weight = len(part.images) * self.world.size / global_size
                self.scaler.scale(loss * weight).backward()
            losses.append(loss.detach())
            outputs.append(output)

        # Clip and update
        norm = self._clip_gradients()
        self.not_finite.copy_((~torch.stack([norm, *losses]).isfinite()).any())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

        # Average
        if self.average is not None:
            self.average.update(self.module.model)
        for value, old in zip(restorable, backup, strict=True):
            value.copy_(torch.where(self.not_finite > 0, old, value))
        return [
            MicroBatch(*part, metrics_of(*part, self.not_finite))
            for part in zip(losses, outputs, strict=True)
        ]

    def _keep(self) -> Callable[[], None]:
        changed = [*self.parameters, *self._buffers_and_average(), self.not_finite]
        return keep(changed, self.optimizer, self.scaler)

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

    def begin_epoch(self, epoch: int) -> None:
        """Prepares the model for an epoch, counted from 0; from `off_epoch` on nothing mixes."""
        off_epoch = self.config.augmentation.off_epoch
        if self.mixes and off_epoch is not None and epoch >= off_epoch:
            self.mixes = False
            self.inputs.stop_mixing()
            self.module.stop_mixing()
            # The old wrapper would wait for ScoreNet's gradients.
            self.parallel = data_parallel(self.module, self.world)
            if self.graph is not None:
                self.graph.forget()
        self.module.train()

    @property
    def evaluated(self) -> nn.Module:
        """The plain model to evaluate and save: the averaged one, if weights are averaged."""
        return self.module.model if self.average is None else self.average.module

    def state(self) -> dict[str, Any]:
        """What further steps depend on."""
        return {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "model_ema": None if self.average is None else self.average.module.state_dict(),
            "step": self.step,
        }

    def restore(self, place: str, state: dict[str, Any]) -> None:
        """Restores a `state`; UserError, which names the `place`, if its weights do not fit."""
        self.module.load_state_dict(module_state(place, state, self.module))
        self.optimizer.load_state_dict(state["optimizer"])
        set_capturable(self.optimizer, self.graph is not None)  # the one saved may differ
        self.scaler.load_state_dict(state["scaler"])
        if self.average is not None:
            self.average.module.load_state_dict(state["model_ema"])
        self.step = state["step"]
        if self.graph is not None:
            self.graph.forget()  # the optimiser's state lies elsewhere now
