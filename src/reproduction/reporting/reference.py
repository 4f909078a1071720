"""docs/configuration.md: every group and key, from the schema and the files in conf/."""

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

LIBRARY = {"HTM": HTM, "VTM": VTM, "ManifoldMixup": ManifoldMixup}
GROUPS = ("model", "dataset", "augmentation", "recipe", "logger", "experiment")
INTRODUCTION = """# Configuration

`python train.py group=option key=value ...`; several values with `-m`. A mistyped key, value or
option ends in one line before anything is written. This page is written from `conf/` and the schema
by `python scripts/write_docs.py`; `python train.py --help` shows the values in use.
"""


class Section(NamedTuple):
    """Keys below `prefix`, of a class of the schema, with values and comments of a file."""

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
    Section("CutMix", "InputMix", "augmentation.cutmix.", "augmentation/cutmix.yaml"),
    Section(
        "Manifold mixup",
        "ManifoldMixup",
        "augmentation.manifold_mixup.",
        "augmentation/manifold_mixup.yaml",
    ),
    Section("Recipe", "Recipe", "recipe.", "recipe/cifar_cct.yaml"),
    Section("Transforms", "Transforms", "recipe.transforms.", "recipe/cifar_cct.yaml"),
    Section("Data set", "Dataset", "dataset.", "dataset/image_folder.yaml"),
    Section("CCT, CVT, ViT-Lite", "CCT", "model.", "model/cct_7_3x1.yaml"),
    Section("ViT of timm's", "ViT", "model.", "model/vit_base_patch16_224.yaml"),
    Section("Other models", "Library", "model.", "model/resnet18.yaml"),
    Section("wandb", "Wandb", "logger.wandb.", "logger/wandb.yaml"),
    Section("TensorBoard", "TensorBoard", "logger.tensorboard.", "logger/tensorboard.yaml"),
)


def configuration_page() -> str:
    """The page, a table for each part of the schema."""
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
    """Names, the default one first."""
    entries = yaml.safe_load((CONF_DIR / "train.yaml").read_text())["defaults"]
    chosen = next((x[group] for x in entries if isinstance(x, dict) and group in x), None)
    chosen = chosen if isinstance(chosen, list) else [chosen]
    for name in sorted(options_of(group), key=lambda name: name not in chosen):
        yield f"`{name}`" + (" (default)" if name in chosen else "")


def _keys(name: str, definitions: Mapping[str, Any]) -> dict[str, str]:
    """Key -> what is allowed, of a class of the schema or of the library."""
    if name in LIBRARY:
        told = allowed_of(LIBRARY[name])
        return {key: words.removeprefix("one of ") for key, (words, _) in told.items()}
    properties = definitions[name]["properties"]
    plain = {key: x for key, x in properties.items() if "$ref" not in str(x)}
    return {key: _allowed(x) for key, x in plain.items()}


def _rows(section: Section, keys: Mapping[str, str]) -> Iterator[str]:
    group = section.file.partition("/")[0]  # whose files leave their own name out
    told, inside = _told(CONF_DIR / section.file), section.prefix.removeprefix(f"{group}.")
    for name, allowed in keys.items():
        if inside + name in told:
            value, comment = told[inside + name]
            cells = (f"`{section.prefix}{name}`", value, allowed, comment)
            yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _told(path: Path) -> dict[str, tuple[str, str]]:
    """Dotted key -> value and comment, as they stand in a file of two levels."""
    found: dict[str, tuple[str, str]] = {}
    parent = ""
    for line in path.read_text().splitlines():
        if key := re.match(r"( *)(\w+): *(.*?) *(?:# (.*))?$", line):
            indent, name, value, comment = key.groups(default="")
            parent = parent if indent else f"{name}."
            if value:
                found[parent + name if indent else name] = (value, comment)
    return found


WORDS = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true, false",
    "string": "text",
    "object": "mapping",
    "null": "null",
}
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def _allowed(schema: Mapping[str, Any]) -> str:
    """A type with its range, in words; bounds that nobody meets are left out."""
    if "anyOf" in schema:
        return " or ".join(_allowed(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if schema["type"] == "array":
        return f"list: {_allowed(schema['items'])}"
    limits = [(sign, schema[key]) for key, sign in BOUNDS.items() if schema.get(key, 1e9) < 1e9]
    if [sign for sign, _ in limits] == [">=", "<="]:
        most = f"{limits[1][1]:,}".removesuffix(".0")  # which pydantic's version decides
        return f"{WORDS[schema['type']]}, {limits[0][1]:g} to {most}"
    return " ".join([WORDS[schema["type"]], *(f"{sign} {limit:g}" for sign, limit in limits)])
