"""Damaged and malicious weight files: each is refused in one line or read with equal content."""

import argparse
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from reproduction.models.weights import matching_state, module_state, read_weights
from reproduction.runs.folder import RunFolder
from reproduction.system.errors import UserError
from reproduction.training.checkpoint import load_last, load_plain, save_last, save_plain
from tests.chaos.malice import malicious_files
from tests.chaos.runs import Outcome

OWN, FOREIGN = 500, 200
RUN = "0123abcd"
CLASSES = ["cat", "dog"]

Bytes = Callable[[bytes, random.Random], bytes]


class Original(NamedTuple):
    """An intact file, the path it is read from, and its reader."""

    name: str
    data: bytes
    place: Path
    read: Callable[[], Any]  # returns comparable content


def harm_files(root: Path, seed: int) -> Outcome:
    """Reads damaged copies of our own files, and damaged and malicious foreign files."""
    failures: list[str] = []
    counts: dict[str, object] = {}
    try:
        own = harm_own(own_files(root / "run"), other_files(root / "others"), OWN, seed)
        counts |= _summed("own", own)
        foreign = harm_foreign(foreign_files(root / "foreign"), root, FOREIGN, seed)
        counts |= _summed("foreign", foreign)
    except AssertionError as error:
        failures.append(str(error))
    return Outcome("damaged files", counts, failures)


def _summed(origin: str, counts: Counter[str]) -> dict[str, object]:
    """Sums the counts of each result over all kinds of harm."""
    sums: Counter[str] = Counter()
    for case, count in counts.items():
        sums[f"{origin} {case.rpartition(': ')[2]}"] += count
    return dict(sums)


def harm_own(originals: list[Original], others: list[bytes], count: int, seed: int) -> Counter[str]:
    """Reads `count` damaged copies of our own files and counts the results of each kind of harm.

    `others` are intact files put in their place. Raises AssertionError if a damaged file is read
    with other content.
    """
    results: Counter[str] = Counter()
    contents = [original.read() for original in originals]
    harms = (*HARMS, lambda data, rng: rng.choice(others))
    names = (*(harm.__name__ for harm in HARMS), "another file")
    for number in range(count):
        which, turn = number % len(originals), number // len(originals) % len(harms)
        original = originals[which]
        harmed = harms[turn](original.data, random.Random(f"{seed}-{number}"))
        outcome, content = _outcome(original, harmed)
        case = f"{original.name}, {names[turn]}"
        if outcome == "read":
            assert content == contents[which], f"{case}, seed {seed}-{number}: read as another"
        results[f"{case}: {'equal' if outcome == 'read' else outcome}"] += 1
    return results


def harm_foreign(originals: list[Original], folder: Path, count: int, seed: int) -> Counter[str]:
    """Reads every malicious file, then damaged copies of foreign files, `count` in all.

    Raises AssertionError if one executes code, which would leave a file in `folder`.
    """
    results: Counter[str] = Counter()
    executed = folder / "executed"
    for case, original, data in islice(_foreign(originals, executed, seed), count):
        outcome, _ = _outcome(original, data)
        assert not executed.exists(), f"{case}: was executed"
        results[f"{case}: {outcome}"] += 1
    return results


def _outcome(original: Original, data: bytes) -> tuple[str, Any]:
    """Returns (`read` or `refused`, content); raises any error but a one-line UserError."""
    original.place.write_bytes(data)
    try:
        return "read", original.read()
    except UserError as error:
        assert len(str(error).splitlines()) == 1, str(error)
        return "refused", None


def _foreign(
    originals: list[Original], executed: Path, seed: int
) -> Iterator[tuple[str, Original, bytes]]:
    """Yields (case, original, data) without end, malicious files first."""
    for case, data in malicious_files(executed):
        yield case, originals[0], data
    number = 0
    while True:
        for original in originals:
            harm = HARMS[number % (len(HARMS) - 1)]
            rng = random.Random(f"{seed}-{original.name}-{number}")
            yield f"{original.name}, {harm.__name__}", original, harm(original.data, rng)
        number += 1


def own_files(folder: Path) -> list[Original]:
    """Writes a checkpoint of a run and its best weights."""
    run = RunFolder(folder)
    run.last_path.parent.mkdir(parents=True)
    save_last(run.last_path, _state(_model()))
    save_plain(run.best_path, _model().state_dict(), CLASSES)
    model = _model()

    def read_last() -> Any:
        newest = load_last(run, RUN)
        assert newest is not None
        path, state = newest
        module_state(f"checkpoint={path}", state, model)
        return _comparable(state)

    def read_best() -> Any:
        load_plain([run.best_path], model, CLASSES)
        return _comparable(model.state_dict())

    return [
        _original("last.pt", run.last_path, read_last),
        _original("best.safetensors", run.best_path, read_best),
    ]


def other_files(folder: Path) -> list[bytes]:
    """Returns intact files that do not belong in our places: other models and other formats."""
    folder.mkdir()
    save_last(folder / "state", _state(nn.Linear(4, 2)))
    save_plain(folder / "model", nn.Linear(4, 2).state_dict(), CLASSES)
    save_plain(folder / "classes", _model().state_dict(), ["elk", "dog"])
    np.savez(folder / "arrays.npz", a=np.ones(3))
    (folder / "text").write_text("no weights")
    return [path.read_bytes() for path in sorted(folder.iterdir())]


def foreign_files(folder: Path) -> list[Original]:
    """Writes weight files in the formats of other programs."""
    folder.mkdir()
    state = _model().state_dict()
    script = {"state_dict": state, "epoch": 3, "args": argparse.Namespace(lr=0.1)}
    for name, content in (("state", state), ("script", script)):
        torch.save(content, folder / f"{name}, zip")
        torch.save(content, folder / f"{name}, legacy", _use_new_zipfile_serialization=False)
    save_file(state, folder / "safetensors")
    with (folder / "arrays").open("wb") as file:
        np.savez(file, **{name: value.numpy() for name, value in state.items()})
    model = _model()

    def read(path: Path) -> Callable[[], Any]:
        return lambda: _comparable(matching_state(read_weights("checkpoint", path), model))

    return [_original(path.name, path, read(path)) for path in sorted(folder.iterdir())]


def _original(name: str, place: Path, read: Callable[[], Any]) -> Original:
    return Original(name, place.read_bytes(), place, read)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def _state(model: nn.Module) -> dict[str, Any]:
    """Returns a training state after one step."""
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {
        "module": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        **{"scaler": {}, "best": None, "classes": CLASSES, "num_images": 1, "run": RUN},
        "non_finite": {"skipped": 0, "in_a_row": 0},
        **{"step": 1, "epoch": 0, "totals": {}, "history": [], "metrics_size": 0},
    }


def _comparable(content: Any) -> Any:
    """Returns the content with tensors as text, in which NaN equals itself."""
    if isinstance(content, Tensor):
        return str(content.dtype), str(content.tolist())
    if isinstance(content, dict):
        return {key: _comparable(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_comparable(value) for value in content]
    return content


def truncated(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def bit_flipped(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


def inserted(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + rng.randbytes(rng.randint(1, 64)) + data[place:]


def left_out(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + data[place + rng.randint(1, 64) :]


def zeroed(data: bytes, rng: random.Random) -> bytes:
    place, length = rng.randrange(len(data)), rng.randint(1, 4096)
    return data[:place] + bytes(len(data[place : place + length])) + data[place + length :]


def swapped(data: bytes, rng: random.Random) -> bytes:
    """Swaps two blocks that do not overlap."""
    size = rng.randint(1, max(1, len(data) // 4))
    first = rng.randrange(len(data) - 2 * size + 1)
    second = rng.randrange(first + size, len(data) - size + 1)
    blocks = data[second : second + size], data[first : first + size]
    between, after = data[first + size : second], data[second + size :]
    return data[:first] + blocks[0] + between + blocks[1] + after


def appended(data: bytes, rng: random.Random) -> bytes:
    return data + rng.randbytes(rng.randint(1, 4096))


def twice(data: bytes, rng: random.Random) -> bytes:
    return data + data


def long_header(data: bytes, rng: random.Random) -> bytes:
    """Claims a long header in the first eight bytes, as safetensors do."""
    return (1 << rng.randrange(20, 64)).to_bytes(8, "little") + data[8:]


def random_bytes(data: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(rng.randint(0, len(data)))


def empty(data: bytes, rng: random.Random) -> bytes:
    return b""


HARMS: tuple[Bytes, ...] = (
    *(truncated, bit_flipped, inserted, left_out, zeroed, swapped, appended, long_header),
    *(random_bytes, twice, empty),
)
