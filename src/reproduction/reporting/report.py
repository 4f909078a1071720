"""The report of one run: report.md and its pictures, with the data behind them."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pandas as pd
import torch

from reproduction.config import Config
from reproduction.folder import RunFolder
from reproduction.reporting.figures import CAPTIONS, draw_accuracy, draw_mixed_samples
from reproduction.reporting.trained import (
    draw_pairs,
    draw_saliency_maps,
    load_trained,
    some_images,
)
from reproduction.system import (
    UserError,
    first_line,
    is_first_rank,
    reason_of,
    say,
    warn,
    write_text,
)


def write_report(folder: RunFolder, summary: dict[str, Any]) -> None:
    """Draws the pictures, writes report.md unless it exists, and prints the result.

    Does nothing except on the first rank.
    """
    if not is_first_rank():
        return
    try:
        if not folder.report_path.exists():
            config = folder.read_config()
            head = [_description(config, summary), _table(config, summary)]
            sections = [f"# {folder.path.name}", *head, *_draw(folder, config)]
            write_text(folder.report_path, "\n\n".join(sections) + "\n")
    except (OSError, UserError) as error:  # the run itself is finished
        reason = reason_of(error) if isinstance(error, OSError) else error
        warn(f"warning: no report ({reason}); resume=auto writes it")
    say(f"{folder.path.name}: {_headline(summary)}")
    if folder.report_path.exists():
        say(f"report and pictures: {folder.report_path}")


def _draw(folder: RunFolder, config: Config) -> list[str]:
    """Draws the pictures; returns Markdown with each picture or the reason why it is missing."""
    lines, evaluated = folder.read_metrics()
    steps = pd.DataFrame([line for line in lines if not line.get("skipped")])
    epochs = pd.DataFrame(evaluated)
    if steps.empty or epochs.empty:
        return [f"No pictures: the lines of {folder.metrics_path.name} are lost."]
    images = "validation" if "val_top1" in epochs else "held-out"
    sections = [_picture("accuracy.png").format(images=images)]
    draw_accuracy(folder.path / "accuracy.png", steps, epochs)
    if config.augmentation.htm is not None:
        draw_mixed_samples(folder.path / "mixed_samples.png", steps, config.recipe.batch_size)
        sections += [_picture("mixed_samples.png"), *_draw_trained(folder, config)]
        torch.cuda.empty_cache()  # for other processes, and the ranks of the next run
    return sections


def _draw_trained(folder: RunFolder, config: Config) -> Iterator[str]:
    """Draws the pictures of the trained model; errors become text, as the run is finished."""
    try:
        trained = load_trained(config, folder)
        sample = some_images(trained)
    except (UserError, RuntimeError) as error:
        yield f"No pictures of the trained model: {_reason(error)}."
        return
    for name, draw in (("mixed_pairs.png", draw_pairs), ("saliency.png", draw_saliency_maps)):
        try:
            draw(folder.path / name, trained, sample)
            yield _picture(name)
        except (ValueError, RuntimeError) as error:
            yield f"{name} is not drawn: {_reason(error)}."


def _picture(name: str) -> str:
    return f"![{name.partition('.')[0].replace('_', ' ')}]({name})\n\n{CAPTIONS[name]}"


def _reason(error: Exception) -> str:
    """Returns messages for users as they are, and the first line of others."""
    return str(error) if isinstance(error, UserError | ValueError) else first_line(error)


def _headline(summary: dict[str, Any]) -> str:
    if summary.get("top1_best") is not None:
        others = f"best {summary['top1_best']:.2f} %"
    else:  # with a validation split
        others = f"test images; epoch {summary['selected_epoch']}, selected by validation: "
        others += f"{summary['top1_selected']:.2f} %"
    epochs = f"{summary['epochs']} epoch{'s' * (summary['epochs'] != 1)}"
    duration = timedelta(seconds=round(summary["seconds"]))
    return f"top-1 {summary['top1_last']:.2f} % ({others}) after {epochs} in {duration}"


def _description(config: Config, summary: dict[str, Any]) -> str:
    """What was trained on what, with what and where, and the result."""
    data = config.dataset
    images = data.name if data.limit is None else f"{data.limit:,} images of {data.name}"
    mixing = "+".join(config.augmentation.stack) or "no mixing"
    place = f", on {summary['hardware']}" if summary.get("hardware") else ""
    processes = f" in {config.devices} processes" if config.devices > 1 else ""
    return (
        f"{config.model.name} ({summary['parameters']:,} parameters), trained on {images} with "
        f"{mixing}, seed {config.seed}{place}{processes}: {_headline(summary)}."
    )


def _table(config: Config, summary: dict[str, Any]) -> str:
    epochs, every = int(summary["epochs"]), config.recipe.evaluate_every
    evaluated = [epoch for epoch in range(max(1, epochs - 9), epochs) if epoch % every == 0]
    rows = {"top-5": f"{summary['top5_last']:.2f} %"}
    if "selected_epoch" in summary:
        last, selected = summary["val_top1_last"], summary["val_top1_selected"]
        rows["top-1 on the validation images"] = f"{last:.2f} %"
        rows[f"the same, epoch {summary['selected_epoch']}"] = f"{selected:.2f} %"
    elif evaluated:
        median = f"top-1, median of the last {len(evaluated) + 1} evaluated epochs"
        rows[median] = f"{summary['top1_median10']:.2f} %"
    if initial := summary.get("initial_weights"):
        rows["initial weights"] = initial
    for name, numbers in summary.get("htm", {}).items():
        rows[f"htm.{name}"] = ", ".join(f"{float(x):.4g}" for x in numbers)
    rows |= {
        "peak learning rate": f"{config.recipe.lr:g}",
        "batch size": f"{config.recipe.batch_size:,}",
        "training batches": f"{summary['steps']:,}",
        "training images per second": f"{summary['images_per_second']:,.0f}",
        "git revision": str(summary["git_revision"]),
    }
    lines = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return f"| | |\n|---|---|\n{lines}"
