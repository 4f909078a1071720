"""docs/configuration.md: all groups and keys, from the schema and the files in conf/."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import TypeAdapter

from reproduction.config import CONF_DIR, Config
from reproduction.runs.compose import options_of
from tokenmixup import HTM, VTM, ManifoldMixup
from tokenmixup.settings import allowed_of

LIBRARY: dict[str, Any] = {"HTM": HTM, "VTM": VTM, "ManifoldMixup": ManifoldMixup}
GROUPS = ("model", "dataset", "augmentation", "recipe", "logger", "experiment")
INTRODUCTION = """# Configuration

`python train.py group=option key=value ...`; `-m` sweeps over several values. A mistyped key, value
or option ends in a one-line error before anything is written. `python train.py group=option --help`
shows the values in use. `python scripts/write_docs.py` writes this page from `conf/` and the
schema.
"""


class Section(NamedTuple):
    """The keys of a class of the schema, with the values and comments of a file in conf/."""

    title: str
    schema: str
    prefix: str
    file: str


SECTIONS = (
    Section("Run", "Config", "", "train.yaml"),
    Section("Checkpoints", "Checkpoint", "checkpoint.", "train.yaml"),
    Section("Mixing", "Augmentation", "augmentation.", "train.yaml"),
    Section("Horizontal TokenMixup", "HTM", "augmentation.htm.", "augmentation/htm.yaml"),
    Section("Vertical TokenMixup", "VTM", "augmentation.vtm.", "augmentation/vtm.yaml"),
    Section("Input mixup", "InputMix", "augmentation.mixup.", "augmentation/mixup.yaml"),
    Section("CutMix", "CutMix", "augmentation.cutmix.", "augmentation/cutmix.yaml"),
    Section(
        "Manifold mixup",
        "ManifoldMixup",
        "augmentation.manifold_mixup.",
        "augmentation/manifold_mixup.yaml",
    ),
    Section("Recipe", "Recipe", "recipe.", "recipe/cifar_cct.yaml"),
    Section("Transforms", "Transforms", "recipe.transforms.", "recipe/cifar_cct.yaml"),
    Section("Data set", "Dataset", "dataset.", "dataset/image_folder.yaml"),
    Section("Validation and own data", "Dataset", "dataset.", "train.yaml"),
    Section("CCT, CVT, ViT-Lite", "CCT", "model.", "model/cct_7_3x1.yaml"),
    Section("ViT (timm)", "ViT", "model.", "model/vit_base_patch16_224.yaml"),
    Section("Other models", "Library", "model.", "model/resnet18.yaml"),
    Section("wandb", "Wandb", "logger.wandb.", "logger/wandb.yaml"),
    Section("TensorBoard", "TensorBoard", "logger.tensorboard.", "logger/tensorboard.yaml"),
)


def configuration_page() -> str:
    """Returns the page: a table for each part of the schema."""
    schema = TypeAdapter(Config).json_schema()
    definitions = schema["$defs"] | {"Config": schema}
    parts = [INTRODUCTION, "## Groups\n", "| group | options |\n|---|---|"]
    parts += [f"| `{group}` | {', '.join(_options(group))} |" for group in GROUPS]
    for section in SECTIONS:
        parts.append(f"\n## {section.title}\n\nValues of `conf/{section.file}`.\n")
        parts.append("| key | value | allowed | |\n|---|---|---|---|")
        parts += _rows(section, _keys(section.schema, definitions))
    return "\n".join(parts) + "\n"


def _options(group: str) -> Iterator[str]:
    """Yields the options of a group, the defaults first."""
    entries = yaml.safe_load((CONF_DIR / "train.yaml").read_text())["defaults"]
    chosen = next((x[group] for x in entries if isinstance(x, dict) and group in x), None)
    chosen = chosen if isinstance(chosen, list) else [chosen]
    for name in sorted(options_of(group), key=lambda option: option not in chosen):
        yield f"`{name}`" + (" (default)" if name in chosen else "")


def _keys(name: str, definitions: Mapping[str, Any]) -> dict[str, str]:
    """Returns the allowed values, in words, by key of a class of the schema or the library."""
    if name in LIBRARY:
        options = allowed_of(LIBRARY[name])
        words = {key: re.sub("^(one of|an?) ", "", x.allowed) for key, x in options.items()}
        for rule in LIBRARY[name].beside:
            words[rule.other] += f"; {rule.words()}"
        return words
    properties = definitions[name]["properties"].items()
    return {key: _allowed(schema) for key, schema in properties if "$ref" not in str(schema)}


def _rows(section: Section, keys: Mapping[str, str]) -> Iterator[str]:
    values = _read_values(CONF_DIR / section.file)
    group = section.file.partition("/")[0]
    prefix = section.prefix.removeprefix(f"{group}.")  # files of a group leave out its name
    for name, allowed in keys.items():
        if prefix + name in values:
            value, comment = values[prefix + name]
            cells = (f"`{section.prefix}{name}`", value, allowed, comment)
            yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _read_values(path: Path) -> dict[str, tuple[str, str]]:
    """Returns value and comment by dotted key, from a file of two levels."""
    values: dict[str, tuple[str, str]] = {}
    parent = ""
    for line in path.read_text().splitlines():
        if key := re.match(r"( *)(\w+): *(.*?) *(?:# (.*))?$", line):
            indent, name, value, comment = key.groups(default="")
            parent = parent if indent else f"{name}."
            if value:
                values[parent + name if indent else name] = (value, comment)
    return values


WORDS = {"boolean": "true, false", "object": "mapping"}
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def _allowed(schema: Mapping[str, Any]) -> str:
    """Describes a type and its range in words; bounds of 1e9 and more are left out."""
    if "anyOf" in schema:
        return " or ".join(_allowed(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if schema["type"] == "array":
        return f"list: {_allowed(schema['items'])}"
    word = WORDS.get(schema["type"], schema["type"])
    limits = [(sign, schema[key]) for key, sign in BOUNDS.items() if schema.get(key, 1e9) < 1e9]
    if len(limits) == 2:
        (sign, least), (below, most) = limits
        return f"{least:g} {sign.replace('>', '<')} {word} {below} {most:.10g}"
    return " ".join([word, *(f"{sign} {limit:g}" for sign, limit in limits)])
