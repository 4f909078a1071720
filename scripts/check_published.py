"""Evaluates up to nine published checkpoints and compares them with the printed accuracies.

python -m scripts.check_published FOLDER [key=value ...]: the words are train.py's, such as
`dataset.root=folder`. As published, CCT is evaluated in float16 on a GPU, all else in float32.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from reproduction.compose import compose
from reproduction.errors import PlainError, UserError, one_line_errors, say
from reproduction.files import write_json
from reproduction.studies.study import studies
from reproduction.training.predictions import evaluate_checkpoint

EXPERIMENTS = {  # by the name of the file, without its suffix
    "cct_cifar10_HTM": "table1/cifar10_htm",
    "cct_cifar10_VTM": "table1/cifar10_vtm",
    "cct_cifar10_HVTM": "table1/cifar10_htm_vtm",
    "cct_cifar100_HTM": "table1/cifar100_htm",
    "cct_cifar100_VTM": "table1/cifar100_vtm",
    "cct_cifar100_HVTM": "table1/cifar100_htm_vtm",
    "vit_imagenet_HTM": "table2/imagenet1k_htm",
    "vit_imagenet_VTM": "table2/imagenet1k_vtm",
    "vit_imagenet_HVTM": "table2/imagenet1k_htm_vtm",
}


@one_line_errors()
def main() -> int:
    """Prints a line for each file; the exit status is 1 if one could not be evaluated."""
    folder, *words = sys.argv[1:] or ["--help"]
    if folder == "--help":
        say(str(__doc__))
        return 0
    files = {path.name.partition(".")[0]: path for path in sorted(Path(folder).glob("*.*"))}
    if EXPERIMENTS.keys().isdisjoint(files):
        raise UserError(f"{folder}: holds none of {', '.join(f'{name}.*' for name in EXPERIMENTS)}")
    status = 0
    for name, experiment in EXPERIMENTS.items():
        printed = printed_of(experiment)
        text = "no such file"
        if name in files:
            try:
                top1 = accuracy_of(files[name], [f"experiment={experiment}", *words])
                text = f"{top1:.2f} % ({top1 - printed:+.2f})"
            except (UserError, PlainError) as error:
                text = str(error)
                status = 1
        say(f"{name}: {experiment}, printed {printed:.2f} %: {text}")
    return status


def printed_of(experiment: str) -> float:
    """Returns the accuracy that the paper's table has of an experiment."""
    (study,) = studies(experiment).values()
    (row,) = study.rows.values()
    return row.printed["top1"]


def accuracy_of(file: Path, words: Sequence[str]) -> float:
    """Returns the accuracy, by the function of eval.py, and writes it to a file."""
    precision = "float32"
    if file.name.startswith("cct") and torch.cuda.is_available():
        precision = "float16"
    config = compose([f"recipe.precision={precision}", *words])
    result = Path(config.output_root, "evaluations", f"{file.name.partition('.')[0]}.json")
    scores, facts, _ = evaluate_checkpoint(config, [file])
    assert scores is not None
    write_json(result, facts)
    return scores.top1


if __name__ == "__main__":
    sys.exit(main())
