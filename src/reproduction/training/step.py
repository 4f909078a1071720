"""One training step, from what workers hand over to updated parameters, top to bottom.

Letters: b batch, c classes, h w image.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from reproduction.config.schema import Recipe
from reproduction.data.inputs import TrainingInputs
from reproduction.data.seeding import Purpose, seed_torch
from reproduction.training.distributed import World
from reproduction.training.evaluate import autocast
from reproduction.training.optim import build_optimizer, load_optimizer
from tokenmixup import Output, TokenMixup, training_loss


class Part(NamedTuple):
    """What came of a micro-batch: its mean loss and what the model returned."""

    loss: Tensor
    output: Output


class TrainingStep:
    """Updates the parameters of `module` by one batch after another, together with all ranks.

    What the steps leave behind besides them is its state. `not_finite` is 1 where loss or gradient
    of the last step is not finite, else 0, on the device. Such a step leaves all as it was on all
    ranks, by `recipe.non_finite=skip` or by float16's scaler.
    """

    def __init__(
        self, module: TokenMixup, inputs: TrainingInputs, recipe: Recipe, world: World, seed: int
    ):
        self.module, self.inputs, self.recipe, self.world = module, inputs, recipe, world
        self.seed = seed
        self.average: ModelEmaV3 | None = None
        if recipe.ema_decay is not None:
            self.average = ModelEmaV3(module.model, decay=recipe.ema_decay)
        self.score_loss_weight = 0.0 if module.htm is None else module.htm.score_loss_weight
        self.parallel: nn.Module = module
        if world.size > 1:
            devices = [world.device] if world.device.type == "cuda" else None
            self.parallel = DistributedDataParallel(module, device_ids=devices)
        self.optimizer = build_optimizer(module, recipe)
        self.uses_scaler = recipe.precision == "float16"
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=self.uses_scaler)
        self.skips = recipe.non_finite == "skip"
        self.not_finite = torch.zeros((), device=world.device)

    def __call__(self, images: Tensor, classes: Tensor, step: int, global_size: int) -> list[Part]:
        """Updates by the mean loss of `global_size` images, of which these are this rank's.

        `images`: `b 3 h w` uint8, `classes`: `b`. All that is drawn is a function of seed, `step`
        and rank. The batch is cut into `grad_accum_steps` consecutive micro-batches, whose sizes
        differ by one at most; pairs are matched within each. Raises FloatingPointError where HTM
        finds a gain that is not finite, unless such are skipped.
        """
        device, key = self.world.device, (self.seed, step, self.world.rank)
        images = images.to(device, non_blocking=True)
        images, targets = self.inputs(images, classes.to(device, non_blocking=True), *key)
        seed_torch(Purpose.DROPOUT, *key)

        followers = self._followers() if self.skips or self.uses_scaler else []
        before = [value.clone() for value in followers]
        count, parts = self.recipe.grad_accum_steps, list[Part]()
        for some, its_targets in zip(
            images.tensor_split(count), targets.tensor_split(count), strict=True
        ):
            is_last = len(parts) == count - 1  # which sums over the ranks
            with self._without_sums() if not is_last else nullcontext():
                with autocast(device, self.recipe.precision):
                    output: Output = self.parallel(some, its_targets)
                loss = training_loss(output, self.score_loss_weight)
                share = len(some) * self.world.size / global_size  # DDP takes the mean over ranks
                self.scaler.scale(loss * share).backward()
            parts.append(Part(loss.detach(), output))
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

    def _without_sums(self) -> AbstractContextManager[None]:
        parallel = self.parallel
        return (
            parallel.no_sync() if isinstance(parallel, DistributedDataParallel) else nullcontext()
        )

    def _followers(self) -> list[Tensor]:
        """What a step changes besides parameters and the optimiser's state."""
        average = {} if self.average is None else self.average.module.state_dict()
        return [*self.module.buffers(), *average.values()]

    def _clip(self) -> Tensor:
        """Clips the gradients; returns their norm before, with a scaler that of the scaled ones.

        Where that overflows the scaler leaves the step out; asking it would wait for the device.
        """
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm, most = get_total_norm(gradients), self.recipe.clip_grad_norm
        if most is not None:
            self.scaler.unscale_(self.optimizer)
            true_norm = get_total_norm(gradients) if self.uses_scaler else norm
            clip_grads_with_norm_(self.module.parameters(), most, true_norm)
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
        load_optimizer(self.optimizer, state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.average is not None:
            self.average.module.load_state_dict(state["model_ema"])
