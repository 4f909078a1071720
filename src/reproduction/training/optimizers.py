"""Optimisers: those of the recipes, and how any is made.

A factory gets groups of parameters, of which biases and other vectors do not decay, `lr`,
`weight_decay` and its options.
"""

from typing import Any

import torch
from timm.optim import param_groups_weight_decay as groups_of
from torch.optim import SGD, AdamW, Optimizer

from reproduction.config import OPTIMIZER, Recipe
from tokenmixup import TokenMixup

Groups = list[dict[str, Any]]


def build_optimizer(module: TokenMixup, recipe: Recipe) -> Optimizer:
    """Builds the optimiser of a recipe; UserError if that fails."""
    exempt = module.no_weight_decay()
    groups = groups_of(module, recipe.weight_decay, no_weight_decay_list=exempt)
    chosen = recipe.optimizer
    with OPTIMIZER.refusing(chosen):
        return OPTIMIZER.factory(chosen)(
            groups, lr=recipe.lr, weight_decay=recipe.weight_decay, **recipe.optimizer_options
        )


def adamw(groups: Groups, lr: float, weight_decay: float, **options: Any) -> Optimizer:
    """AdamW by the fused kernel, which takes one pass over each parameter."""
    return AdamW(groups, lr=lr, weight_decay=weight_decay, fused=True, **options)


def sgd(
    groups: Groups, lr: float, weight_decay: float, momentum: float = 0.9, **options: Any
) -> Optimizer:
    """SGD with (non-Nesterov) momentum, likewise."""
    optimizer = SGD(
        groups, lr=lr, weight_decay=weight_decay, momentum=momentum, fused=True, **options
    )
    # The kernel leaves the buffers uninitialised if it skips the first step.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer
