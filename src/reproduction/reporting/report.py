"""The report of one run: report.md and its pictures, beside the figures they are made from."""

from typing import Any

from reproduction.parse import parse_saved
from reproduction.reporting.figures import draw_accuracy, draw_mixed_samples
from reproduction.reporting.gallery import draw_pairs
from reproduction.runs import RunFolder, write_text


def write_report(folder: RunFolder, summary: dict[str, Any]) -> None:
    """Draws the pictures, writes report.md and says where; a finished report stays."""
    report = folder.report_path
    if not report.exists():
        pictures = _draw(folder)
        write_text(report, _page(folder, summary, pictures))
    print(
        f"{folder.path.name}: top-1 {summary['top1_last']:.2f} % (best {summary['top1_best']:.2f} "
        f"%, median of the last 10 epochs {summary['top1_median10']:.2f} %) after "
        f"{summary['epochs']} epochs in {summary['seconds']:.0f} s"
    )
    print(f"report and pictures: {report}")


def _draw(folder: RunFolder) -> dict[str, str]:
    """Draws what the run has; file name -> caption."""
    config = parse_saved(folder.read_config())
    steps, epochs = folder.read_metrics()
    if not steps or not epochs:
        return {}  # lost, though the run is finished
    pictures = {"accuracy.png": "Held-out accuracy, and loss in training and held out."}
    draw_accuracy(folder.path / "accuracy.png", steps, epochs)
    if config.augmentation.htm is not None:
        draw_mixed_samples(folder.path / "mixed_samples.png", steps, config.recipe.batch_size)
        pictures["mixed_samples.png"] = (
            "Samples that HTM mixes in each batch, and tokens that it replaces in each of them "
            "(dots: batches; line: running mean)."
        )
        if draw_pairs(folder.path / "mixed_pairs.png", config, folder.last_path):
            pictures["mixed_pairs.png"] = (
                "Mixed pairs of the trained model on images without augmentation: what the donor "
                "gives is framed. Tokens mix inside the network; the patches stand for them."
            )
    return pictures


def _page(folder: RunFolder, summary: dict[str, Any], pictures: dict[str, str]) -> str:
    rows = {
        "top-1, last epoch": f"{summary['top1_last']:.2f} %",
        "top-1, best epoch": f"{summary['top1_best']:.2f} %",
        "top-1, median of the last 10 epochs": f"{summary['top1_median10']:.2f} %",
        "top-5, last epoch": f"{summary['top5_last']:.2f} %",
        "epochs / batches": f"{summary['epochs']} / {summary['steps']}",
        "parameters": f"{summary['parameters']:,}",
        "MACs of one image": f"{summary['macs']:,}",
        "training images per second": f"{summary['images_per_second']:,.0f}",
        "seconds": f"{summary['seconds']:,.0f}",
        "seed": summary["seed"],
        "git revision": summary["git_revision"],
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    shown = "\n\n".join(f"![{text}]({name})\n\n{text}" for name, text in pictures.items())
    return f"# {folder.path.name}\n\n| | |\n|---|---|\n{table}\n\n{shown}\n"
