"""Settings of HTM, VTM and manifold mixup: each option once, with its range and its default.

Torch is not needed to read them. A bad value raises ValueError: key, value and what is allowed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache, partial
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_type_hints

LARGEST = 1e38  # of a finite number, so that it fits into float32

Pooling = Literal["auto", "attention", "average", "class_token"]
Detector = Literal["attention", "gradient", "random"]
Matching = Literal["optimal", "random"]
MaskRule = Literal["paper", "published"]
Labels = Literal["saliency", "count"]
Order = Literal["in_place", "published"]
NonFinite = Literal["fail", "skip"]
ClassTokenOffset = Literal["paper", "published"]


def _option(allowed: str, holds: Callable[[Any], bool], default: Any = MISSING) -> Any:
    """An option whose type alone does not tell what is allowed."""
    return field(default=default, metadata={"allowed": allowed, "holds": holds})


def _per_layer(
    allowed: str, holds: Callable[[Any], bool], number: type, default: Any = MISSING
) -> Any:
    """An option that may have a value for each of several layers; a list of one is its value."""

    def all_hold(x: Any) -> bool:
        return all(map(holds, x)) and len(x) > 0 if _is_list(x) else holds(x)

    told = {"allowed": allowed, "holds": all_hold, "number": number}
    return field(default=default, metadata=told)


def _is_list(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str)


def _is_whole(x: Any) -> bool:
    return type(x) is int


def _is_number(x: Any) -> bool:
    return type(x) in (int, float) and (abs(x) <= LARGEST or abs(x) == math.inf)


def _is_blocks(x: Any) -> bool:
    listed = _is_list(x) and len(x) > 0
    return listed and all(_is_whole(y) and y >= 0 for y in x) and len(set(x)) == len(x)


_types_of = cache(get_type_hints)


class _Settings:
    """Checks each option on its own; whole numbers become floats where these are asked for."""

    key: ClassVar[str]

    def __post_init__(self) -> None:
        kind: Any = type(self)
        types = _types_of(kind)
        for name, (allowed, holds) in allowed_of(kind).items():
            value = getattr(self, name)
            if not holds(value):
                raise ValueError(f"{self.key}.{name}={value!r}: must be {allowed}")
            number = kind.__dataclass_fields__[name].metadata.get("number")
            if _is_list(value):  # a copy: a caller may change its list
                value = [*map(number, value)] if number else [*value]
                value = value[0] if number and len(value) == 1 else value
            elif number or types[name] is float:
                value = (number or float)(value)
            object.__setattr__(self, name, value)


class _Layered(_Settings):
    """Settings of what happens at one layer, or at several, in rising order."""

    layer: int | Sequence[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers != sorted({*self.layers}):
            raise ValueError(f"{self.key}.layer={self.layer}: must be in rising order")
        for name in self._numbers():
            value = getattr(self, name)
            if _is_list(value) and len(value) != len(self.layers):
                raise ValueError(
                    f"{self.key}.{name}={value}: must be one number, or {len(self.layers)} for "
                    f"{self.key}.layer={self.layer}"
                )

    def _numbers(self) -> list[str]:
        kind: Any = type(self)
        return [option.name for option in fields(kind) if "number" in option.metadata]

    @property
    def layers(self) -> list[int]:
        """The blocks' indices, in order."""
        return [*self.layer] if isinstance(self.layer, Sequence) else [self.layer]

    @property
    def each(self) -> dict[int, Any]:
        """Layer -> its own settings: the same, but every option has one value."""
        settings: Any = self
        names = self._numbers()
        return {
            layer: replace(settings, **{name: _at(getattr(self, name), i) for name in names})
            for i, layer in enumerate(self.layers)
        }

    @property
    def first(self) -> Any:
        """The settings of the first layer."""
        return self.each[self.layers[0]]


def _at(value: Any, index: int) -> Any:
    return value[index] if _is_list(value) else value


Kind = TypeVar("Kind", bound=_Settings)


@cache
def allowed_of(settings: Any) -> dict[str, tuple[str, Callable[[Any], bool]]]:
    """Option -> what is allowed, in words and as a test."""
    found, types = {}, _types_of(settings)
    for option in fields(settings):
        if option.metadata:
            found[option.name] = (option.metadata["allowed"], option.metadata["holds"])
        else:
            names = get_args(types[option.name]) or (True, False)
            told = ", ".join(str(name).lower() for name in names)
            found[option.name] = (f"one of {told}", partial(_is_one_of, names))
    return found


def _is_one_of(names: Sequence[Any], value: Any) -> bool:
    return any(value == name and type(value) is type(name) for name in names)


def built(kind: type[Kind], given: Any) -> Kind | None:
    """Settings from a mapping; what is built already, or None, stays as it is."""
    if given is None or isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(f"{kind.key}={given!r}: must be a mapping of settings, or {kind.__name__}")
    known = {option.name: option.default is MISSING for option in fields(kind)}  # type: ignore
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"{kind.key}.{name}={value!r}: unknown key; it has {', '.join(known)}")
    for name, is_needed in known.items():
        if is_needed and name not in given:
            raise ValueError(f"{kind.key}.{name}: no value is set")
    return kind(**given)


@dataclass(frozen=True, kw_only=True)
class HTM(_Layered):
    """Settings of Horizontal TokenMixup; the defaults of all choices are the paper's method.

    `layer`: block, counted from 0, at whose input tokens are mixed, or several: each has a ScoreNet
    of its own and mixes what the one before has left. `tau`: nats; a sample is easy below it (0:
    none, inf: all). `rho`: least gain of saliency for a token to be replaced (inf: none); both may
    be lists, one value for each layer. `score_loss_weight`: lambda of ScoreNet's loss, to be handed
    to `training_loss`.
    `pooling` of ScoreNet: auto = the class token where the blocks hold one and the model pools it,
    else attention. `stop_gradient`: ScoreNet's loss trains ScoreNet alone. `detector`: the source
    of saliency (Table 3); attention may be rolled out over `rollout_steps` further blocks, and
    random replaces as many tokens as attention would. `matching`, `labels`: how donors are found
    and targets mixed (Table 4). `mask_rule`, `order`: what the published code does otherwise. The
    rules are the tables of `tokenmixup.rules`. `non_finite`: a batch whose gains are not finite
    raises FloatingPointError, or nothing is mixed in it.
    """

    key = "htm"

    layer: int | Sequence[int] = _per_layer(
        "a block's index, 0 or more, or several in rising order",
        lambda x: _is_whole(x) and x >= 0,
        int,
    )
    tau: float | Sequence[float] = _per_layer(
        "a number, 0 or more (inf is allowed), or one for each layer",
        lambda x: _is_number(x) and x >= 0,
        float,
        2.0,
    )
    rho: float | Sequence[float] = _per_layer(
        "a number in 0..1, or inf, or one for each layer",
        lambda x: _is_number(x) and (0 <= x <= 1 or x == math.inf),
        float,
        0.005,
    )
    score_loss_weight: float = _option(
        "a number, 0 or more and finite", lambda x: _is_number(x) and 0 <= x < math.inf, 0.001
    )
    pooling: Pooling = "auto"
    stop_gradient: bool = False
    detector: Detector = "attention"
    rollout_steps: int = _option("0 or more blocks", lambda x: _is_whole(x) and x >= 0, 0)
    matching: Matching = "optimal"
    mask_rule: MaskRule = "paper"
    labels: Labels = "saliency"
    order: Order = "in_place"
    non_finite: NonFinite = "fail"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rollout_steps > 0 and self.detector != "attention":
            raise ValueError(
                f"htm.rollout_steps={self.rollout_steps}: must be 0 with detector="
                f"{self.detector}, attention alone is rolled out"
            )
        for name, value in (("order", "published"), ("detector", "gradient")):
            if len(self.layers) > 1 and getattr(self, name) == value:
                raise ValueError(
                    f"htm.layer={self.layer}: must be one layer with {name}={value}, which tells "
                    "of the batch before it was mixed"
                )


@dataclass(frozen=True, kw_only=True)
class VTM(_Layered):
    """Settings of Vertical TokenMixup.

    `layer`: block, counted from 0, that attends to the memory; it has `layer` sources, so
    `layer >= 1`. Of several each has a memory of its own, from all blocks before it. `kappa`:
    tokens that each source block adds to the memory; a list has one number for each layer.
    `stop_gradient`: no gradient flows from the memory into its source blocks.
    `class_token_offset`: `published` counts patches but gathers from tokens that begin with the
    class token, so that this one can be taken and the last patch never is.
    """

    key = "vtm"

    layer: int | Sequence[int] = _per_layer(
        "a block's index, 1 or more, or several in rising order",
        lambda x: _is_whole(x) and x >= 1,
        int,
    )
    kappa: int | Sequence[int] = _per_layer(
        "a whole number, 1 or more, or one for each layer",
        lambda x: _is_whole(x) and x >= 1,
        int,
        3,
    )
    stop_gradient: bool = False
    class_token_offset: ClassTokenOffset = "paper"


@dataclass(frozen=True, kw_only=True)
class ManifoldMixup(_Settings):
    """Settings of manifold mixup.

    `alpha`: of the Beta(alpha, alpha) distribution of the kept share. `layers`: the blocks, counted
    from 0, one of which is drawn for every batch; its input is mixed.
    """

    key = "manifold_mixup"

    alpha: float = _option(
        "a number, more than 0 and finite", lambda x: _is_number(x) and 0 < x < math.inf, 2.0
    )
    layers: Sequence[int] = _option("different blocks' indices", _is_blocks, (0, 1, 2))
