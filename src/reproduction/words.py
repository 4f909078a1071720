"""Words mean what was typed: those of a command line by Hydra's grammar, those of files by YAML.

Every program and every study passes its words through `readable` before Hydra parses them.
"""

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    ChoiceSweep,
    Override,
    OverrideType,
    Quote,
    QuotedString,
)
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from reproduction.help import allowed, options_of
from reproduction.system import OneLineError, UserError

# --- command lines ------------------------------------------------------------------------------

NESTED = re.compile(r"(\[|\w+\()(.*)([\])])", re.DOTALL)  # a list, or the arguments of a function
PAIRS = (("[", "]"), ("{", "}"), ("(", ")"))


@lru_cache(maxsize=4096)
def readable(word: str) -> str:
    """Returns a word as Hydra reads it, with the same meaning; UserError if it is no `key=value`.

    An element with a tilde, an apostrophe or a letter outside of ASCII gets quotes, which Hydra's
    grammar needs. So does a number if the key takes a text: name=2026_11 is not 202611.
    """
    key, equals, value = word.partition("=")
    key = key.strip()
    takes_text = allowed().get(key.lstrip("+"), "").startswith("string")
    quoted = f"{key}={_quoted(value, takes_text)}" if equals else key
    if parsed(quoted) is None:
        raise UserError(f"{word}: must be key=value, with a key of train.py --help")
    return quoted


def in_quotes(text: str) -> str:
    return QuotedString(text, Quote.single).with_quotes()


@lru_cache(maxsize=4096)
def parsed(word: str) -> Override | None:
    """Returns what Hydra reads in a word, None if it cannot read it."""
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException:
        return None
    return override if override.key_or_group else None


def _quoted(text: str, takes_text: bool) -> str:
    """Returns a value with quotes around each element that needs them."""
    text = text.strip()
    if _is_read(text, takes_text):
        return text
    elements = [*_elements(text)]
    if len(elements) > 1:
        return ",".join(_quoted(element, takes_text) for element in elements)
    if nested := NESTED.fullmatch(text):
        start, inner, end = nested.groups()
        whole = f"{start}{_quoted(inner, takes_text)}{end}"
        if _is_read(whole, takes_text):
            return whole
    return in_quotes(text)


def _is_read(text: str, takes_text: bool) -> bool:
    override = parsed(f"key={text}")
    if override is None:
        return False
    value = override.value()
    values = value.list if isinstance(value, ChoiceSweep) else [value]
    return not (takes_text and any(isinstance(x, int | float) for x in values))


def _elements(text: str) -> Iterator[str]:
    """Yields the parts between the commas that stand outside of brackets and quotes."""
    begun: list[str] = []
    for part in text.split(","):
        begun.append(part)
        element = ",".join(begun).strip()
        is_open = element[:1] in ("'", '"') and element[-1:] != element[0]
        if not is_open and all(element.count(a) == element.count(b) for a, b in PAIRS):
            yield element
            begun.clear()
    if begun:
        yield ",".join(begun)


def text_of(word: str) -> str:
    """Returns the value of a word as a text: without quotes, but a number as it was typed."""
    override = parsed(readable(word))
    value = None if override is None else override.value()
    return value if isinstance(value, str) else word.partition("=")[2].strip()


def merged(tree: Any, words: Sequence[str]) -> Any:
    """Returns plain nested values with those of words in their place; UserError for a sweep."""
    result = OmegaConf.create(tree)
    for word in words:
        override = parsed(readable(word))
        if override is None or override.is_sweep_override() or override.is_delete():
            raise UserError(f"{word}: must be key=value, with a single value")
        OmegaConf.update(result, override.key_or_group, override.value(), force_add=True)
    return OmegaConf.to_container(result, resolve=True, throw_on_missing=True)


def key_of(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def is_number(word: str) -> bool:
    """Whether a word sets a key that exists to an integer."""
    override = parsed(word)
    if override is None or override.type != OverrideType.CHANGE:
        return False
    return type(override.value()) is int


# --- errors -------------------------------------------------------------------------------------


@contextmanager
def hydra_errors(*words: str) -> Iterator[None]:
    """Turns what Hydra and OmegaConf say into one line that names a word, and what is allowed."""
    try:
        yield
    except OneLineError:
        raise
    except Exception as error:
        if not _is_hydras(error):
            raise
        raise UserError(_line_of(error, words)) from error


def _is_hydras(error: Exception) -> bool:
    """Whether an error is about the configuration: of Hydra's type, or raised by its code."""
    if isinstance(error, HydraException | OmegaConfBaseException):
        return True
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("hydra", "omegaconf")


def _line_of(error: Exception, words: Sequence[str]) -> str:
    cause = error.__cause__ or error
    line = re.split(r"\n(?=\s|See )", str(cause))[0]  # without advice that is not for us
    typed = {key_of(word): word for word in words}
    needed = [word for word in words if word.startswith("~") and f"'{word[1:]}." in line]
    key = getattr(cause, "full_key", None)
    plugin = re.search(r"'(hydra/(?:launcher|sweeper))/(\w+)'", line)
    if plugin is not None:
        return f"{plugin[1]}={plugin[2]}: is not installed; docs/studies.md names its package"
    if needed:
        line = f"{needed[0]}: is needed: {line}"
    elif key:  # which may be a part of what was typed
        key = next((x for x in typed if x.startswith(key)), key)
        if isinstance(cause, AttributeError | KeyError):
            line = "the chosen options have no such key"
            whole = [x for x in allowed() if x.endswith(f".{key}")]  # typed without its group
            if whole:
                line += f", perhaps {whole[0]}"
            elif key in allowed() or any(x.startswith(f"{key}.") for x in allowed()):
                line += f", which another option of {key.partition('.')[0]} has"
            else:
                line += "; --help lists them all"
        line = f"{typed.get(key, key)}: {line}"
    elif words and not any(x in line for x in typed):
        line = f"{' '.join(words)}: {line}"
    if found := re.search(r"'(\w+)/", line):  # 'group/option'
        line += f" allowed: {', '.join(options_of(found[1]))}"
    return line


# --- files --------------------------------------------------------------------------------------


class PlainYaml(yaml.SafeLoader):
    """YAML 1.2's core: 010 is no number, yes and no are texts; and each key stands once."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # instead of those of YAML 1.1

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        for key, (place, _) in zip(keys, node.value, strict=True):
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key} stands here {keys.count(key)} times",
                    problem_mark=place.start_mark,
                )
        return super().construct_mapping(node, deep)


INTEGER, POWER, INF, NAN = r"(0|[1-9]\d*)", r"([eE][-+]?\d+)?", "(inf|Inf|INF)", "(nan|NaN|NAN)"
FLOAT = rf"[-+]?({INTEGER}(\.\d*)?|\.\d+){POWER}|[-+]?\.{INF}|\.{NAN}"
for kind, form, first in (  # with the characters that a value of this kind may begin with
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", rf"[-+]?{INTEGER}", [*"-+0123456789"]),
    ("float", FLOAT, [*"-+.0123456789"]),
):
    PlainYaml.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(f"^({form})$"), first)


def read_yaml(path: Path) -> Any:
    with path.open() as file:
        return yaml.load(file, PlainYaml)  # noqa: S506 - a SafeLoader
