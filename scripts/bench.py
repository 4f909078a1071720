"""What HTM and VTM add to a training step on this machine: `make bench`.

The trainer's own steps, by the model's recipe without input mixup: plain, HTM, VTM and both in
turns, in random order in each round; on a GPU also compiled, and captured as CUDA graphs. Every
sample is easy (tau = inf), and q, k and v are scaled up so that tokens really are replaced. Ratios
are taken within each round, so that a machine that slows down does not change them. The plain step
runs twice in it: `plain again` shows the noise. With --detectors, Table 3's latencies: HTM by each
saliency detector mixes all samples, beside what the paper measured on an RTX A6000.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from reproduction.compose import compose
from reproduction.errors import Parser, UserError, first_line, one_line_errors, say
from reproduction.files import write_text
from reproduction.machine import git_revision, hardware_name
from reproduction.models.build import build_module, without_weights
from reproduction.training.ranks import World, resolve_device
from reproduction.training.step import Trainer
from scripts import positive

Work = Callable[[], Any]
CASES = {  # overrides, classes, factor on q, k and v, images of a batch on a CPU
    "cct_2_3x2": (["dataset=digits", "recipe=quickstart"], 10, 12, 128),
    "cct_7_3x1": (["dataset=cifar100", "recipe=cifar_cct"], 100, 6, 16),
    "vit_base_patch16_224": (["dataset=imagenet1k", "recipe=imagenet_vit"], 1000, 3, 4),
}
METHODS = {
    "plain": ["augmentation=[]"],
    "HTM": ["augmentation=[htm]", "augmentation.htm.tau=inf"],
    "VTM": ["augmentation=[vtm]"],
    "both": ["augmentation=[htm,vtm]", "augmentation.htm.tau=inf"],
    "plain again": ["augmentation=[]"],
}
LATENCIES = {"attention": 16, "gradient": 236, "random": 5}  # ms, of Table 3
ALL_MIXED = "augmentation.htm={tau:inf,rho:0,detector:%s}"
DETECTORS = {name: ["augmentation=[htm]", ALL_MIXED % name] for name in LATENCIES}
WARM_UP = 2  # rounds that do not count
ON_GPU = 128  # images of a batch
CALLS_ON_GPU = 10  # between two looks at the clock


def build_trainer(overrides: Sequence[str], num_classes: int = 10) -> Trainer:
    """Returns the trainer of a train.py command line, without data, run folder and checkpoint."""
    config = compose(overrides)
    world = World(0, 1, torch.device(resolve_device(config.device, 1)))
    torch.manual_seed(config.seed)
    module = build_module(without_weights(config.model), config.augmentation, num_classes)
    classes = [str(label) for label in range(num_classes)]
    return Trainer(config, world, module, classes, steps_per_epoch=1)


def training_step(model: str, method: list[str], how: str, device: str) -> tuple[Work, int]:
    """A training step on random images, the same ones each time, and their number."""
    overrides, classes, sharpness, images = CASES[model]
    precision = "float32"
    if device == "cuda":
        images, precision = ON_GPU, "bf16"
    of_machine = [f"compile={how}", f"recipe.precision={precision}"]
    overrides = [f"model={model}", *overrides, *of_machine, *method]
    trainer = build_trainer(overrides, classes)
    with torch.no_grad():
        for block in trainer.module.model.blocks:  # type: ignore[union-attr]
            block.attn.qkv.weight.mul_(sharpness)
    size = trainer.config.model.image_size
    batch = torch.randint(256, (images, 3, size, size), dtype=torch.uint8)
    labels = torch.arange(images) % classes
    return partial(trainer.train_step, batch.to(device), labels.to(device), images), images


def milliseconds(work: Work, device: str) -> float:
    """Times a call; on a GPU, which is not waited for in between, the mean of several."""
    calls = 1
    if device == "cuda":
        calls = CALLS_ON_GPU
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start) / calls


def measure(
    model: str, methods: Mapping[str, list[str]], how: str, device: str, rounds: int
) -> pd.DataFrame:
    """Times the steps of a model: a row for each method, with quartiles of the ratio to plain."""
    works, tokens, images = {}, {}, 1
    for name, method in methods.items():
        try:
            works[name], images = training_step(model, method, how, device)
            mixed = works[name]()[0]["mixed_tokens"]
            tokens[name] = float(mixed.total / max(mixed.divisor, 1))
        except Exception as error:  # of a compiler, or a lack of memory
            say(f"not timed: {model}, {how}, {name}: {first_line(error)}")
            works.pop(name, None)
    rng = np.random.default_rng(0)
    times = []
    for _ in range(WARM_UP + rounds):
        order = rng.permutation(list(works)).tolist()
        times.append({name: milliseconds(works[name], device) for name in order})
    ms = pd.DataFrame(times[WARM_UP:], columns=list(works))
    found = pd.DataFrame({"ms": ms.median(), "images/s": 1000 * images / ms.median()})
    found["tokens"] = pd.Series(tokens)
    if "plain" in ms:
        ratios = ms.div(ms["plain"], axis="index").quantile([0.5, 0.25, 0.75])
        found[["ratio", "from", "to"]] = ratios.T
    return found


@one_line_errors()
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("models", nargs="*", help=f"{', '.join(CASES)} (default: all)")
    parser.add_argument("--rounds", type=positive, default=40)
    parser.add_argument("--detectors", action="store_true", help="of HTM, with cct_7_3x1")
    parser.add_argument("--out", type=Path, default="outputs/bench.csv", metavar="FILE.csv")
    args = parser.parse_args()
    for model in args.models:
        if model not in CASES:
            raise UserError(f"models={model}: must be one of {', '.join(CASES)}")
    if args.detectors and args.models:
        raise UserError(f"models={args.models[0]}: nothing reads it with --detectors")
    device = resolve_device("auto", 1)
    threads = f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    say(f"{hardware_name(device)}, {threads}, git {git_revision()}, load {os.getloadavg()[0]:.1f}")
    models = args.models or list(CASES)
    ways = ["false"]
    methods = METHODS
    if args.detectors:
        models = ["cct_7_3x1"]
        methods = {"plain": METHODS["plain"], **DETECTORS}
    elif device == "cuda":
        ways += ["true", "cuda-graph"]
    tables = {}
    for model, how in product(models, ways):
        table = measure(model, methods, how, device, args.rounds)
        if args.detectors:
            table["added [ms]"] = table.ms - table.ms["plain"]
            table["paper [ms]"] = pd.Series(LATENCIES)
        tables[model, how] = table
        say(f"\n{model}, compile={how}\n\n{table.to_markdown(floatfmt='.4g')}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(args.out, pd.concat(tables, names=["model", "compile", "method"]).to_csv())
    say(f"\nload {os.getloadavg()[0]:.1f} at the end; written to {args.out}")


if __name__ == "__main__":
    main()
