"""TokenMixup for timm's own trainer, as one of its training tasks. Needs timm."""

from typing import Any

import torch
from timm.data.mixup import mixup_target
from timm.task import TrainingTask
from timm.utils.model import unwrap_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tokenmixup import TokenMixup, training_loss


class TokenMixupTask(TrainingTask):
    """`task(images, targets)` -> {"loss", "output": logits `b c`, **Output.stats}.

    `module`: as returned by `attach`, on `device`. `targets`: classes `b`, which get `smoothing`,
    or probabilities `b c`, as from timm's Mixup, which smooths by itself. With them a `smoothing`
    raises ValueError. The plain model is evaluated, and is the `state_dict` of a checkpoint; the
    ScoreNets are its `task_state`.
    """

    def __init__(
        self,
        module: TokenMixup,
        smoothing: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        verbose: bool = True,
    ):
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing={smoothing}: must be at least 0 and below 1")
        super().__init__(device, dtype, verbose)
        self.trainable_module: nn.Module = module
        self.num_classes, self.smoothing = module.num_classes, smoothing

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        if target.ndim == 1:
            target = mixup_target(target, self.num_classes, smoothing=self.smoothing)
        elif self.smoothing:
            raise ValueError(f"smoothing={self.smoothing}: must be 0 with probabilities as targets")
        output = self.trainable_module(input, target)
        return {"loss": training_loss(output), "output": output.logits, **output.stats}

    def prepare_distributed(self, device_ids: Any = None, **options: Any) -> "TokenMixupTask":
        module = self.trainable_module
        self.trainable_module = DistributedDataParallel(module, device_ids=device_ids, **options)
        return self

    def compile(self, backend: str = "inductor", mode: str | None = None, **options: Any) -> Any:
        """Compiles `module` for training, and returns the plain model compiled for evaluation."""
        self.trainable_module.compile(backend=backend, mode=mode, **options)
        plain = self.get_eval_model()
        self.eval_model = torch.compile(plain, backend=backend, mode=mode, **options)
        return self.eval_model

    def get_eval_model(self, module: nn.Module | None = None, ema: bool = False) -> Any:
        found = super().get_eval_model(module, ema)
        inner = unwrap_model(found)
        return inner.model if isinstance(inner, TokenMixup) else found

    def get_clip_parameters(self, exclude_head: bool = False) -> list[nn.Parameter]:
        module = unwrap_model(self.trainable_module)
        parameters = [*module.model.parameters()]
        parameters = parameters[:-2] if exclude_head else parameters
        return [*parameters, *module.scorenets.parameters()]

    def get_task_state(self, module: Any = None, ema: bool = False) -> dict[str, Any]:
        return {"scorenets": self._scorenets(module, ema).state_dict()}

    def load_task_state(
        self, state: Any, strict: bool = True, module: Any = None, ema: bool = False
    ) -> None:
        """Loads nothing without a state, as from weights of the plain model."""
        if state:
            self._scorenets(module, ema).load_state_dict(state["scorenets"], strict)

    def _scorenets(self, module: nn.Module | None, ema: bool) -> Any:
        return unwrap_model(module or self.get_trainable_module(ema)).scorenets
