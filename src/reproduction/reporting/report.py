"""The report of one run: report.md and its pictures, with the data behind them."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from reproduction.config import Config
from reproduction.errors import OneLineError, message_of, say, warn
from reproduction.files import write_text
from reproduction.folder import RunFolder
from reproduction.machine import is_first_rank
from reproduction.reporting.drawing import (
    ACCURACY,
    MIXED_SAMPLES,
    draw_accuracy,
    draw_mixed_samples,
)
from reproduction.reporting.pictures import draw_pairs, draw_saliency_maps
from reproduction.reporting.trained import Sample, TrainedRun, load_trained, some_images

Draw = Callable[[Path, TrainedRun, Sample], str]  # returns what is drawn
# What the methods of a stack do
METHODS = {
    "htm": (
        "HTM gives easy samples of a batch, those whose difficulty (the loss of a small head, "
        "ScoreNet, on the tokens) is below tau, tokens of other samples, where those are more "
        "salient by more than rho; the label moves by the share of saliency that was exchanged."
    ),
    "vtm": (
        "VTM lets a block attend to its own tokens and, as more keys and values, to the kappa most "
        "salient tokens of each earlier block."
    ),
}
WHERE = (
    "All settings are in [config.yaml](config.yaml), all numbers in [summary.json](summary.json), "
    "and those of each batch and epoch in [metrics.jsonl](metrics.jsonl)."
)
OF_TRAINED: dict[str, Draw] = {  # of HTM
    "mixed_pairs.png": draw_pairs,
    "saliency.png": draw_saliency_maps,
}


def write_report(folder: RunFolder, config: Config, summary: dict[str, Any]) -> None:
    """Draws the pictures, writes report.md unless it exists, and prints the result.

    Does nothing except on the first rank.
    """
    if not is_first_rank():
        return
    name = folder.path.name
    try:
        if not folder.report_path.exists():
            sections = [f"# {name}", _description(config, summary)]
            sections += [METHODS[x] for x in config.augmentation.stack if x in METHODS]
            sections.append(WHERE)
            sections += _draw(folder, config)
            write_text(folder.report_path, "\n\n".join(sections) + "\n")
    except Exception as error:  # of any library: the run itself is finished
        warn(f"warning: no report ({message_of(error)}); resume=auto writes it")
    say(f"{name}: {_headline(summary)}")
    if folder.report_path.exists():
        say(f"report and pictures: {folder.report_path}")


# --- pictures -----------------------------------------------------------------------------------


def _draw(folder: RunFolder, config: Config) -> list[str]:
    """Draws the pictures; returns Markdown with each picture or the reason why it is missing."""
    step_lines, epoch_lines = folder.read_metrics()
    steps = pd.DataFrame(step_lines)
    epochs = pd.DataFrame(epoch_lines)
    if steps.empty or epochs.empty:
        return [f"No pictures: the lines of {folder.metrics_path.name} are lost."]
    sections = [_picture("accuracy.svg", ACCURACY)]
    draw_accuracy(folder.path / "accuracy.svg", steps, epochs)
    if "htm" in config.augmentation.stack:
        draw_mixed_samples(folder.path / "mixed_samples.svg", steps, config.recipe.batch_size)
        sections.append(_picture("mixed_samples.svg", MIXED_SAMPLES))
        sections += _draw_trained(folder, config)
        torch.cuda.empty_cache()  # for other processes, and the ranks of the next run
    return sections


def _draw_trained(folder: RunFolder, config: Config) -> Iterator[str]:
    """Draws the pictures of the trained model; errors become text, as the run is finished."""
    try:
        trained = load_trained(config, folder)
        sample = some_images(trained)
    except (OneLineError, RuntimeError) as error:
        yield f"No pictures of the trained model: {message_of(error)}."
        return
    for name, draw in OF_TRAINED.items():
        try:
            yield _picture(name, draw(folder.path / name, trained, sample))
        except ValueError as error:
            yield f"{name} is not drawn: {error}."
        except RuntimeError as error:
            yield f"{name} is not drawn: {message_of(error)}."


def _picture(name: str, caption: str) -> str:
    return f"![{name}]({name})\n\n{caption}"


# --- text ---------------------------------------------------------------------------------------


def _headline(summary: dict[str, Any]) -> str:
    epochs = "1 epoch"
    if summary["epochs"] != 1:
        epochs = f"{summary['epochs']} epochs"
    duration = timedelta(seconds=round(summary["seconds"]))
    last = f"top-1 {summary['top1_last']:.2f} %"
    ran = f"after {epochs} in {duration}"
    if summary.get("top1_best") is not None:
        return f"{last} (best {summary['top1_best']:.2f} %) {ran}"
    selected = f"{summary['top1_selected']:.2f} %"  # with a validation split
    epoch = summary["selected_epoch"]
    return f"test {last} ({selected} with epoch {epoch}, the best by validation) {ran}"


def _description(config: Config, summary: dict[str, Any]) -> str:
    """What was trained on what, and the result."""
    mixing = "+".join(config.augmentation.stack) or "no mixing"
    return (
        f"{config.model.name} ({summary['parameters']:,} parameters), trained on "
        f"{config.dataset.name} with {mixing}, seed {config.seed}: {_headline(summary)}."
    )
