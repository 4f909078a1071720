"""What is tried out before a run begins, so that it ends in one line: `check_start`."""

import torch

from reproduction.config import DATA, METRIC, Config, Recipe
from reproduction.data import loaders
from reproduction.data.inputs import build_training_inputs
from reproduction.data.sources import opened
from reproduction.errors import PlainError, UserError
from reproduction.function_keys import Refused
from reproduction.identity import chosen_code
from reproduction.models.build import try_pass
from reproduction.training.evaluate import build_metrics, gathers
from reproduction.training.optimizers import build_optimizer
from reproduction.training.step import build_loss


def check_start(config: Config) -> None:
    """Raises UserError if the run cannot start here; writes nothing but downloaded data."""
    check_capture(config)
    data = opened(config.dataset)
    batches = loaders.TrainingBatches(config, len(data.train), rank=0, ranks=config.devices)
    classes = len(data.classes)
    module, _ = try_pass(config, classes)
    build_training_inputs(config, torch.device("cpu"))
    build_loss(config.recipe, torch.device("cpu"))
    try_metrics(config.recipe, classes)
    build_optimizer(module.to_empty(device="cpu"), config.recipe)
    images = loaders.build_training_images(config, data.train)
    try:
        images.transform(data.train[0][0])  # no other in its place: the function may be wrong
    except PlainError as error:
        raise UserError(f"{DATA.override(config.dataset.source)}: {error}") from error
    count = config.recipe.grad_accum_steps
    fewest = batches.global_size(len(batches) - 1) // config.devices  # of a rank, in a batch
    if fewest < count:
        reason = f"some batches leave {fewest} images to a rank, allowed is 1..{fewest}"
        raise UserError(f"recipe.grad_accum_steps={count}: {reason}")


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
            is_capturable = getattr(
                function_key.factory(chosen), "capturable", not function_key.is_own(chosen)
            )
        if not is_capturable:
            raise UserError(f"{refused}; code of your own can if it says `capturable = True`")


def try_metrics(recipe: Recipe, num_classes: int) -> None:
    """Raises UserError for a metric that fails on two images, or returns no number."""
    for name, metric in build_metrics(recipe).items():
        chosen = recipe.metrics[name]
        with METRIC.at(name).refusing(chosen):
            found = metric(torch.randn(2, num_classes), torch.arange(2) % num_classes)
            numbers = [found] if gathers(metric) else [*found]
            if len(numbers) != (1 if gathers(metric) else 2):
                raise Refused(f"returns {len(numbers)} numbers, must return a sum and a count")
            [float(number) for number in numbers]
