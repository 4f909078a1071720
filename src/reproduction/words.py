"""A word is one override as typed, such as key=value. It means what was typed.

Words of a command line are read by Hydra's grammar, the values of files by YAML.

Every program and every study passes its words through `readable` before Hydra parses them.
"""

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from reproduction.help import GROUPS, TEXT, allowed, options_of
from reproduction.system import OneLineError, UserError

# --- command lines ------------------------------------------------------------------------------

NESTED = re.compile(r"(\[|\w+\()(.*)([\])])", re.DOTALL)  # a list, or the arguments of a function
PAIRS = (("[", "]"), ("{", "}"), ("(", ")"))


@lru_cache(maxsize=4096)
def readable(word: str) -> str:
    """Returns a word as Hydra reads it, with the same meaning.

    UserError if it is neither `key=value` nor a deletion, `~key`.

    An element with a tilde, an apostrophe or a letter outside of ASCII gets quotes, which Hydra's
    grammar needs. So does a number if the key takes a text: name=2026_11 is not 202611.
    """
    key, equals, value = word.partition("=")
    key = key.strip()
    takes_text = allowed().get(key.lstrip("+"), "").startswith(TEXT)
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
    nested = NESTED.fullmatch(text)
    if nested is not None:
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
        is_in_quotes = element[:1] in ("'", '"') and element[-1:] != element[0]
        has_pairs = all(element.count(start) == element.count(end) for start, end in PAIRS)
        if has_pairs and not is_in_quotes:
            yield element
            begun.clear()
    if begun:
        yield ",".join(begun)


def text_of(word: str) -> str:
    """Returns the value of a word as a text: without quotes, but a number as it was typed."""
    override = parsed(readable(word))
    value = None if override is None else override.value()
    return value if isinstance(value, str) else word.partition("=")[2].strip()


def with_words(tree: Any, words: Sequence[str]) -> Any:
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


def last_part(key: str) -> str:
    """Returns what names a setting where its group is known: of recipe.lr it is lr."""
    return key.rpartition(".")[2]


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
        raise UserError(_told(error, words)) from error


def _is_hydras(error: Exception) -> bool:
    """Whether an error is about the configuration: of Hydra's type, or raised by its code."""
    if isinstance(error, HydraException | OmegaConfBaseException):
        return True
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("hydra", "omegaconf")


def _told(error: Exception, words: Sequence[str]) -> str:
    """Says what was typed wrong, by Hydra's or OmegaConf's message and the key that it names."""
    cause = error.__cause__ or error
    message = re.split(r"\n(?=\s|See )", str(cause))[0]  # without advice that is not for us
    plugin = re.search(r"'(hydra/(?:launcher|sweeper))/(\w+)'", message)
    if plugin is not None:
        return f"{plugin[1]}={plugin[2]}: is not installed; docs/studies.md names its package"
    missing = re.search(r"'(\w+)/([^']*)'", message)  # 'GROUP/OPTION'
    if missing is not None:
        options = options_of(missing[1])
        near = _nearest(missing[2], options)
        message = f"{message.rstrip('.')}{near}; allowed: {', '.join(options)}"
    typed = {key_of(word): word for word in words}
    named = getattr(cause, "full_key", None)
    if named:
        key = next((key for key in typed if key.startswith(named)), named)
        if isinstance(cause, AttributeError | KeyError):
            message = _no_such(key)
        return f"{typed.get(key, key)}: {message}"
    if words and not any(key in message for key in typed):
        return f"{' '.join(words)}: {message}"
    return message


def _no_such(key: str) -> str:
    """Says of a key that the chosen options do not have which one may be meant."""
    known = allowed()
    line = "the chosen options have no such key"
    without_group = [name for name in known if name.endswith(f".{key}")]
    if without_group:
        return f"{line}, perhaps {without_group[0]}"
    if any(f"{name}.".startswith(f"{key}.") for name in known):
        return f"{line}, which another option of {key.partition('.')[0]} has"
    return f"{line}{_nearest(key, [*known, *GROUPS])}; --help lists them all"


def _nearest(name: str, names: Sequence[str]) -> str:
    near = get_close_matches(name, names, n=1)
    if not near:
        return ""
    return f", perhaps {near[0]}"


# --- files --------------------------------------------------------------------------------------


FORMS = {  # of what is no text
    "null": "~|null|Null|NULL|",
    "bool": "true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9]\d*)",
    "float": r"[-+]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][-+]?\d+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}


class PlainYaml(yaml.SafeLoader):
    """YAML 1.2's core: 010 is no number, yes and no are texts; and each key stands once."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {  # instead of those of YAML 1.1
        None: [(f"tag:yaml.org,2002:{x}", re.compile(f"({FORMS[x]})$")) for x in FORMS]
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if key in keys:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key} stands here twice", problem_mark=key_node.start_mark
                )
            keys.append(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    with path.open() as file:
        return yaml.load(file, PlainYaml)  # noqa: S506 - a SafeLoader
