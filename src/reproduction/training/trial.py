"""What is tried out before a run begins, so that it ends in one line: `check_start`."""

import torch

from reproduction.config import LOSS, METRIC, MIXING, Config, Recipe
from reproduction.data import loaders
from reproduction.data.inputs import Mixed, build_training_inputs
from reproduction.data.sources import opened
from reproduction.door import Refused
from reproduction.errors import PlainError, UserError
from reproduction.identity import chosen_code
from reproduction.models.build import build_module, try_pass, without_weights
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
    if config.augmentation.own or LOSS.is_own(config.recipe.loss):
        try_loss(config, classes)
    try_metrics(config.recipe, classes)
    build_optimizer(module.to_empty(device="cpu"), config.recipe)
    images = loaders.build_training_images(config, data.train)
    try:
        images[0, 0]  # epoch 0, image 0: raises if it is unreadable
    except PlainError as error:
        raise UserError(f"the first training image: {error}") from error
    count = config.recipe.grad_accum_steps
    fewest = batches.global_size(len(batches) - 1) // config.devices  # of a rank, in a batch
    if fewest < count:
        reason = f"some batches leave {fewest} images to a rank, allowed is 1..{fewest}"
        raise UserError(f"recipe.grad_accum_steps={count}: {reason}")


def try_inputs(config: Config, num_classes: int) -> Mixed:
    """Returns two random images as training gets them; UserError if a mixing of one's own fails."""
    size = config.model.image_size
    images = torch.randint(256, (2, 3, size, size), dtype=torch.uint8)
    classes = torch.arange(2) % num_classes
    own = config.augmentation.own.items()
    words = " ".join(MIXING.at(name).word(mix.source) for name, mix in own)
    with MIXING.refusing(words, words):
        inputs = build_training_inputs(config, torch.device("cpu"))
        return inputs(images, classes, config.seed, 0, 0)


def try_loss(config: Config, num_classes: int) -> None:
    """Raises UserError if a mixing or a loss of one's own fails on a batch, on the CPU."""
    recipe = config.recipe
    mixed = try_inputs(config, num_classes)
    module = build_module(without_weights(config.model), config.augmentation, num_classes)
    with LOSS.refusing(recipe.loss):
        loss = build_loss(recipe, torch.device("cpu"))
        output = module(mixed.images, mixed.targets(num_classes, recipe.label_smoothing))
        found = loss(output, mixed, 0)
        if not isinstance(found, torch.Tensor) or found.shape != () or not found.requires_grad:
            shape = getattr(found, "shape", type(found).__name__)
            raise Refused(f"returns {shape}, must return a scalar with a gradient")
        found.backward()
        trained = [name for name, x in module.named_parameters() if x.requires_grad]
        lost = [name for name in trained if module.get_parameter(name).grad is None]
        if lost and config.devices > 1:  # for which other ranks would wait
            reason = f"gives {len(lost)} parameters no gradient, such as {lost[0]}"
            raise Refused(f"{reason}; with devices={config.devices} each must have one")


def check_capture(config: Config) -> None:
    """Raises UserError for a CUDA graph of code that cannot be captured, or does not say so."""
    if config.compile != "cuda-graph":
        return
    for door, chosen in chosen_code(config):
        refused = f"compile=cuda-graph {door.word(chosen)}: cannot be captured"
        if door.role == "inputs":
            raise UserError(f"{refused}, as it draws on the host")
        if door.role not in ("tokens", "step"):
            continue
        with door.refusing(chosen):
            is_capturable = getattr(door.factory(chosen), "capturable", not door.is_own(chosen))
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
