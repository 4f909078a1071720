"""Table 3's latency: the time that a saliency detector adds to a step.

`python -m scripts.benchmark.latency` writes it beside the runs. It times HTM from the detector on,
for the inputs of the HTM block in one batch: the saliency, the assignment with its transfers to the
host and back, and the mixing of tokens, labels and known projections. ScoreNet is left out. The
saliency by gradient is a forward and a backward pass of the whole model in evaluation mode, as in
Co-Mixup; otherwise it is layer norm, projection and softmax of the next attention. The projection
is timed in full, although a training step reuses it in the block. Random tokens are paired by
attention too, so they cost as much as attention. Differences between whole steps would be lost in
the noise.

Letters: b batch, c classes, h w image, t tokens.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reproduction.config import Config
from reproduction.models.build import build_module, place
from reproduction.reporting.trained import block_inputs
from reproduction.runs.folder import check_writable
from reproduction.studies.latency import LATENCY_FILE, Measurement, Timing
from reproduction.studies.plan import points_of, studies_of
from reproduction.studies.study import Settings, scales
from reproduction.system.hardware import hardware_name
from reproduction.system.storage import write_text
from reproduction.system.terminal import Parser, one_line_errors, say
from reproduction.training.distributed import allow_tf32, resolve_device
from reproduction.training.evaluate import autocast
from scripts.benchmark.timing import spread_of, time_in_turns
from scripts.benchmark.trainers import as_measured
from tokenmixup import HorizontalMix, TokenMixup, mix_horizontal
from tokenmixup.contexts import evaluating
from tokenmixup.detectors import detector_of
from tokenmixup.module import BlockPass
from tokenmixup.rules import rules_of
from tokenmixup.saliency import input_gradient

TIMED_DETECTORS = ("attention", "gradient", "random")  # the first is the reference of ratios
CLASSES = 100  # of CIFAR-100
REPEATS, FEW = 20, 5  # rounds; FEW at smoke scale


def measure_latency(settings: Settings, device: str) -> Path:
    """Writes medians and quartiles over some rounds beside the runs, and returns the file.

    Every sample is mixed (tau = inf, rho = 0), in the batch size and precision of the experiments,
    or in float32 on a CPU. Raises UserError for a device that does not exist.
    """
    path = settings.root / LATENCY_FILE
    check_writable(path, str(path))
    device = resolve_device(device, 1)
    configs = detector_configs(settings)
    recipe, model = configs["attention"].recipe, configs["attention"].model
    precision = recipe.precision if device == "cuda" else "float32"
    repeats = FEW if settings.scale == "smoke" else REPEATS
    works = detector_works(configs, recipe.batch_size, torch.device(device), precision)
    measurement = Measurement(
        hardware=hardware_name(device),
        device=device,
        precision=precision,
        batch_size=recipe.batch_size,
        model=model.name,
        repeats=repeats,
        torch=torch.__version__,
        detectors={
            name: Timing(*spread_of(ms)) for name, ms in time_in_turns(works, repeats).items()
        },
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(dataclasses.asdict(measurement), indent=2) + "\n")
    return path


def detector_configs(settings: Settings) -> dict[str, Config]:
    """Returns the configuration of each detector, mixing every sample."""
    points = points_of(studies_of("table3"), settings)
    configs = {point.name: point.config for point in points}
    return {name: as_measured(configs[name]) for name in TIMED_DETECTORS}


def detector_works(
    configs: Mapping[str, Config], batch_size: int, device: torch.device, precision: str
) -> dict[str, Callable[[], HorizontalMix]]:
    """Returns the functions to time; all detectors get the same weights and random images."""

    def work(config: Config) -> Callable[[], HorizontalMix]:
        inputs = mixing_batch(config, batch_size, device, precision)
        return partial(_autocasting, device, precision, partial(mix, *inputs))

    return {name: work(config) for name, config in configs.items()}


def _autocasting(device: torch.device, precision: str, work: Callable[[], Any]) -> Any:
    with autocast(device, precision):
        return work()


def mixing_batch(
    config: Config, batch_size: int, device: torch.device, precision: str
) -> tuple[TokenMixup, Tensor, Tensor, BlockPass]:
    """Returns a new module, images `b 3 h w`, targets `b c`, and the inputs of the HTM block."""
    allow_tf32(config.recipe.tf32)  # the gradient detector computes in float32
    torch.manual_seed(0)
    module = place(build_module(config.model, config.augmentation, CLASSES), device).train()
    size = config.model.image_size
    images = torch.randn(batch_size, 3, size, size).to(device)
    targets = F.one_hot(torch.arange(batch_size) % CLASSES, CLASSES).float().to(device)
    assert module.htm is not None
    with autocast(device, precision), evaluating(module.model):
        *_, entry = block_inputs(module.model, images, module.htm.layers[0])
    entry.tokens.requires_grad_()  # as in training
    return module, images, targets, entry


def mix(module: TokenMixup, images: Tensor, targets: Tensor, entry: BlockPass) -> HorizontalMix:
    """Runs the part of a training step from the detector on; every sample is easy.

    `images` is `b 3 h w`, `targets` `b c`, `entry` the inputs of the HTM block for them.
    """
    htm: Any = module.htm
    pixels = None
    if htm.detector == "gradient":
        with evaluating(module.model):
            pixels = input_gradient(module.model, images, targets)
    entry = dataclasses.replace(entry, pixels=pixels)  # without the results of earlier rounds
    saliency = detector_of(htm)(entry)
    easy = torch.zeros(len(images), device=images.device)
    rho = htm.rho_for(saliency.shape[1])
    mixed = mix_horizontal(entry.tokens, targets, saliency, easy, math.inf, rho, rules_of(htm))
    for projected in entry.projected:
        mixed.exchange(projected)
    return mixed


@one_line_errors("latency.py")
def main() -> None:
    """Writes latency.json next to the runs of the scale and prints it."""
    parser = Parser(prog="latency.py", description="Measures Table 3's latency.")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--scale", choices=scales(), default="full", help="as for reproduce.py")
    parser.add_argument("--outputs", default="outputs", help="folder of all runs")
    args = parser.parse_args()
    settings = Settings(scale=args.scale, outputs=args.outputs)
    path = measure_latency(settings, args.device)
    latency = json.loads(path.read_text())
    conditions = f"{latency['model']}, batch of {latency['batch_size']}, {latency['precision']}"
    say(f"{conditions}, on {latency['hardware']}")
    for name, ms in latency["detectors"].items():
        say(f"{name}: {ms['median_ms']:.1f} ms ({ms['low_ms']:.1f} to {ms['high_ms']:.1f})")
    say(f"written to {path}")


if __name__ == "__main__":
    main()
