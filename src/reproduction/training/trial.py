"""What is tried out before a run begins, so that it ends in one line: `check_start`."""

import torch

from reproduction.config import DATA, Config
from reproduction.data import loaders
from reproduction.data.inputs import build_training_inputs
from reproduction.data.sources import opened
from reproduction.errors import PlainError, UserError
from reproduction.identity import chosen_code
from reproduction.models.build import try_pass
from reproduction.training.evaluate import build_metrics
from reproduction.training.optimizers import build_optimizer
from reproduction.training.ranks import resolve_device
from reproduction.training.step import build_loss


def check_start(config: Config) -> None:
    """Raises UserError if the run cannot start here; writes nothing but downloaded data."""
    resolve_device(config.device, config.devices, config.recipe.precision, config.compile)
    check_capture(config)
    data = opened(config.dataset)
    loaders.TrainingBatches(config, len(data.train), rank=0, ranks=config.devices)
    module = try_pass(config, len(data.classes))
    build_training_inputs(config, torch.device("cpu"))
    build_loss(config.recipe, torch.device("cpu"))
    build_metrics(config.recipe)
    build_optimizer(module.to_empty(device="cpu"), config.recipe)
    images = loaders.build_training_images(config, data.train)
    try:
        images.transform(data.train[0][0])  # no other in its place: the function may be wrong
    except PlainError as error:
        raise UserError(f"{DATA.override(config.dataset.source)}: {error}") from error


def check_capture(config: Config) -> None:
    """Raises UserError for a CUDA graph of code that cannot be captured, or does not say so."""
    if config.compile != "cuda-graph":
        return
    for function_key, chosen in chosen_code(config):
        refused = f"compile=cuda-graph {function_key.override(chosen)}: cannot be captured"
        if function_key.role == "inputs":
            raise UserError(f"{refused}, as it draws on the host")
        if function_key.role not in ("tokens", "step"):
            continue
        with function_key.refusing(chosen):
            factory = function_key.factory(chosen)
        if not getattr(factory, "capturable", not function_key.is_own(chosen)):
            raise UserError(f"{refused}; code of your own can if it says `capturable = True`")
