"""Latency of the saliency detectors (Table 3): the time that each adds to a training step.

Times the part of HTM from the detector on, for the inputs of the HTM block in one batch: the
saliency, the assignment with its transfers to the host and back, and the mixing of tokens, labels
and known projections. ScoreNet is left out. The saliency by gradient is a forward and a backward
pass of the whole model in evaluation mode, as in Co-Mixup; otherwise it is layer norm, projection
and softmax of the next attention. The projection is timed in full, although a training step reuses
it in the block. Random tokens are paired by attention too, so they cost as much as attention.
Differences between whole steps would be lost in the noise.

Letters: b batch, c classes, h w image.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reproduction.config import Config
from reproduction.models.build import build_module, place
from reproduction.reporting.trained import block_inputs
from reproduction.runs.folder import check_writable
from reproduction.studies.latency import FILE, Measurement, Timing
from reproduction.studies.plan import points_of, studies_of
from reproduction.studies.study import Settings, scales
from reproduction.system.hardware import hardware_name
from reproduction.system.storage import write_text
from reproduction.system.terminal import Parser, one_line_errors, positive, say
from reproduction.system.timing import spread_of, time_in_turns
from reproduction.training.distributed import allow_tf32, resolve_device
from reproduction.training.evaluate import autocast
from scripts.benchmark.speed import as_measured
from tokenmixup import HorizontalMix, TokenMixup, mix_horizontal
from tokenmixup.contexts import evaluating
from tokenmixup.detectors import detector_of
from tokenmixup.passes import BlockPass
from tokenmixup.rules import rules_of
from tokenmixup.saliency import input_gradient

DETECTORS = ("gradient", "attention", "random")
CLASSES = 100  # of CIFAR-100
REPEATS, FEW = 20, 5  # rounds; FEW at smoke scale

Step = Callable[[], HorizontalMix]


def measure_latency(
    settings: Settings, device: str, batch_size: int | None, repeats: int | None
) -> Path:
    """Writes medians and quartiles over `repeats` rounds beside the runs, and returns the file.

    Every sample is mixed (tau = inf, rho = 0), in the precision of the experiments, or in float32
    on a CPU. Raises UserError for a device that does not exist.
    """
    path = settings.root / FILE
    check_writable(path, str(path))
    device = resolve_device(device, 1)
    configs = detector_configs(settings)
    recipe, model = configs["attention"].recipe, configs["attention"].model
    precision = recipe.precision if device == "cuda" else "float32"
    batch_size = batch_size or recipe.batch_size
    repeats = repeats or (FEW if settings.scale == "smoke" else REPEATS)
    steps = {
        name: build_step(config, batch_size, torch.device(device), precision)
        for name, config in configs.items()
    }
    times = time_in_turns(steps, repeats)
    measurement = Measurement(
        hardware=hardware_name(device),
        device=device,
        precision=precision,
        batch_size=batch_size,
        model=model.name,
        repeats=repeats,
        torch=torch.__version__,
        detectors={name: Timing(*spread_of(ms)) for name, ms in times.items()},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(dataclasses.asdict(measurement), indent=2) + "\n")
    return path


def detector_configs(settings: Settings) -> dict[str, Config]:
    """Returns the configuration of each detector, mixing every sample."""
    points = points_of(studies_of("table3"), settings)
    configs = {point.name: point.config for point in points}
    return {name: as_measured(configs[name]) for name in DETECTORS}


def build_step(config: Config, batch_size: int, device: torch.device, precision: str) -> Step:
    """Returns the function to time; all detectors get the same weights and random images."""
    module, images, targets, entry = mixing_batch(config, batch_size, device, precision)

    def step() -> HorizontalMix:
        with autocast(device, precision):
            return mix(module, images, targets, entry)

    return step


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
        *_, entry = block_inputs(module.model, images, module.htm.first.layer)
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
    entry = dataclasses.replace(
        entry, pixels=pixels
    )  # a copy without the results of earlier rounds
    saliency = detector_of(htm)(entry)
    difficulty, tau = torch.zeros(len(images), device=images.device), math.inf
    rules = rules_of(htm)
    rho = htm.rho_for(saliency.shape[1])
    mixed = mix_horizontal(entry.tokens, targets, saliency, difficulty, tau, rho, rules)
    for projected in entry.projected:
        mixed.exchange(projected)
    return mixed


@one_line_errors("latency.py")
def main() -> None:
    """Writes latency.json next to the runs of the scale and prints it."""
    parser = Parser(prog="latency.py", description="Measures Table 3's latency.")
    parser.add_argument("--batch-size", type=positive, help="images per step (default: 128)")
    parser.add_argument("--repeats", type=positive, help="timed rounds (default: 20; smoke: 5)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--scale", choices=scales(), default="full", help="as for reproduce.py")
    parser.add_argument("--outputs", default="outputs", help="folder of all runs")
    args = parser.parse_args()
    settings = Settings(scale=args.scale, outputs=args.outputs)
    path = measure_latency(settings, args.device, args.batch_size, args.repeats)
    latency = json.loads(path.read_text())
    conditions = f"{latency['model']}, batch of {latency['batch_size']}, {latency['precision']}"
    say(f"{conditions}, on {latency['hardware']}")
    for name, ms in latency["detectors"].items():
        say(f"{name}: {ms['median_ms']:.1f} ms ({ms['low_ms']:.1f} to {ms['high_ms']:.1f})")
    say(f"written to {path}")


if __name__ == "__main__":
    main()
