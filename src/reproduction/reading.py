"""YAML files, whoever asks for them: read by one reader, which says where one of them is wrong.

Hydra reads conf/ and what `--config-dir` adds by `FileConfigSource`, studies are read as they are.
"""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import yaml
from hydra._internal.core_plugins import file_config_source
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from reproduction.config import Config
from reproduction.errors import UserError, first_line
from reproduction.files import naming

FORMS = {  # of what is no text
    "null": "~|null|Null|NULL|",
    "bool": "true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9]\d*)",
    "float": r"[-+]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][-+]?\d+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
GLOBAL = "# @package _global_"


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
    """Returns the content of a file; UserError names the file, the line and what is wrong there."""
    return content_of(path, read_text(path))


def read_text(path: Path) -> str:
    """Returns the text of a file of UTF-8, which may begin with a byte order mark."""
    with naming(path):
        content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: is no UTF-8 text, save it as UTF-8") from error


def content_of(path: Path, text: str) -> Any:
    """Returns the content of the text of a file."""
    try:
        return yaml.load(text, PlainYaml)  # noqa: S506 - a SafeLoader
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"{path}, line {line}: a character that no text has") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 0 if mark is None else mark.line
        around = "".join(text.splitlines()[line : line + 1]).strip() or "the end"
        problem = str(error.problem)
        if "'\\t'" in problem:
            problem = "a tab stands before it, indent by spaces"
        raise UserError(f"{path}, line {line + 1}, `{around}`: {problem}") from error


@lru_cache(maxsize=1024)
def content_read_once(path: Path, text: str) -> Any:
    """Returns the content of the text of a file, which is not to be changed."""
    return content_of(path, text)


class FileConfigSource(file_config_source.FileConfigSource):
    """Hydra's files, read by our reader. Hydra keeps the first class of this name."""

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        text = read_text(path)
        content = content_read_once(path, text)  # by each run of a sweep
        if content is None:
            content = {}
        if not isinstance(content, dict):
            raise UserError(f"{path}: must hold keys with their values")
        try:
            header = self._get_header_dict(text)
            config = OmegaConf.create(content)
        except (ValueError, OmegaConfBaseException) as error:
            reason = first_line(error).partition(": ")[2]
            raise UserError(f"{path}: {reason}") from error
        group, slash, _ = config_path.partition("/")
        if slash and header["package"] is None and group not in {"hydra", *Config.__annotations__}:
            raise UserError(f"{path}: must begin with the line `{GLOBAL}`, no other above it")
        place = f"{self.scheme()}://{self.path}"
        return ConfigResult(provider=self.provider, path=place, config=config, header=header)
