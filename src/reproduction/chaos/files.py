"""Damaged and malicious files of weights: all are refused in one line or read as what they were."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from reproduction.chaos.malice import malicious_files
from reproduction.chaos.originals import Original
from reproduction.errors import UserError

Bytes = Callable[[bytes, random.Random], bytes]


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
    """Two blocks that do not overlap change places."""
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
    """As safetensors tell it, in their first eight bytes."""
    return (1 << rng.randrange(20, 64)).to_bytes(8, "little") + data[8:]


def random_bytes(data: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(rng.randint(0, len(data)))


def empty(data: bytes, rng: random.Random) -> bytes:
    return b""


HARMS: tuple[Bytes, ...] = (
    *(truncated, bit_flipped, inserted, left_out, zeroed, swapped, appended, long_header),
    *(random_bytes, twice, empty),
)


def harm_own(originals: list[Original], others: list[bytes], count: int, seed: int) -> Counter[str]:
    """Reads `count` damaged copies of our own files; counts what came of each kind of harm.

    `others` are whole files in their places. AssertionError if one is read as something else.
    """
    found: Counter[str] = Counter()
    contents = [original.read() for original in originals]
    harms = (*HARMS, lambda data, rng: rng.choice(others))
    names = (*(harm.__name__ for harm in HARMS), "another file")
    for number in range(count):
        which, turn = number % len(originals), number // len(originals) % len(harms)
        original = originals[which]
        harmed = harms[turn](original.data, random.Random(f"{seed}-{number}"))
        outcome, content = _outcome(original, harmed)
        told = f"{original.name}, {names[turn]}"
        if outcome == "read":
            assert content == contents[which], f"{told}, seed {seed}-{number}: read as another"
        found[f"{told}: {'equal' if outcome == 'read' else outcome}"] += 1
    return found


def harm_foreign(originals: list[Original], folder: Path, count: int, seed: int) -> Counter[str]:
    """Reads every malicious file, then damaged copies of others' files, `count` in all.

    AssertionError if one executes anything, which would leave a file in `folder`.
    """
    found: Counter[str] = Counter()
    executed = folder / "executed"
    for number, (told, original, data) in enumerate(_foreign(originals, executed, seed)):
        if number == count:
            break
        outcome, _ = _outcome(original, data)
        assert not executed.exists(), f"{told}: was executed"
        found[f"{told}: {outcome}"] += 1
    return found


def _outcome(original: Original, data: bytes) -> tuple[str, Any]:
    """(`read` or `refused`, what was read); any error but a UserError of one line is raised."""
    original.place.write_bytes(data)
    try:
        return "read", original.read()
    except UserError as error:
        assert len(str(error).splitlines()) == 1, str(error)
        return "refused", None


def _foreign(
    originals: list[Original], executed: Path, seed: int
) -> Iterator[tuple[str, Original, bytes]]:
    for told, data in malicious_files(executed):
        yield told, originals[0], data
    number = 0
    while True:
        for original in originals:
            harm = HARMS[number % (len(HARMS) - 1)]
            rng = random.Random(f"{seed}-{original.name}-{number}")
            yield f"{original.name}, {harm.__name__}", original, harm(original.data, rng)
        number += 1
