"""Measures the speed of runs on this machine, and estimates the hours of tables and sweeps.

python -m scripts.benchmark.cost [STUDY ...]. It prints tables and stores nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import torch

from reproduction.config import Config
from reproduction.data.folders import DATASETS, Sizes, missing_data
from reproduction.data.sources import build_source
from reproduction.runs.identity import run_hash
from reproduction.studies.options import add_settings, study_settings
from reproduction.studies.plan import PlannedRun, plan
from reproduction.studies.study import SWEEPS, TABLES, Settings
from reproduction.system.errors import PlainError, UserError
from reproduction.system.hardware import hardware_name
from reproduction.system.terminal import Parser, one_line_errors, positive, say
from reproduction.training.distributed import resolve_device
from reproduction.training.evaluate import evaluate
from reproduction.training.loop import Trainer
from scripts.benchmark.steps import COMPILING, VARIANTS
from scripts.benchmark.timing import Spread, Work, calls_on, spread_of, time_calls, time_in_turns
from scripts.benchmark.trainers import as_measured, bare_trainer, random_batch, step_of
from scripts.on_gpu.sheet import read_sheet

SPEEDS = (
    "Medians of several rounds, images/s from the lower to the upper quartile, on synthetic images "
    "on the device; loading and augmentation limit a run if they are slower. HTM mixes every "
    "sample, the most expensive case. Hours: all epochs, each with its evaluation. A CPU does not "
    "train in float16: float32 instead."
)
ROUNDS = 5
FEW_IMAGES, STEP_SECONDS = 2, 2.0  # on a CPU: batch size of the first trial, target time of a step


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Images per second in training (median and quartiles) and in evaluation.

    `batch_size` is that of the measurement.
    """

    batch_size: int
    training: Spread
    evaluation: float


Speeds = Mapping[str, Speed]  # by speed_key


def speed_key(config: Config) -> str:
    """Returns a key that all configurations of the same speed share."""
    return run_hash(as_measured(config))


def sizes_of(config: Config) -> Sizes:
    """Returns the images of an epoch, those evaluated after it, and the classes.

    Raises UserError if images of one's own are missing or invalid.
    """
    data = config.dataset
    if (sizes := DATASETS[data.name].sizes) is None:
        if problem := missing_data(data.name, data.root):
            raise UserError(problem)
        source = build_source(data)
        return Sizes(len(source.train), len(source.per_epoch), len(source.classes))
    return sizes._replace(
        train=min(data.limit or sizes.train, sizes.train),
        held_out=min(data.eval_limit or sizes.held_out, sizes.held_out),
    )


def measure_speed(config: Config, device: str, batch_size: int | None = None) -> Speed:
    """Times training steps and evaluation on synthetic images; writes nothing.

    `device` is `cpu` or `cuda`. The default of `batch_size` is that of the recipe, reduced on a CPU
    to steps of two seconds. Raises UserError if the batch exceeds the memory of the GPU.
    """
    least = config.recipe.grad_accum_steps
    if batch_size is not None and batch_size < least:
        raise UserError(f"--batch-size={batch_size}: recipe.grad_accum_steps={least} needs as many")
    trainer = bare_trainer(as_measured(config), torch.device(device), sizes_of(config).classes)
    size = batch_size or (config.recipe.batch_size if device == "cuda" else _cpu_batch(trainer))
    works: dict[str, Work] = {
        "training": step_of(trainer, size),
        "evaluation": _evaluation_of(trainer, size),
    }
    try:
        times = time_in_turns(works, ROUNDS, calls_on(trainer.world.device))
    except (torch.OutOfMemoryError, PlainError) as error:  # of evaluation, of a training step
        if torch.OutOfMemoryError not in (type(error), type(error.__cause__)):
            raise
        raise UserError(f"--batch-size={size}: too large for the memory of this GPU") from error
    speeds = {name: spread_of([1000 * size / each for each in ms]) for name, ms in times.items()}
    return Speed(
        batch_size=size,
        training=speeds["training"],
        evaluation=speeds["evaluation"].median,
    )


def _cpu_batch(trainer: Trainer) -> int:
    """Returns a batch size with steps of STEP_SECONDS, at most that of the recipe."""
    few = max(FEW_IMAGES, trainer.recipe.grad_accum_steps)
    step = step_of(trainer, few)
    seconds = min(time_calls(step) for _ in range(2))
    return max(few, min(trainer.recipe.batch_size, int(few * STEP_SECONDS / seconds)))


def _evaluation_of(trainer: Trainer, batch_size: int) -> Work:
    batches, normalize = [[*random_batch(trainer, batch_size)]], trainer.inputs.normalize
    precision = trainer.recipe.precision
    return lambda: evaluate(trainer.module, normalize, batches, trainer.world, precision)


def run_hours(config: Config, speed: Speed) -> float:
    """Returns the hours of a run; devices are assumed to scale ideally."""
    train, held_out, _ = sizes_of(config)
    epoch = train / speed.training.median + held_out / speed.evaluation
    return config.recipe.epochs * epoch / config.devices / 3600


def hours_text(hours: float) -> str:
    """Formats with three significant digits, or as whole hours from 100 on."""
    return f"{hours:.3g}" if hours < 100 else f"{hours:,.0f}"


def speed_table(runs: Sequence[PlannedRun], speeds: Speeds) -> str:
    """Returns a row for each run of the first seed."""
    rows = []
    for run in runs:
        if run.config.seed == 0:
            speed, config = speeds[speed_key(run.config)], run.config
            median, low, high = speed.training
            rows.append(
                {
                    "run": ", ".join(run.labels),
                    "precision": config.recipe.precision,
                    "batch": str(speed.batch_size),
                    "steps/s": f"{median / speed.batch_size:.3g}",
                    "images/s": f"{median:.4g}",
                    "from..to": f"{low:.4g}..{high:.4g}",
                    "in evaluation": f"{speed.evaluation:.4g}",
                    "hours a run": hours_text(run_hours(config, speed)),
                }
            )
    return _text(rows)


def hours_table(studies: Mapping[str, Sequence[PlannedRun]], speeds: Speeds, devices: int) -> str:
    """Returns a row for each study and, if there are several, one for all without duplicates."""
    rows, everything = dict(studies), {run.name: run for runs in studies.values() for run in runs}
    if len(studies) > 1:
        rows["together"] = list(everything.values())
    shown = []
    for study, runs in rows.items():
        hours = sum(run_hours(run.config, speeds[speed_key(run.config)]) for run in runs)
        row = {"study": study, "runs": str(len(runs)), "hours, 1 device": hours_text(hours)}
        more = {f"{devices} devices, ideal scaling": hours_text(hours / devices)}
        shown.append(row | (more if devices > 1 else {}))
    return _text(shown)


def graph_table(runs: Sequence[PlannedRun], path: Path) -> str | None:
    """Returns hours by the steps in a graph that `make on-gpu` has written to `path`, if any."""
    if not path.exists():
        return None
    sheet, rows = read_sheet(path), []
    for run in runs:
        model, stack = run.config.model.name, run.config.augmentation.stack
        inside = [part for part in stack if part in ("htm", "vtm")]
        variant = next(name for name, each in VARIANTS.items() if each == inside)
        for title, table in sheet["tables"].items():
            speed = table.get(f"{variant}, compile={COMPILING[-1]}", {}).get("images/s")
            if run.config.seed == 0 and title.startswith(f"steps: {model}, ") and speed is not None:
                images = run.config.recipe.epochs * sizes_of(run.config).train
                rows.append(
                    {
                        "run": ", ".join(run.labels),
                        "as": f"{variant}, {title.removeprefix('steps: ')}",
                        "images/s": f"{speed:,.0f}",
                        "hours a run": hours_text(images / speed / 3600),
                    }
                )
    if not rows:
        return None
    return f"In a graph, {sheet['head']['hardware']}, steps alone ({path}):\n\n{_text(rows)}"


def _text(rows: Sequence[Mapping[str, str]]) -> str:
    align = ["left", *["right"] * (len(rows[0]) - 1)]
    return pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True, colalign=align)


def studies_at(settings: Settings) -> list[str]:
    """Returns the tables and sweeps with rows at this scale."""
    only = settings.chosen.only
    return [name for name in (*TABLES, *SWEEPS) if not (name == "table2" and only)]


def trainable(run: PlannedRun, device: str) -> PlannedRun:
    """Returns a run of float16 in float32 on a CPU, where train.py refuses float16."""
    recipe = run.config.recipe
    if device != "cpu" or recipe.precision != "float16":
        return run
    return replace(run, config=replace(run.config, recipe=replace(recipe, precision="float32")))


@one_line_errors("cost.py")
def main() -> None:
    parser = Parser(prog="cost.py", description=__doc__)
    parser.add_argument("studies", nargs="*", help="such as table1 sweep-tau (default: all)")
    add_settings(parser)
    parser.add_argument("--seeds", type=positive, help="seeds per run (default: as reproduce.py)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--batch-size",
        type=positive,
        help="images per step (default: the runs' own; on a CPU, as many as take two seconds)",
    )
    args = parser.parse_args()
    settings = replace(study_settings(args), devices=1)  # hours_table divides by args.devices
    if settings.uses_stand_ins:
        raise UserError(f"scale={args.scale}: runs of seconds on synthetic images are not measured")
    names = args.studies or studies_at(settings)
    device = resolve_device(args.device, 1)
    studies = {
        study: [trainable(run, device) for run in plan(study, settings, args.seeds)]
        for study in names
    }
    distinct = list({run.name: run for runs in studies.values() for run in runs}.values())
    speeds = dict[str, Speed]()
    for run in distinct:
        if (key := speed_key(run.config)) not in speeds:
            say(f"measuring {run.labels[0]}")
            speeds[key] = measure_speed(run.config, device, args.batch_size)
    say(f"\n{hardware_name(device)}\n\n{speed_table(distinct, speeds)}\n\n{SPEEDS}\n")
    say(hours_table(studies, speeds, args.devices))
    if in_graph := graph_table(distinct, Path(args.outputs, "on-gpu", "times.json")):
        say(f"\n{in_graph}")


if __name__ == "__main__":
    main()
