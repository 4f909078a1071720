"""Settings of HTM, VTM and manifold mixup: the only definition of each option's range and default.

Importable without torch. An invalid value raises ValueError with key, value and what is allowed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache, partial
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_type_hints

LARGEST = 1e38  # bound of finite numbers, which must fit into float32
AUTO = "auto"

Pooling = Literal["auto", "attention", "average", "class_token"]
Detector = Literal["attention", "mean_attention", "gradient", "random"]
Matching = Literal["optimal", "random"]
MaskRule = Literal["paper", "published"]
Labels = Literal["saliency", "count"]
Order = Literal["in_place", "published"]
NonFinite = Literal["fail", "skip"]
ClassTokenOffset = Literal["paper", "published"]


def _option(allowed: str, holds: Callable[[Any], bool], default: Any = MISSING) -> Any:
    """Declares an option with a range."""
    return field(default=default, metadata={"allowed": allowed, "holds": holds})


def _per_layer(
    allowed: str, holds: Callable[[Any], bool], number: Callable[[Any], Any], default: Any = MISSING
) -> Any:
    """Declares an option with one value for all layers or one for each; [x] is the same as x."""

    def all_hold(x: Any) -> bool:
        return all(map(holds, x)) and len(x) > 0 if _is_list(x) else holds(x)

    metadata = {"allowed": allowed, "holds": all_hold, "number": number}
    return field(default=default, metadata=metadata)


def _is_list(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str)


def _is_whole(x: Any) -> bool:
    return type(x) is int


def _is_number(x: Any) -> bool:
    return type(x) in (int, float) and (abs(x) <= LARGEST or abs(x) == math.inf)


def _is_auto(x: Any) -> bool:
    return isinstance(x, str) and x == AUTO


def _float_or_auto(x: Any) -> float | str:
    return AUTO if _is_auto(x) else float(x)


def _is_blocks(x: Any) -> bool:
    if not _is_list(x) or not x:
        return False
    return all(_is_whole(y) and y >= 0 for y in x) and len(set(x)) == len(x)


_types_of = cache(get_type_hints)


class _Settings:
    """Checks each option by itself; converts integers to float where the type is float."""

    key: ClassVar[str]

    def __post_init__(self) -> None:
        kind: Any = type(self)
        types = _types_of(kind)
        for name, (allowed, holds) in allowed_of(kind).items():
            value = getattr(self, name)
            if not holds(value):
                raise ValueError(f"{self.key}.{name}={value!r}: must be {allowed}")
            number = kind.__dataclass_fields__[name].metadata.get("number")
            if _is_list(value):  # copied, since the caller may modify its list
                value = [*map(number, value)] if number else [*value]
                value = value[0] if number and len(value) == 1 else value
            elif number or types[name] is float:
                value = (number or float)(value)
            object.__setattr__(self, name, value)


class _Layered(_Settings):
    """Settings of a method that acts at one layer, or at several in rising order."""

    layer: int | Sequence[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers != sorted({*self.layers}):
            raise ValueError(f"{self.key}.layer={self.layer}: must be in rising order")
        for name in self._numbers():
            value = getattr(self, name)
            if _is_list(value) and len(value) != len(self.layers):
                raise ValueError(
                    f"{self.key}.{name}={value}: must be one number, or one for each of "
                    f"{self.key}.layer={self.layer}"
                )

    def _numbers(self) -> list[str]:
        kind: Any = type(self)
        return [option.name for option in fields(kind) if "number" in option.metadata]

    @property
    def layers(self) -> list[int]:
        """The indices of the blocks, in order."""
        return [*self.layer] if isinstance(self.layer, Sequence) else [self.layer]

    @property
    def each(self) -> dict[int, Any]:
        """Layer -> its settings, in which every option has one value."""
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


def _without_auto(value: Any, number: float) -> Any:
    """Replaces `auto`, also in a list, by the number."""
    if _is_list(value):
        return [_without_auto(x, number) for x in value]
    return number if _is_auto(value) else value


Kind = TypeVar("Kind", bound=_Settings)


@cache
def allowed_of(settings: Any) -> dict[str, tuple[str, Callable[[Any], bool]]]:
    """Option -> the allowed values, as text and as a predicate."""
    allowed, types = {}, _types_of(settings)
    for option in fields(settings):
        if option.metadata:
            allowed[option.name] = (option.metadata["allowed"], option.metadata["holds"])
        else:
            choices = get_args(types[option.name]) or (True, False)
            text = ", ".join(str(choice).lower() for choice in choices)
            allowed[option.name] = (f"one of {text}", partial(_is_one_of, choices))
    return allowed


def _is_one_of(choices: Sequence[Any], value: Any) -> bool:
    return any(value == choice and type(value) is type(choice) for choice in choices)


def built(kind: type[Kind], given: Any) -> Kind | None:
    """Builds settings from a mapping; returns settings and None unchanged."""
    if given is None or isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(f"{kind.key}={given!r}: must be a mapping of settings, or {kind.__name__}")
    required = {option.name: option.default is MISSING for option in fields(kind)}  # type: ignore
    for name, value in given.items():
        if name not in required:
            keys = ", ".join(required)
            raise ValueError(f"{kind.key}.{name}={value!r}: unknown key; it has {keys}")
    for name, is_required in required.items():
        if is_required and name not in given:
            raise ValueError(f"{kind.key}.{name}: no value is set")
    return kind(**given)


@dataclass(frozen=True, kw_only=True)
class HTM(_Layered):
    """Settings of Horizontal TokenMixup. Choices default to the paper's method.

    `layer`: index, from 0, of the block whose input is mixed, or several in rising order. Each has
    a ScoreNet of its own and mixes the tokens and labels that the previous one has left.
    `tau`: difficulty in nats below which a sample is easy (0: none, inf: all); auto: `for_classes`.
    `rho`: a token is replaced if that raises its saliency by more than rho (inf: none); auto:
    `rho_for`. With several layers `tau` and `rho` may be lists, one value for each layer.
    `score_loss_weight`: lambda, the weight of ScoreNet's loss in `training_loss`.
    `pooling`: of ScoreNet; auto is class_token if the model classifies by a class token that enters
    the blocks, else attention.
    `stop_gradient`: ScoreNet's loss trains ScoreNet alone.
    `detector`: source of saliency (Table 3). attention is that of the class token if the model
    classifies by it, else the mean over all queries (Eq. 3), as always with mean_attention. random
    replaces as many tokens as attention would.
    `rollout_steps`: further blocks over which attention is rolled out.
    `matching`, `labels`: rules for donors and for the mixing of targets (Table 4).
    `mask_rule`, `order`: published selects the deviations of the published code; see
    `tokenmixup.rules`.
    `non_finite`: for gains that are not finite, fail raises FloatingPointError, skip mixes nothing
    in that batch.
    """

    key = "htm"

    layer: int | Sequence[int] = _per_layer(
        "an integer >= 0, or several in rising order",
        lambda x: _is_whole(x) and x >= 0,
        int,
    )
    tau: float | str | Sequence[float | str] = _per_layer(
        "auto, a number >= 0 or inf, or one for each layer",
        lambda x: _is_auto(x) or (_is_number(x) and x >= 0),
        _float_or_auto,
        AUTO,
    )
    rho: float | str | Sequence[float | str] = _per_layer(
        "auto, 0 <= number <= 1 or inf, or one for each layer",
        lambda x: _is_auto(x) or (_is_number(x) and (0 <= x <= 1 or x == math.inf)),
        _float_or_auto,
        AUTO,
    )
    score_loss_weight: float = _option(
        "a finite number >= 0", lambda x: _is_number(x) and 0 <= x < math.inf, 0.001
    )
    pooling: Pooling = "auto"
    stop_gradient: bool = False
    detector: Detector = "attention"
    rollout_steps: int = _option("an integer >= 0", lambda x: _is_whole(x) and x >= 0, 0)
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
                f"{self.detector}, only attention can be rolled out"
            )
        for name, value in (("order", "published"), ("detector", "gradient")):
            if len(self.layers) > 1 and getattr(self, name) == value:
                raise ValueError(
                    f"htm.layer={self.layer}: must be one layer with {name}={value}, which refers "
                    "to the batch before mixing"
                )

    def for_classes(self, num_classes: int) -> "HTM":
        """Returns the settings with log10(classes) nats for `tau=auto`.

        The rule is ours: 1.0 for 10 classes and 2.0 for 100, as published. Guessing scores
        ln(classes), 2.3 times as much, so that no sample is easy before ScoreNet has learned.
        """
        return replace(self, tau=_without_auto(self.tau, math.log10(num_classes)))

    def rho_for(self, num_tokens: int) -> Any:
        """Returns rho, 1.28 / spatial tokens for `auto`; a list if the layers have their own.

        The rule is ours: 0.005 for 256 tokens, as published for CIFAR-100. Saliency sums to about
        1, so that rho is 1.28 times its mean.
        """
        return _without_auto(self.rho, 1.28 / num_tokens)


@dataclass(frozen=True, kw_only=True)
class VTM(_Layered):
    """Settings of Vertical TokenMixup.

    `layer`: index, from 0, of the block that attends to the memory, or several in rising order. The
    sources of the memory are all blocks before it, so `layer >= 1`; each layer has a memory of its
    own.
    `kappa`: number of tokens from each source; a list has one number for each layer.
    `stop_gradient`: no gradient flows from the memory into its sources.
    `class_token_offset`: published uses indices of patches for tokens that begin with the class
    token, so the class token can be selected and the last patch cannot.
    """

    key = "vtm"

    layer: int | Sequence[int] = _per_layer(
        "an integer >= 1, or several in rising order",
        lambda x: _is_whole(x) and x >= 1,
        int,
    )
    kappa: int | Sequence[int] = _per_layer(
        "an integer >= 1, or one for each layer",
        lambda x: _is_whole(x) and x >= 1,
        int,
        3,
    )
    stop_gradient: bool = False
    class_token_offset: ClassTokenOffset = "paper"


@dataclass(frozen=True, kw_only=True)
class ManifoldMixup(_Settings):
    """Settings of manifold mixup.

    `alpha`: of the Beta(alpha, alpha) distribution of the kept share.
    `layers`: indices, from 0, of blocks, one of which is drawn for every batch; its input is mixed.
    """

    key = "manifold_mixup"

    alpha: float = _option("a finite number > 0", lambda x: _is_number(x) and 0 < x < math.inf, 2.0)
    layers: Sequence[int] = _option("different integers >= 0", _is_blocks, (0, 1, 2))
