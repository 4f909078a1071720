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

With run=, these may be changed: dataset=NAME, dataset.KEY but for limit, validation and
validation_seed (mean and std stay the run's unless they are named), device, devices and
recipe.precision. Code of your own, which returns the images or the model, runs only if
overrides name it: dataset.source, model.source. train.py --help shows the values.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reproduction.compose import (
    check_asked,
    compose,
    expand,
    hydra_errors,
    key_of,
    last_part,
    with_overrides,
)
from reproduction.config import Config, validated
from reproduction.errors import UserError, one_line_errors, say
from reproduction.files import write_text
from reproduction.folder import RunFolder
from reproduction.function_keys import Role
from reproduction.identity import digest, settings_of_evaluation
from reproduction.machine import is_first_rank

OPTIONS = ("run", "weights", "checkpoint", "predictions", "images", "export")
METRICS = "recipe.metrics."
OPTIONS_OF_METRICS = "recipe.metrics_options."
# beginnings of keys that may be changed for a run
OF_A_RUN = ("device", "dataset", "recipe.precision", "model.source", METRICS, OPTIONS_OF_METRICS)


def main(overrides: list[str]) -> None:
    if {"-h", "--help"} & {*overrides}:
        say((__doc__ or "").strip())
        return
    options, overrides = taken(overrides)
    if "run" in options:
        config, files, result = of_run(options, overrides)
    else:
        config, files, result = of_file(options, overrides)
    if "export" in options:
        export(config, files, options)
    else:
        evaluate(config, files, options, result)


def taken(overrides: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns those of OPTIONS by their keys, and the others; UserError if they do not fit."""
    options = {}
    others = []
    for override in overrides:
        key, _, value = override.partition("=")  # as typed: the name of a run may have a = too
        if key in OPTIONS:
            options[key] = os.path.expanduser(value)
        else:
            others.append(override)
    if ("run" in options) == ("checkpoint" in options):
        raise UserError("run=FOLDER [weights=...] or checkpoint=FILE: one of them must be given")
    if "images" in options and "predictions" not in options:
        raise UserError(f"images={options['images']}: needs predictions=FILE.csv")
    return options, others


def of_run(options: dict[str, str], overrides: Sequence[str]) -> tuple[Config, list[Path], Path]:
    """Returns the configuration of a run, its files of weights, and where a result is written."""
    folder = RunFolder(options["run"])
    if not folder.is_run():
        raise UserError(f"run={folder.path}: must be the folder of a run, with its config.yaml")
    which = options.get("weights", "last")
    saved = folder.read_config()
    files = folder.weights(which)
    config = changed(saved, overrides)
    code: list[Role] = ["model"]
    if options.keys().isdisjoint(("images", "export")):
        code.append("images")
    check_asked(config, overrides, *code)
    settings = settings_of_evaluation(config)
    hashed = [] if settings == settings_of_evaluation(saved) else [settings]
    place = folder.path / f"evaluation-{which}"
    return config, files, result_of(place, config, hashed)


def of_file(options: dict[str, str], overrides: Sequence[str]) -> tuple[Config, list[Path], Path]:
    """Returns the same of a file of weights."""
    file = Path(options["checkpoint"])
    config = given(overrides)
    place = Path(config.output_root, "evaluations", file.stem)
    hashed = [str(file.resolve()), settings_of_evaluation(config)]
    return config, [file], result_of(place, config, hashed)


def result_of(place: Path, config: Config, hashed: list[Any]) -> Path:
    """Returns the path of a result, with a hash of what distinguishes it, if anything does."""
    if not hashed:
        return place.with_name(f"{place.name}.json")
    return place.with_name(f"{place.name}-{config.dataset.name}-{digest(hashed)}.json")


def changed(saved: Config, overrides: Sequence[str]) -> Config:
    """Returns the configuration of a run with overrides merged into it, on one device by default.

    Another data set keeps the mean and std of the run.
    """
    for override in overrides:
        if not key_of(override).startswith(OF_A_RUN):
            allowed = ", ".join((*OPTIONS, *OF_A_RUN))
            raise UserError(f"{override}: not allowed here, allowed are {allowed}")
    raw = {**asdict(saved), "devices": 1, "compile": False}
    raw["recipe"]["metrics"] = {}  # only those that the overrides name run
    named = [last_part(key) for key in map(key_of, overrides) if key.startswith(METRICS)]
    options = saved.recipe.metrics_options
    raw["recipe"]["metrics_options"] = {name: options[name] for name in options if name in named}
    changes = [override for override in overrides if key_of(override) != "dataset"]
    if len(changes) < len(overrides):
        of_dataset = [override for override in overrides if key_of(override).startswith("dataset")]
        raw["dataset"] = asdict(given(of_dataset).dataset)
        raw["dataset"] |= {"mean": saved.dataset.mean, "std": saved.dataset.std}
    with hydra_errors(*overrides):
        return validated(Config, with_overrides(raw, changes))


def given(overrides: Sequence[str]) -> Config:
    """Returns the configuration of these overrides, for weights without a run."""
    expand(overrides)  # refuses keys of Hydra, which `compose` would read
    return compose((*overrides, "augmentation=[]"))  # refuses a list of values


def new_file(options: dict[str, str], key: str, ending: str) -> Path:
    """Returns the path that the key names. UserError if no such file can be created there."""
    path = Path(options[key])
    if path.suffix != ending or path.exists() or not path.parent.is_dir():
        raise UserError(f"{key}={path}: must be a new {ending} file in a folder that exists")
    return path


def export(config: Config, files: list[Path], options: dict[str, str]) -> None:
    from reproduction.data.loaders import preprocessing
    from reproduction.training.checkpoint import export as write

    path = new_file(options, "export", ".safetensors")
    if is_first_rank():
        write(config.model, files, path, preprocessing(config) if "run" in options else None)
        say(f"written to {path}")


def evaluate(config: Config, files: list[Path], options: dict[str, str], result: Path) -> None:
    """Evaluates on the held-out images, or predicts those of a folder; says what is written."""
    images = Path(options["images"]) if "images" in options else None
    if images is not None and not images.is_dir():
        raise UserError(f"images={images}: must be a folder of images")
    predictions = new_file(options, "predictions", ".csv") if "predictions" in options else None
    from reproduction.training.evaluate import TOP
    from reproduction.training.predictions import (
        evaluate_checkpoint,
        write_classes,
        write_predictions,
    )

    scores, facts, predicted = evaluate_checkpoint(config, files, images)
    if not is_first_rank():
        return
    line = f"{facts['images']} images of {images or facts['dataset']}"
    if scores is not None:
        parts = [f"top-1 {scores.top1:.2f} %"]
        if len(predicted.classes) > TOP:
            parts.append(f"top-5 {scores.top5:.2f} %")
        parts.append(f"loss {scores.loss:.4f}")
        parts += [f"{name} {value:.4g}" for name, value in scores.own.items()]
        line = f"{', '.join(parts)} on {line}"
    say(f"{facts['checkpoint']}: {line}")
    written = []
    if scores is not None:
        result.parent.mkdir(parents=True, exist_ok=True)
        write_text(result, json.dumps(facts, indent=2) + "\n")
        written.append(result)
    if predictions is not None:
        write_predictions(predictions, predicted)
        written.append(predictions)
        if scores is not None:
            by_class = result.with_name(f"{result.stem}-classes.csv")
            write_classes(by_class, predicted)
            written.append(by_class)
    say(f"written to {', '.join(map(str, written))}")


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
