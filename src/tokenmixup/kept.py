"""What runs of a module may change beside what they return, kept so that it can be put back.

Found from the module on: attributes, containers, tensors and generators of its parts, of hooks, and
what their functions close over or name. What lies in other objects, extensions or files is not.
"""

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Held = dict[Any, Any]  # what something holds, by name
Left = dict[tuple[int, Any], Any]  # what something holds, by the id of that and by name
BY_PLACE = (list, deque, tuple)
BY_NAME = (dict, OrderedDict, defaultdict, Counter)
TENSORS = (Tensor, nn.Parameter)
GENERATORS = (torch.Generator, random.Random, np.random.RandomState)
CLOSED = TENSORS + GENERATORS  # what these hold is not looked into
NAMED = (list, deque, set, *BY_NAME, *CLOSED)  # what is kept of all that a function names
FOREIGN = ("builtins", "torch", "tokenmixup")


def _held_by(x: Any) -> Held | None:
    """Returns what something holds, or None for what is not looked into."""
    kind = type(x)
    held: Held | None = None
    if kind in BY_PLACE:
        held = dict(enumerate(x))
    elif kind in BY_NAME:
        held = dict(x)
    elif kind is set:
        held = dict.fromkeys(x, True)
    elif kind in TENSORS:
        held = {"data": x.data, "values": x.detach().clone()}
        held["grad"] = x.grad if x.is_leaf else None
    elif kind in GENERATORS:
        held = {"state": _state_of(x)}
    elif kind is FunctionType:
        names = {name: x.__globals__.get(name) for name in _names_in(x.__code__)}
        held = {name: value for name, value in names.items() if type(value) in NAMED}
        held["cells and defaults"] = (x.__closure__, x.__defaults__, x.__kwdefaults__)
    elif kind is CellType and x != CellType():  # else it is empty yet
        held = {"contents": x.cell_contents}
    elif kind is partial:
        held = {"function": x.func, "args": x.args, "named": x.keywords}
    elif kind is MethodType:
        held = {"function": x.__func__, "attributes": getattr(x.__self__, "__dict__", None)}
    elif isinstance(x, nn.Module):
        held = {each.__name__: each for each in kind.__mro__}
        held["self"] = vars(x)
    elif isinstance(x, type) and not _is_foreign(x):
        held = dict(vars(x))
    return held


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    state = generator.get_state()
    if isinstance(state, Tensor):
        return state
    name, numbers, *rest = state
    return name, tuple(numbers), *rest  # an array could not be compared


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
        if x.is_leaf:
            x.grad = held["grad"]
    elif kind is random.Random:
        x.setstate(held["state"])
    elif kind in GENERATORS:
        x.set_state(held["state"])
    elif kind is CellType:
        x.cell_contents = held["contents"]
    elif isinstance(x, type):
        for name in vars(x).keys() - held.keys():
            delattr(x, name)
        for name, value in held.items():
            if vars(x)[name] is not value:
                setattr(x, name, value)


class Kept:
    """What is found from some things on, as it was."""

    def __init__(self, *roots: Any):
        self.held: dict[int, tuple[Any, Held]] = {}  # by the id of what holds it
        self.names: dict[int, Any] = {}  # by the same: by which it is held
        found: list[tuple[Any, Any]] = list(enumerate(roots))
        while found:
            name, x = found.pop()
            if id(x) in self.held:
                continue
            held = _held_by(x)
            if held is not None:
                self.held[id(x)] = (x, held)
                self.names[id(x)] = name
                if type(x) not in CLOSED:
                    found += held.items()

    def changed(self) -> Left:
        """Returns what is held in the place of something else now."""
        changed: Left = {}
        for key, (x, held) in self.held.items():
            now = _held_by(x) or {}
            is_same = _is_equal if type(x) in CLOSED else _is_same
            for name in held.keys() | now.keys():
                if not is_same(held.get(name), now.get(name)):
                    changed[key, name] = now.get(name)
        return changed

    def put_back(self) -> None:
        for key in {key for key, _ in self.changed()}:
            _put_back(*self.held[key])


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) in (int, float, str) and bool(one == other))


def ends_alike(one: Any, other: Any) -> bool:
    """Whether two runs have left the same, as far as that is looked into."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor | int | float | str | bytes):
        return _is_equal(one, other)
    if type(one) not in (*BY_PLACE, *BY_NAME, set):
        return True
    ours, theirs = _held_by(one) or {}, _held_by(other) or {}
    are_alike = [ends_alike(value, theirs.get(name)) for name, value in ours.items()]
    return ours.keys() == theirs.keys() and all(are_alike)


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


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
