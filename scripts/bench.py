"""What HTM and VTM add to a training step on this machine: `make bench`.

The trainer's own steps, by the model's recipe without input mixup: plain, HTM, VTM and both in
turns, in random order in each round; on a GPU also compiled, and captured as CUDA graphs. Every
sample is easy (tau = inf), and q, k and v are scaled up so that tokens really are replaced. Ratios
are taken within each round, so that a machine that slows down does not change them. The plain step
runs twice in it: `plain again` shows the noise, and the others are compared with the mean of both.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from reproduction.compose import compose
from reproduction.errors import Parser, UserError, first_line, one_line_errors, say
from reproduction.files import write_json
from reproduction.machine import git_revision, hardware_name
from reproduction.models.build import build_module, without_weights
from reproduction.training.ranks import World, resolve_device
from reproduction.training.step import Trainer
from scripts import positive
from tokenmixup.assignment import gain_matrix, optimal_donors

ON_GPU = 128  # images of a batch
Work = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a model is timed: by its own recipe."""

    words: list[str]
    classes: int
    sharpness: int  # factor on q, k and v
    on_cpu: int  # images of a batch

    def images(self, device: str) -> int:
        return ON_GPU if device == "cuda" else self.on_cpu


CASES = {
    "cct_2_3x2": Case(
        words=["dataset=digits", "recipe=quickstart"], classes=10, sharpness=12, on_cpu=128
    ),
    "cct_7_3x1": Case(
        words=["dataset=cifar100", "recipe=cifar_cct"], classes=100, sharpness=6, on_cpu=16
    ),
    "vit_base_patch16_224": Case(
        words=["dataset=imagenet1k", "recipe=imagenet_vit"], classes=1000, sharpness=3, on_cpu=4
    ),
}
METHODS = {"plain": [], "HTM": ["htm"], "VTM": ["vtm"], "both": ["htm", "vtm"]}
AGAIN = "plain again"
HOW = {"eager": "false", "compiled": "true", "graph": "cuda-graph"}  # values of `compile`
WARM_UP = 2  # rounds that do not count
CALLS_ON_GPU = 10  # between two looks at the clock


def build_trainer(overrides: Sequence[str], num_classes: int = 10) -> Trainer:
    """Returns the trainer of a train.py command line, without data, run folder and checkpoint."""
    config = compose(overrides)
    world = World(0, 1, torch.device(resolve_device(config.device, 1)))
    torch.manual_seed(config.seed)
    module = build_module(without_weights(config.model), config.augmentation, num_classes)
    classes = [str(label) for label in range(num_classes)]
    return Trainer(config, world, module, classes, steps_per_epoch=1)


def training_step(words: list[str], classes: int, images: int, sharpness: int = 1) -> Work:
    """A training step of train.py's `words` on random images, the same ones each time."""
    trainer = build_trainer(words, classes)
    model: Any = trainer.module.model
    if sharpness != 1:
        with torch.no_grad():
            for block in model.blocks:
                block.attn.qkv.weight.mul_(sharpness)
    size, device = trainer.config.model.image_size, trainer.world.device
    batch = torch.randint(256, (images, 3, size, size), dtype=torch.uint8)
    labels = torch.arange(images) % classes
    return partial(trainer.train_step, batch.to(device), labels.to(device), images)


def in_turns(works: Mapping[str, Work], rounds: int, device: str) -> pd.DataFrame:
    """Milliseconds a call: a row for each round, a column for each work."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(WARM_UP + rounds):
        order = rng.permutation([*works]).tolist()
        rows.append({name: milliseconds(works[name], device) for name in order})
    return pd.DataFrame(rows[WARM_UP:])[[*works]]


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


def machine(device: str) -> str:
    """Says what this machine is, and how busy."""
    return f"{hardware_name(device)}, load average {os.getloadavg()[0]:.1f}"


def quartiles(values: pd.Series) -> dict[str, float]:
    low, median, high = values.quantile([0.25, 0.5, 0.75])
    return {"low": low, "median": median, "high": high}


def measure(model: str, how: str, device: str, rounds: int) -> dict[str, Any]:
    """Times the steps of a model: name -> ms, ratio to plain, images/s, tokens replaced."""
    case = CASES[model]
    images = case.images(device)
    works, tokens = dict[str, Work](), dict[str, float]()
    for name, stack in METHODS.items():
        words = words_of(model, how, device, stack)
        try:
            step = training_step(words, case.classes, images, case.sharpness)
            micro_batches = step()
            mixed = micro_batches[0]["mixed_tokens"]
            tokens[name] = float(mixed.total / max(mixed.divisor, 1))
        except Exception as error:  # of a compiler, or a lack of memory
            say(f"not timed: {model}, {how}, {name}: {first_line(error)}")
            continue
        works[name] = step
        if name == "plain":
            works[AGAIN] = step
    times = in_turns(works, rounds, device)
    rows = {}
    for name in works:
        ms = quartiles(times[name])
        rows[name] = {
            "ms": ms,
            "images/s": 1000 * images / ms["median"],
            "tokens": tokens.get(name, 0),
        }
        if "plain" in works:
            base = times["plain"]
            if name not in ("plain", AGAIN):
                base = times[["plain", AGAIN]].mean(axis=1)
            rows[name]["ratio"] = quartiles(times[name] / base)
    return rows


def words_of(model: str, how: str, device: str, stack: list[str]) -> list[str]:
    """Returns the words of train.py for a step with this stack; every sample is easy."""
    precision = "bf16" if device == "cuda" else "float32"
    words = [f"model={model}", *CASES[model].words]
    words += [f"recipe.precision={precision}", f"compile={HOW[how]}"]
    words.append(f"augmentation=[{','.join(stack)}]")
    if "htm" in stack:
        words.append("augmentation.htm.tau=inf")
    return words


def measure_assignment(device: str, rounds: int) -> dict[str, Any]:
    """Times the assignment, by its kernel on a GPU and by scipy, on random saliency."""
    works = dict[str, Work]()
    solvers = {"cpu": "scipy"}
    if device == "cuda":
        solvers[device] = "kernel"
    for b, (where, solver) in product((128, 504), solvers.items()):
        gain = gain_matrix((3 * torch.randn(b, 256)).softmax(dim=1), 0.0).to(where)
        for easy in (b // 2, b):
            is_easy = (torch.arange(b) < easy).to(where)
            works[f"{solver}, {easy} of {b} easy"] = partial(optimal_donors, gain, is_easy)
    times = in_turns(works, rounds, device)
    return {name: {"ms": quartiles(times[name])} for name in works}


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Times and ratios as medians with their quartiles, in Markdown."""
    texts = pd.DataFrame.from_dict(rows, orient="index").map(shown)
    return texts.to_markdown(disable_numparse=True)


def shown(value: Any) -> str:
    if isinstance(value, dict):
        return "{median:.4g} ({low:.4g} to {high:.4g})".format_map(value)
    return f"{value:.4g}"


@one_line_errors()
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("models", nargs="*", default=[*CASES], help=", ".join(CASES))
    parser.add_argument("--rounds", type=positive, default=40)
    parser.add_argument("--out", type=Path, default="outputs/bench.json", metavar="FILE.json")
    args = parser.parse_args()
    for model in args.models:
        if model not in CASES:
            raise UserError(f"models={model}: must be one of {', '.join(CASES)}")
    device = resolve_device("auto", 1)
    report: dict[str, Any] = {
        "machine": f"{hardware_name(device)}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "rounds": args.rounds,
        "revision": git_revision(),
        "load average": os.getloadavg()[0],
    }
    say(", ".join(f"{name} {value}" for name, value in report.items()))
    ways = ["eager"]
    if device == "cuda":
        ways = [*HOW]
    tables = {"assignment": measure_assignment(device, args.rounds)}
    for model, how in product(args.models, ways):
        tables[f"{model}, {how}"] = measure(model, how, device, args.rounds)
    for title, rows in tables.items():
        say(f"\n**{title}**\n\n{table(rows)}")
    write_json(args.out, {**report, "tables": tables})
    say(f"\nload average {os.getloadavg()[0]:.1f} at the end; written to {args.out}")


if __name__ == "__main__":
    main()
