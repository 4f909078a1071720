"""One update of the parameters by a rank's share of a batch, in micro-batches."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from reproduction.config import Recipe
from reproduction.training.distributed import World
from reproduction.training.evaluate import autocast
from reproduction.training.optim import build_optimizer, load_optimizer
from tokenmixup import Output, TokenMixup, training_loss


class Part(NamedTuple):
    """What came of a micro-batch: its mean loss and what the model returned."""

    loss: Tensor
    output: Output


class Update:
    """Forward with TokenMixup, loss, backward, and a step of the optimiser by all ranks.

    What the steps leave behind, besides the parameters of `module`, is its state. `not_finite` is 1
    where loss or gradient of the last step is not finite, else 0, on the device. Such a step leaves
    all as it was on all ranks, by `recipe.non_finite=skip` or by float16's scaler.
    """

    def __init__(self, module: TokenMixup, recipe: Recipe, world: World):
        self.module, self.recipe, self.world = module, recipe, world
        self.average: ModelEmaV3 | None = None
        if recipe.ema_decay is not None:
            self.average = ModelEmaV3(module.model, decay=recipe.ema_decay)
        self.parallel: nn.Module = module
        if world.size > 1:
            devices = [world.device] if world.device.type == "cuda" else None
            self.parallel = DistributedDataParallel(module, device_ids=devices)
        self.optimizer = build_optimizer(module, recipe)
        self.uses_scaler = recipe.precision == "float16"
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=self.uses_scaler)
        self.skips = recipe.non_finite == "skip"
        self.restores = self.skips or self.uses_scaler
        self.not_finite = torch.zeros((), device=world.device)

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

    def __call__(self, images: Tensor, targets: Tensor, global_size: int) -> list[Part]:
        """Updates by the mean loss of `global_size` images, of which these are this rank's.

        `images`: `b 3 h w`, `targets`: `b c` probabilities. They are cut into `grad_accum_steps`
        consecutive micro-batches, whose sizes differ by one at most; pairs are matched within each.
        """
        count = self.recipe.grad_accum_steps
        assert len(images) >= count, "preflight refuses such batches"
        before = [value.clone() for value in self._followers()] if self.restores else []
        parts = []
        cut = zip(images.tensor_split(count), targets.tensor_split(count), strict=True)
        for number, (some, their_targets) in enumerate(cut, start=1):
            share = len(some) * self.world.size / global_size  # DDP takes the mean over ranks
            with self._local_gradients() if number < count else nullcontext():
                parts.append(self._accumulate(some, their_targets, share))
        self._step(parts)
        for value, old in zip(self._followers() if self.restores else [], before, strict=True):
            value.copy_(torch.where(self.not_finite > 0, old, value))
        return parts

    def _followers(self) -> list[Tensor]:
        """What an update changes besides parameters and the optimiser's state."""
        average = {} if self.average is None else self.average.module.state_dict()
        return [*self.module.buffers(), *average.values()]

    def _local_gradients(self) -> AbstractContextManager[None]:
        """Leaves the sum over ranks to the last micro-batch."""
        is_shared = isinstance(self.parallel, DistributedDataParallel)
        return cast(Any, self.parallel).no_sync() if is_shared else nullcontext()

    def _accumulate(self, images: Tensor, targets: Tensor, share: float) -> Part:
        """Adds the gradients of a micro-batch, by its share of the update."""
        htm = self.module.htm
        with autocast(self.world.device, self.recipe.precision):
            output = cast(Output, self.parallel(images, targets))
        loss = training_loss(output, htm.score_loss_weight if htm is not None else 0.0)
        self.scaler.scale(loss * share).backward()
        return Part(loss.detach(), output)

    def _clipped(self) -> Tensor:
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

    def _step(self, parts: list[Part]) -> None:
        """Clips the gradients, steps, forgets them, and averages."""
        values = [self._clipped(), *(part.loss for part in parts)]
        self.not_finite = (~torch.stack(values).isfinite()).any().float()
        if self.skips:
            self.world.sum(self.not_finite).clamp_(max=1)
            setattr(self.optimizer, "found_inf", self.not_finite)  # as a scaler tells the kernels
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.module.model)
