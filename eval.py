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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from reproduction.config import Config
from reproduction.runs import RunFolder, digest, plain_path
from reproduction.start import check_named, compose, expand
from reproduction.system import UserError, is_first_rank, one_line_errors, say

OWN = ("run", "weights", "checkpoint", "predictions", "images", "export")
OF_A_RUN = ("device", "devices", "dataset", "recipe.precision")
OF_A_FILE = ("device", "devices", "dataset", "recipe", "model", "output_root")
FOR_TRAINING = ("dataset.limit", "dataset.validation", "dataset.validation_seed")


def main(words: list[str]) -> None:
    if {"-h", "--help"} & {*words}:
        return say((__doc__ or "").strip())
    own = dict(x.split("=", 1) for x in words if x.partition("=")[0] in OWN)
    words = [x for x in words if x.partition("=")[0] not in OWN]
    if ("run" in own) == ("checkpoint" in own):
        raise UserError("run, checkpoint: set exactly one of them, a run folder or a file")
    if "run" in own:
        folder, which = RunFolder(os.path.expanduser(own["run"])), own.get("weights", "last")
        saved = folder.read_config()
        files, config = folder.weights(which), of_run(saved, words)
        if "export" not in own:  # which reads no images
            check_named(config.dataset, words)
        result = folder.path / f"evaluation-{which}.json"
        if images_of(config) != images_of(saved):
            name = f"{config.dataset.name}-{digest(images_of(config))}"
            result = result.with_stem(f"evaluation-{which}-{name}")
    else:
        files = [Path(os.path.expanduser(own["checkpoint"]))]
        if not files[0].is_file():
            raise UserError(f"checkpoint={files[0]}: there is no such file")
        check_keys(words, OF_A_FILE)
        config = of_words([*words, "augmentation=[]"])
        name = f"{files[0].stem}-{config.model.name}-{config.dataset.name}"
        name += f"-{digest([str(files[0].resolve()), *images_of(config)])}"
        result = Path(config.output_root, "evaluations", f"{name}.json")
    if "export" in own:
        return export(
            config, files, new_file("export", own["export"], ".safetensors"), "run" in own
        )
    new = own.get("predictions")
    predictions = None if new is None else new_file("predictions", new, ".csv")
    if "images" in own:
        return predict(config, files, Path(os.path.expanduser(own["images"])), predictions)
    return evaluate(config, files, result, predictions)


def of_run(saved: Config, words: Sequence[str]) -> Config:
    """Returns the configuration of a run with the keys that an evaluation may change."""
    keys = check_keys(words, OF_A_RUN)
    given = of_words(words)
    data = saved.dataset
    if "dataset" in keys:
        data = replace(given.dataset, mean=data.mean, std=data.std)
    leaves = {key.split(".")[1] for key in keys if key.startswith("dataset.")}
    data = replace(data, **{name: getattr(given.dataset, name) for name in leaves})
    if "options" in leaves:  # added to those of the run
        data = replace(data, options=saved.dataset.options | data.options)
    precision = given.recipe.precision if "recipe.precision" in keys else saved.recipe.precision
    return replace(
        saved,
        device=given.device if "device" in keys else saved.device,
        devices=given.devices,
        dataset=data,
        recipe=replace(saved.recipe, precision=precision),
    )


def of_words(words: Sequence[str]) -> Config:
    (one,) = expand(words)[:1]
    return compose(tuple(one))


def check_keys(words: Sequence[str], allowed: Sequence[str]) -> list[str]:
    """Returns the keys of the words; UserError for one that has no effect here."""
    keys = [word.lstrip("+").partition("=")[0] for word in words]
    for word, key in zip(words, keys, strict=True):
        if not {key, key.partition(".")[0]} & {*allowed} or key in FOR_TRAINING:
            raise UserError(f"{word}: not allowed here, allowed are {', '.join((*OWN, *allowed))}")
    return keys


def images_of(config: Config) -> list[Any]:
    """The settings that identify the held-out images and their normalisation."""
    data = asdict(config.dataset)
    names = ("name", "source", "options", "mean", "std", "eval_limit")
    return [plain_path(config.dataset.root or "."), *(data[name] for name in names)]


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


def predict(config: Config, files: list[Path], images: Path, predictions: Path | None) -> None:
    """Predicts the images of a folder, which have no classes."""
    from reproduction.training.evaluate import evaluate_checkpoint

    if not images.is_dir():
        raise UserError(f"images={images}: there is no such folder")
    if predictions is None:
        raise UserError(f"images={images}: needs predictions=FILE.csv, the file to write")
    result = evaluate_checkpoint(config, files, predictions, predictions, images)
    if is_first_rank():
        say(f"{result['checkpoint']}: {result['images']} images of {images}")
        say(f"written to {predictions}")


def evaluate(config: Config, files: list[Path], path: Path, predictions: Path | None) -> None:
    """Evaluates on the held-out images; writes the result and, if asked for, the predictions."""
    from reproduction.training.evaluate import evaluate_checkpoint

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
