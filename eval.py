"""Evaluates a run or a file of weights, predicts images, or exports the plain model.

  python eval.py run=FOLDER [weights=best] [predictions=FILE.csv] [key=value ...]
  python eval.py run=FOLDER images=FOLDER predictions=FILE.csv      images without classes
  python eval.py run=FOLDER export=FILE.safetensors
  python eval.py checkpoint=FILE model=... [export=...] [dataset=... recipe=... key=value ...]

  run          folder of a run; its model, data set and recipe are used
  weights      of the run: last (default) or best
  checkpoint   file of weights, of the given model
  predictions  new file: class, predicted class and probabilities of each image
  images       folder of images without classes, of any depth, to predict instead
  export       new file: the plain model, by our names for a CCT, timm's for a ViT

Of a run, dataset=NAME and dataset.KEY change the images (which keep their mean and std unless these
are named), device, devices and recipe.precision the place. A function of your own, which returns
the images, runs only if dataset.source names it. train.py --help shows the values.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from reproduction.config import Config, parse
from reproduction.runs import RunFolder, digest, settings
from reproduction.start import check_named, compose, expand, one_line
from reproduction.system import UserError, is_first_rank, one_line_errors, say

OWN = ("run", "weights", "checkpoint", "predictions", "images", "export")
OF_A_RUN = ("device", "devices", "dataset", "recipe.precision")
OF_A_FILE = ("device", "devices", "dataset", "recipe", "model", "output_root")
FOR_TRAINING = ("dataset.limit", "dataset.validation", "dataset.validation_seed")


def main(words: list[str]) -> None:
    if {"-h", "--help"} & {*words}:
        return say((__doc__ or "").strip())
    own = {x.partition("=")[0]: x.partition("=")[2] for x in words if x.partition("=")[0] in OWN}
    words = [x for x in words if x.partition("=")[0] not in OWN]
    is_run = bool(own.get("run"))
    if is_run == bool(own.get("checkpoint")) or ("images" in own and "predictions" not in own):
        raise UserError("run=FOLDER or checkpoint=FILE: one of them; images needs predictions=FILE")
    if is_run:
        folder, which = RunFolder(os.path.expanduser(own["run"])), own.get("weights", "last")
        saved = folder.read_config()
        files, config = folder.weights(which), of_run(saved, words)
        if "export" not in own:  # which reads no images
            check_named(config.dataset, words)
        name = f"evaluation-{which}"
        if of_data(config) != of_data(saved):
            name += f"-{config.dataset.name}-{digest(of_data(config))}"
        result = folder.path / f"{name}.json"
    else:
        files, config = [Path(os.path.expanduser(own["checkpoint"]))], of_file(words)
        name = f"{files[0].stem}-{config.model.name}-{config.dataset.name}"
        name += f"-{digest([str(files[0].resolve()), of_data(config)])}"
        result = Path(config.output_root, "evaluations", f"{name}.json")
    if "export" in own:
        return export(config, files, new_file("export", own["export"], ".safetensors"), is_run)
    predictions = None
    if "predictions" in own:
        predictions = new_file("predictions", own["predictions"], ".csv")
    if predictions is not None and "images" in own:
        return predict(config, files, Path(os.path.expanduser(own["images"])), predictions)
    return evaluate(config, files, result, predictions)


def of_run(saved: Config, words: Sequence[str]) -> Config:
    """Returns the configuration of a run with the words merged into it, on one device by default.

    Another data set keeps the mean and std of the run.
    """
    check_keys(words, OF_A_RUN)
    raw, leaves = {**asdict(saved), "devices": 1}, [x.removeprefix("+") for x in words]
    if any(x.startswith("dataset=") for x in words):
        leaves = [x for x in leaves if not x.startswith("dataset=")]
        other = asdict(of_file(words).dataset)
        raw["dataset"] = other | {key: raw["dataset"][key] for key in ("mean", "std")}
    with one_line(*words):
        tree: Any = OmegaConf.merge(raw, OmegaConf.from_dotlist(leaves))
        return parse(OmegaConf.to_container(tree, resolve=True))


def of_file(words: Sequence[str]) -> Config:
    """Returns the configuration of these words, for weights without a run."""
    check_keys(words, OF_A_FILE)
    return compose((*expand(words)[0], "augmentation=[]"))


def of_data(config: Config) -> dict[str, Any]:
    return {key: x for key, x in settings(config).items() if key.startswith("dataset.")}


def check_keys(words: Sequence[str], allowed: Sequence[str]) -> None:
    """Raises UserError for a key that has no effect here."""
    for word in words:
        key = word.removeprefix("+").partition("=")[0]
        if not {key, key.partition(".")[0]} & {*allowed} or key in FOR_TRAINING:
            raise UserError(f"{word}: not allowed here, allowed are {', '.join((*OWN, *allowed))}")


def new_file(key: str, name: str, ending: str) -> Path:
    """Returns the path. UserError if no file with this ending can be created there."""
    path = Path(os.path.expanduser(name))
    if path.suffix != ending or os.path.lexists(path) or not path.parent.is_dir():
        raise UserError(f"{key}={name}: must be a new {ending} in a folder that exists")
    return path


def export(config: Config, files: list[Path], path: Path, is_run: bool) -> None:
    from reproduction.training.checkpoint import export as write

    if is_first_rank():
        write(config.model, files, path, config.preprocessing if is_run else None)
        say(f"written to {path}")


def predict(config: Config, files: list[Path], images: Path, predictions: Path) -> None:
    """Predicts the images of a folder, which have no classes."""
    from reproduction.training.predictions import evaluate_checkpoint

    result = evaluate_checkpoint(config, files, predictions, predictions, images)
    if is_first_rank():
        say(f"{result['checkpoint']}: {result['images']} images of {images}")
        say(f"written to {predictions}")


def evaluate(config: Config, files: list[Path], path: Path, predictions: Path | None) -> None:
    """Evaluates on the held-out images; writes the result and, if asked for, the predictions."""
    from reproduction.training.predictions import evaluate_checkpoint

    result = evaluate_checkpoint(config, files, path, predictions)
    if not is_first_rank():
        return
    place, epoch = "", result.get("epoch")
    if "step" in result:
        place = f" (step {result['step']}, {epoch} completed epoch{'s' * (epoch != 1)})"
    say(
        f"{result['checkpoint']}{place}: top-1 {result['top1']:.2f} %, "
        f"top-5 {result['top5']:.2f} %, loss {result['eval_loss']:.4f} "
        f"on {result['images']} images of {result['dataset']}"
    )
    say(f"written to {path}")
    if predictions is not None:
        from reproduction.reporting.figures import draw_confusion
        from reproduction.training.predictions import table_path

        picture, table = draw_confusion(path), table_path(path, "classes")
        say(f"written to {predictions}, {table} and {picture}")


if __name__ == "__main__":
    with one_line_errors("eval.py"):
        main(sys.argv[1:])
