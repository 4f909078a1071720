"""What runs of a module may change beside what they return, kept so that it can be put back.

Found from the module on: attributes, containers, tensors and generators of its parts, of hooks, and
what their functions close over or name. What lies in other objects, extensions or files is not.
"""

import pickle
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

Held = dict[Any, Any]  # what something holds, by name
Left = dict[tuple[int, Any], Any]  # what something holds, by the id of that and by name
BY_PLACE = (list, deque, tuple)
BY_NAME = (dict, OrderedDict, defaultdict, Counter)
TENSORS = (Tensor, nn.Parameter)
GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.PCG64)
CLOSED = TENSORS + GENERATORS  # what these hold is not looked into
NAMED = (list, deque, set, *BY_NAME, *CLOSED)  # what is kept of all that a function names
COMPARED = (Tensor, int, float, str, bytes, set, Counter)
FOREIGN = ("builtins", "torch", "tokenmixup")


def _held_by(x: Any) -> Held | None:
    """Returns what something holds, or None for what is not looked into."""
    kind = type(x)
    if kind in BY_PLACE:
        return dict(enumerate(x))
    if kind in BY_NAME:
        return dict(x)
    if kind is set:
        return dict.fromkeys(x, True)
    if kind in TENSORS:
        return {"data": x.data, "values": x.detach().clone()}
    if kind in GENERATORS:
        return {"state": _state_of(x)}
    return _used_by(x)


def _used_by(x: Any) -> Held | None:
    """Returns what code uses, or None for what is no code."""
    kind = type(x)
    used: Held | None = None
    if kind is FunctionType:
        names = {name: x.__globals__.get(name) for name in _names_in(x.__code__)}
        used = {name: value for name, value in names.items() if type(value) in NAMED}
        used["closure"] = x.__closure__
        used["defaults"] = x.__defaults__
        used["named defaults"] = x.__kwdefaults__
    elif kind is CellType:
        with suppress(ValueError):  # it is empty yet
            used = {"contents": x.cell_contents}
    elif kind is partial:
        used = {"function": x.func, "args": x.args, "named": x.keywords}
    elif kind is MethodType:
        used = {"function": x.__func__, "attributes": getattr(x.__self__, "__dict__", None)}
    elif kind is np.random.Generator:
        used = {"bits": x.bit_generator}
    elif isinstance(x, nn.Module):
        used = {"classes": kind.__mro__, "self": vars(x)}
    elif isinstance(x, type) and not _is_foreign(x):
        used = dict(vars(x))
    return used


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return pickle.dumps(generator.__reduce__()[2])


def _is_foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in FOREIGN


def _names_in(code: CodeType) -> Iterator[str]:
    """Yields the names that code uses, also within inner functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _put_back(x: Any, held: Held) -> None:
    kind = type(x)
    if kind in (list, deque):
        x.clear()
        x.extend(held.values())
    elif kind in (set, *BY_NAME):
        x.clear()
        x.update(held)
    elif kind in TENSORS:
        x.data = held["data"]
        x.data.copy_(held["values"])  # unseen by autograd
    elif kind is torch.Generator:
        x.set_state(held["state"])
    elif kind in GENERATORS:
        x.__setstate__(pickle.loads(held["state"]))  # noqa: S301 of this process
    elif kind is CellType:
        x.cell_contents = held["contents"]
    elif isinstance(x, type):
        for name in vars(x).keys() - held.keys():
            delattr(x, name)
        for name, value in held.items():
            if vars(x).get(name) is not value:
                setattr(x, name, value)


class Found(NamedTuple):
    x: Any
    name: Any  # by which it is held
    held: Held  # what it held as it was found


class Kept:
    """What is found from some things on, as it was."""

    def __init__(self, *roots: Any):
        self.found: dict[int, Found] = {}  # by id
        due: list[tuple[Any, Any]] = list(enumerate(roots))
        while due:
            name, x = due.pop()
            held = None if id(x) in self.found else _held_by(x)
            if held is not None:
                self.found[id(x)] = Found(x, name, held)
                if type(x) not in CLOSED:
                    due += held.items()

    def changed(self) -> Left:
        """Returns what is held in the place of something else now."""
        changed: Left = {}
        for key, (x, _, held) in self.found.items():
            now = _held_by(x) or {}
            is_same = _is_equal if type(x) in CLOSED else _is_same
            for name in held.keys() | now.keys():
                if not is_same(held.get(name), now.get(name)):
                    changed[key, name] = now.get(name)
        return changed

    def put_back(self) -> None:
        for key in {key for key, _ in self.changed()}:
            _put_back(self.found[key].x, self.found[key].held)


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) in (int, float, str) and bool(one == other))


def end_alike(one: Any, other: Any) -> bool:
    """Whether two runs have left the same numbers, texts and tensors at the same places."""
    ours, theirs = tree_flatten(one), tree_flatten(other)
    if ours[1] != theirs[1]:
        return False
    return all(map(_is_alike, ours[0], theirs[0]))


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, COMPARED):
        return type(one) is type(other) and _is_equal(one, other)
    return type(one) is type(other)


def _is_equal(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    if not one.is_floating_point():
        return False
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


@contextmanager
def unchanged(*roots: Any) -> Iterator[None]:
    """Puts back whatever is found from some things on."""
    kept = Kept(*roots)
    try:
        yield
    finally:
        kept.put_back()


def generators_of(device: torch.device) -> list[Any]:
    """Returns the generators that layers draw from by default: torch's, Python's and NumPy's."""
    generators: list[Any] = [torch.default_generator, random.seed.__self__]  # type: ignore[attr-defined]
    generators.append(np.random.mtrand._rand)
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    return generators
