"""Evaluates up to nine published checkpoints and compares them with the printed accuracies."""

from dataclasses import replace
from pathlib import Path

from reproduction.data.folders import missing_data
from reproduction.studies.plan import Point, points_of
from reproduction.studies.study import Settings, papers_studies
from reproduction.system.errors import PlainError, UserError
from reproduction.system.terminal import Parser, one_line_errors, say

STACKS = {"HTM": "htm", "VTM": "vtm", "HVTM": "htm_vtm"}
DATA = {
    "cct_cifar10": "table1/cifar10",
    "cct_cifar100": "table1/cifar100",
    "vit_imagenet": "table2/imagenet1k",
}
FILES = {  # file name without suffix -> row of the paper
    f"{name}_{suffix}": f"{experiment}_{stack}"
    for name, experiment in DATA.items()
    for suffix, stack in STACKS.items()
}


def weights_in(folder: Path) -> dict[str, Path]:
    """The published files in a folder by name; UserError if there are none."""
    names = {path: path.name.partition(".")[0] for path in sorted(folder.glob("*"))}
    files = {name: path for path, name in names.items() if name in FILES and path.is_file()}
    if not files:
        known = ", ".join(f"{name}.*" for name in FILES)
        raise UserError(f"weights={folder}: holds none of {known}; put the published files there")
    return files


def outcome(point: Point, file: Path | None, outputs: Path) -> str:
    """The accuracy and its difference to the printed one, or the reason why there is none."""
    import torch

    from reproduction.training.evaluate import evaluate_checkpoint

    if file is None:
        return "no such file"
    config = point.config
    if reason := missing_data(config.dataset.name, config.dataset.root):
        return f"not evaluated, {reason}"
    # As published: CCT in float16 autocast, ViT in float32. A CPU always uses float32.
    in_half = point.study == "table1" and torch.cuda.is_available()
    recipe = replace(config.recipe, precision="float16" if in_half else "float32")
    result = outputs / "evaluations" / f"{file.name.partition('.')[0]}.json"
    top1 = evaluate_checkpoint(replace(config, recipe=recipe), [file], result)["top1"]
    return f"{top1:.2f} % ({top1 - point.row.printed['top1']:+.2f})"


@one_line_errors("check_published.py")
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("weights", type=Path, help="folder with the published files")
    parser.add_argument("--data", default="data", help="folder with CIFAR and imagenet/")
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), help="folder of results")
    args = parser.parse_args()
    files = weights_in(args.weights)
    studies = {name: papers_studies()[name] for name in ("table1", "table2")}
    points = {point.label: point for point in points_of(studies, Settings(data=args.data))}
    for name, label in FILES.items():
        point = points[label]
        try:
            result = outcome(point, files.get(name), args.outputs)
        except (UserError, PlainError) as error:
            result = str(error)
        row, printed = point.row, point.row.printed["top1"]
        say(f"{name}: {row.row} on {row.column}, printed {printed:.2f} %: {result}")


if __name__ == "__main__":
    main()
