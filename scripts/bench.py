"""What HTM and VTM add to a training step on this machine: `make bench`.

The trainer's own steps, by the model's recipe without input mixup: plain, HTM, VTM and both in
turns, in random order in each round; on a GPU also compiled, and captured as CUDA graphs. Every
sample is easy (tau = inf), and q, k and v are scaled up so that tokens really are replaced. Ratios
are taken within each round, so that a machine that slows down does not change them. The plain step
runs twice in it: `plain again` shows the noise, and the others are compared with the mean of both.
"""

import json
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
from scipy.stats import quantile_test

from reproduction.models.build import build_module, without_weights
from reproduction.start import compose
from reproduction.system import (
    Parser,
    UserError,
    first_line,
    git_revision,
    hardware_name,
    one_line_errors,
    say,
    write_text,
)
from reproduction.training.ranks import World, resolve_device
from reproduction.training.step import Trainer
from scripts import positive
from tokenmixup.assignment import gain_matrix, optimal_donors

Work = Callable[[], Any]
CASES = {  # model -> words of its own recipe, classes, factor on its q, k, v, images on CPU and GPU
    "cct_2_3x2": (["dataset=digits", "recipe=quickstart"], 10, 12, 128, 128),
    "cct_7_3x1": (["dataset=cifar100", "recipe=cifar_cct"], 100, 6, 16, 128),
    "vit_base_patch16_224": (["dataset=imagenet1k", "recipe=imagenet_vit"], 1000, 3, 4, 128),
}
METHODS = {"plain": "", "HTM": "htm", "VTM": "vtm", "both": "htm,vtm"}
HOW = {"eager": "false", "compiled": "true", "graph": "cuda-graph"}  # values of `compile`
WARM_UP, CALLS_ON_GPU = 2, 10  # rounds that do not count; calls between two looks at the clock


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
    with torch.no_grad():
        for block in model.blocks if sharpness != 1 else ():
            block.attn.qkv.weight.mul_(sharpness)
    size, device = trainer.config.model.image_size, trainer.world.device
    batch = torch.randint(256, (images, 3, size, size), dtype=torch.uint8)
    labels = torch.arange(images) % classes
    return partial(trainer.train_step, batch.to(device), labels.to(device), images)


def in_turns(works: Mapping[str, Work], rounds: int, device: str) -> pd.DataFrame:
    """Milliseconds a call: a row for each round, a column for each work."""
    calls, rng, rows = CALLS_ON_GPU if device == "cuda" else 1, np.random.default_rng(0), []
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(WARM_UP + rounds):
        row = {}
        for name in rng.permutation([*works]).tolist():
            wait()
            start = time.perf_counter()
            for _ in range(calls):
                works[name]()
            wait()
            row[name] = 1000 * (time.perf_counter() - start) / calls
        rows.append(row)
    return pd.DataFrame(rows[WARM_UP:])[[*works]]


def quartiles(values: pd.Series) -> dict[str, float]:
    """Median and quartiles, and the 95 % interval of the median by order statistics."""
    interval = quantile_test(values, p=0.5).confidence_interval(confidence_level=0.95)
    low, median, high = values.quantile([0.25, 0.5, 0.75])
    least, most = np.fmax(interval.low, values.min()), np.fmin(interval.high, values.max())
    return {"median": median, "low": low, "high": high, "least": least, "most": most}


def measure(model: str, how: str, device: str, rounds: int) -> dict[str, Any]:
    """Times the steps of a model: name -> ms, ratio to plain, images/s, tokens replaced."""
    recipe, classes, sharpness, *batches = CASES[model]
    images, precision = (batches[1], "bf16") if device == "cuda" else (batches[0], "float32")
    works, tokens = dict[str, Work](), dict[str, float]()
    for name, stack in METHODS.items():
        words = [f"model={model}", *recipe, f"recipe.precision={precision}", f"compile={HOW[how]}"]
        words += [f"augmentation=[{stack}]", *["augmentation.htm.tau=inf"] * ("htm" in stack)]
        try:
            step = training_step(words, classes, images, sharpness)
            tokens[name] = float(step()[0].output.stats["mixed_tokens"])
        except Exception as error:  # of a compiler, or a lack of memory
            say(f"not timed: {model}, {how}, {name}: {first_line(error)}")
            continue
        works |= {name: step} | ({f"{name} again": step} if name == "plain" else {})
    times, rows = in_turns(works, rounds, device), {}
    plain = [name for name in works if name.startswith("plain")]
    for name in works:
        ms, mixed = quartiles(times[name]), tokens.get(name, 0)
        rows[name] = {"ms": ms, "images/s": 1000 * images / ms["median"], "tokens": mixed}
        if base := plain[:1] if name in plain else plain:
            rows[name]["ratio"] = quartiles(times[name] / times[base].mean(axis=1))
    return rows


def measure_assignment(device: str, rounds: int) -> dict[str, Any]:
    """Times the assignment, by its kernel on a GPU and by scipy, on random saliency."""
    works = dict[str, Work]()
    for b, where in product((128, 504), dict.fromkeys(["cpu", device])):
        gain = gain_matrix((3 * torch.randn(b, 256)).softmax(dim=1), 0.0).to(where)
        for easy in (b // 2, b):
            is_easy = (torch.arange(b) < easy).to(where)
            name = f"{'kernel' if where == 'cuda' else 'scipy'}, {easy} of {b} easy"
            works[name] = partial(optimal_donors, gain, is_easy)
    return {
        name: {"ms": quartiles(times)} for name, times in in_turns(works, rounds, device).items()
    }


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Times and ratios as medians with their quartiles, in Markdown."""
    shown = "{median:.4g} ({low:.4g} to {high:.4g})".format_map
    texts = pd.DataFrame(rows).T.map(lambda x: shown(x) if isinstance(x, dict) else f"{x:.4g}")
    return texts.to_markdown(disable_numparse=True)


def slower(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What got slower beyond the noise: the intervals of the medians do not overlap."""
    return [
        f"slower: {title}: {name}: {x} {before[x]['median']:.4g} -> {row[x]['median']:.4g}"
        for title, rows in new["tables"].items()
        for name, row in rows.items()
        for x in {"ms", "ratio"} & {*row}
        if (before := old["tables"].get(title, {}).get(name))
        if row[x]["least"] > before[x]["most"]
    ]


@one_line_errors("bench.py")
def main() -> None:
    parser = Parser(prog="bench.py", description=__doc__)
    parser.add_argument("models", nargs="*", default=[*CASES], help=", ".join(CASES))
    parser.add_argument("--rounds", type=positive, default=40)
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="say what got slower")
    parser.add_argument("--out", type=Path, default="outputs/bench.json", metavar="FILE.json")
    args = parser.parse_args()
    if odd := {*args.models} - {*CASES}:
        raise UserError(f"models={min(odd)}: must be one of {', '.join(CASES)}")
    device = resolve_device("auto", 1)
    machine = f"{hardware_name(device)}, {torch.get_num_threads()} threads"
    new: dict[str, Any] = {"machine": machine, "torch": torch.__version__, "rounds": args.rounds}
    new |= {"revision": git_revision(), "load average": os.getloadavg()[0]}
    try:
        old = json.loads(args.compare.read_text()) if args.compare else new
    except ValueError as error:
        raise UserError(f"compare={args.compare}: is no report: {error}") from error
    if old["machine"] != machine:
        raise UserError(f"compare={args.compare}: measured on {old['machine']}, this is {machine}")
    say(", ".join(f"{key} {value}" for key, value in new.items()))
    new["tables"] = {"assignment": measure_assignment(device, args.rounds)}
    for model, how in product(args.models, HOW if device == "cuda" else ["eager"]):
        new["tables"][f"{model}, {how}"] = measure(model, how, device, args.rounds)
    for title, rows in new["tables"].items():
        say(f"\n**{title}**\n\n{table(rows)}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(args.out, json.dumps(new, indent=2) + "\n")
    say(f"\nload average {os.getloadavg()[0]:.1f} at the end; written to {args.out}")
    if args.compare:
        say("\n".join(slower(old, new)) or f"nothing got slower than in {args.compare}")


if __name__ == "__main__":
    main()
