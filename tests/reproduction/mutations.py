"""Seeded damage to the files of a run folder, by kind."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from random import Random

FILES = ("config.yaml", "summary.json", "metrics.jsonl")
TRAP = "executed"  # file that an executed YAML tag would create
TEXTS = {
    "empty": "",
    "no text": "\x00\xff\udc80",
    "null": "null",
    "number": "12",
    "text": '"finished"',
    "list": '[{"status": "finished"}]',
    "brackets": "[" * 3000,
    "nested": '{"a":' * 3000 + "1" + "}" * 3000,
    "digits": "1" * 5000,
    "infinite": '{"status": "finished", "top1_last": 1e999}',
    "html": "<!doctype html><html></html>",
    "tag": f"!!python/object/apply:os.mknod [{TRAP}]",
    "bomb": "a: &a [1,1,1,1,1,1,1,1]\n"
    + "".join(
        f"{y}: &{y} [*{x},*{x},*{x},*{x},*{x},*{x},*{x},*{x}]\n"
        for x, y in zip("abcdefghi", "bcdefghij", strict=True)
    ),
    "merge": "a: &a {b: 1}\nseed: 0\nc:\n  <<: *a\n",
    "recursion": "&a [*a]",
    "dates": "seed: 2026-01-01\nmodel: !!set {a, b}\nname: !!binary aGVsbG8=\n",
    "keys": "? [1, 2]\n: 3\nseed: 0\n",
}


def _bytes(change: Callable[[bytearray, Random], None]) -> Callable[[Path, Random], None]:
    def mutate(path: Path, rng: Random) -> None:
        content = bytearray(path.read_bytes())
        change(content, rng)
        path.write_bytes(content)

    return mutate


def _cut(content: bytearray, rng: Random) -> None:
    del content[rng.randrange(len(content)) :]


def _flip(content: bytearray, rng: Random) -> None:
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def _remove_middle(content: bytearray, rng: Random) -> None:
    start = rng.randrange(len(content))
    del content[start : start + rng.randrange(1, 60)]


def _repeat_part(content: bytearray, rng: Random) -> None:
    start = rng.randrange(len(content))
    content[start:start] = content[start : start + rng.randrange(1, 60)]


def _replace_value(path: Path, rng: Random) -> None:
    """Replaces one number or word by another value."""
    text = path.read_text()
    places = list(re.finditer(r"(?<=: )[^,\n{}\[\]]+", text))
    if places:
        place = rng.choice(places)
        value = rng.choice(
            ["null", "NaN", "1e999", "-1", '"x"', "[]", "{}", "true", "9" * 400, "'", "[1, {}]"]
        )
        path.write_text(text[: place.start()] + value + text[place.end() :])


def _repeat_key(path: Path, rng: Random) -> None:
    text = path.read_text()
    if path.suffix == ".yaml":
        path.write_text(text + "seed: 1\n")
    else:
        path.write_text(
            re.sub(r"^\{", '{"status": "failed", "step": 1, "edges": [], "step_wise": 0, ', text)
        )


def _shuffle_lines(path: Path, rng: Random) -> None:
    lines = path.read_text().splitlines(keepends=True)
    rng.shuffle(lines)
    path.write_text("".join(lines))


def _replace(path: Path, rng: Random) -> None:
    name = rng.choice(list(TEXTS))
    path.write_bytes(TEXTS[name].encode(errors="surrogateescape"))


def _remove(path: Path, rng: Random) -> None:
    path.unlink()


def _folder(path: Path, rng: Random) -> None:
    path.unlink()
    path.mkdir()


def _loop(path: Path, rng: Random) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _elsewhere(path: Path, rng: Random) -> None:
    path.unlink()
    path.symlink_to(rng.choice(["/dev/null", "/nonexistent/file", ".."]))


def _swap(path: Path, rng: Random) -> None:
    """Replaces the content by that of another file of the run."""
    others = [path.with_name(x) for x in FILES if path.with_name(x).is_file()]
    path.write_bytes(rng.choice(others).read_bytes())


def _no_permission(path: Path, rng: Random) -> None:
    path.chmod(0)


def _line_of_another_kind(path: Path, rng: Random) -> None:
    with path.open("a") as file:
        file.write(
            rng.choice(
                [
                    "12\n",
                    "[1]\n",
                    '"step"\n',
                    "null\n",
                    '{"step": "x"}\n',
                    '{"step": 1e999, "epoch": 1}\n',
                    "{}\n",
                ]
            )
        )


KINDS: dict[str, Callable[[Path, Random], None]] = {
    "cut": _bytes(_cut),
    "bit flipped": _bytes(_flip),
    "part missing": _bytes(_remove_middle),
    "part repeated": _bytes(_repeat_part),
    "value replaced": _replace_value,
    "key repeated": _repeat_key,
    "lines shuffled": _shuffle_lines,
    "content replaced": _replace,
    "missing": _remove,
    "folder": _folder,
    "link to itself": _loop,
    "link elsewhere": _elsewhere,
    "content of another file": _swap,
    "no permission": _no_permission,
    "line of another kind": _line_of_another_kind,
}


def mutate(folder: Path, seed: int) -> tuple[str, str]:
    """Changes one file of a run folder; returns its name and the kind of change."""
    rng = Random(seed)
    kind = list(KINDS)[seed % len(KINDS)]
    file = rng.choice([name for name in FILES if (folder / name).is_file()])
    KINDS[kind](folder / file, rng)
    return file, kind


def snapshot(folder: Path) -> dict[str, object]:
    """Maps every path under a folder to its content or link target; does not follow links."""
    entries: dict[str, object] = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            if path.is_symlink():
                entries[str(path)] = os.readlink(path)
            else:
                entries[str(path)] = path.read_bytes() if path.is_file() else None
    return entries
