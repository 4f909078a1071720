"""Settings of HTM, VTM and manifold mixup: the only definition of each option's range and default.

Importable without torch. An invalid value raises ValueError with key, value and what is allowed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, cast, get_args

LARGEST = 1e38  # bound of finite numbers, which must fit into float32
LEAST_ALPHA = 0.01  # below it torch draws other shares than those of the Beta distribution
AUTO = "auto"

Difficulty = Literal["paper", "excess"]
# The rules of ours by the setting that chooses one, and by name: where each function is.
RULES: dict[str, dict[str, str]] = {
    "detector": {
        "attention": "tokenmixup.saliency:by_attention",
        "mean_attention": "tokenmixup.saliency:by_mean_attention",  # Eq. 3 as printed
        "gradient": "tokenmixup.saliency:by_gradient",
        "random": "tokenmixup.saliency:by_attention",  # for the pairs; tokens are drawn at random
    },
    "matching": {
        "optimal": "tokenmixup.horizontal:optimal_matching",
        "random": "tokenmixup.rules:random_donors",  # Table 4, without the optimal assignment
    },
    "mask_rule": {
        "paper": "tokenmixup.horizontal:gaining_tokens",
        "published": "tokenmixup.rules:gaining_over_the_first",
    },
    "labels": {
        "saliency": "tokenmixup.horizontal:saliency_ratio",
        "count": "tokenmixup.rules:count_ratio",  # Table 4, without saliency in the labels
    },
}


class Range(NamedTuple):
    """The values of an option that is a number: from `least` to `most`, or one of `others`."""

    least: float
    most: float = LARGEST
    type_: type = Real
    others: tuple[Any, ...] = ()
    is_list: bool = False  # whether it may be several: one for each layer

    def checked(self, value: Any) -> Any:
        """Returns numbers of Python. Raises ValueError for another value, such as a bool."""
        if self.is_list and isinstance(value, Sequence) and not isinstance(value, str):
            one = self._replace(is_list=False)
            return [one.checked(x) for x in value]
        if isinstance(value, str | float) and value in self.others:
            return value
        is_number = isinstance(value, self.type_) and not isinstance(value, bool)
        if not is_number or not self.least <= value <= self.most:
            raise ValueError(f"must be {self.allowed}")
        if self.type_ is Integral:
            return int(value)
        return float(value)

    @property
    def allowed(self) -> str:
        name = "an integer" if self.type_ is Integral else "a number"
        range_ = f">= {self.least}"
        if self.most < LARGEST:
            range_ = f"from {self.least} to {self.most}"
        return " or ".join([f"{name} {range_}", *map(str, self.others)])


class _Settings:
    """Checks each option by itself."""

    key: ClassVar[str]
    ranges: ClassVar[dict[str, Range]]  # of the options that are numbers

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            try:
                checked = self.checked(name, value)
            except ValueError as error:
                raise ValueError(f"{self.key}.{name}={value!r}: {error}") from None
            object.__setattr__(self, name, checked)  # the dataclass is frozen

    def checked(self, name: str, value: Any) -> Any:
        """Returns the value of an option. Raises ValueError that says what is allowed."""
        if name in self.ranges:
            return self.ranges[name].checked(value)
        if name in RULES and callable(value):
            return value
        choices = choices_of(type(self), name)
        if type(value) not in (str, bool) or value not in choices:
            raise ValueError(f"must be one of {', '.join(map(str, choices))}")
        return value


def choices_of(settings: type, name: str) -> list[Any]:
    """Returns the values of an option that is a rule, a name or true or false."""
    if name in RULES:
        return list(RULES[name])
    (choices,) = (option.type for option in fields(settings) if option.name == name)
    return list(get_args(choices)) or [False, True]


class _Layered(_Settings):
    """Settings of a method that acts at one layer, or at several in rising order."""

    layer: int | Sequence[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.layers or self.layers != sorted(set(self.layers)):
            raise ValueError(f"{self.key}.layer={self.layer}: must be in rising order")
        for name, values in self._lists.items():
            if len(values) != len(self.layers):
                needed = f"must be one number, or one for each of {self.key}.layer={self.layer}"
                raise ValueError(f"{self.key}.{name}={values}: {needed}")
            if len(values) == 1:
                object.__setattr__(self, name, values[0])

    @property
    def _lists(self) -> dict[str, Any]:
        """The options that have one value for each layer."""
        return {name: value for name, value in vars(self).items() if isinstance(value, list)}

    @property
    def layers(self) -> list[int]:
        """The indices of the blocks, in order."""
        return list(self.layer) if isinstance(self.layer, Sequence) else [self.layer]

    @property
    def by_layer(self) -> dict[int, Any]:
        """Layer -> its settings, in which every option has one value."""
        settings = {}
        for i, layer in enumerate(self.layers):
            own = {name: per_layer[i] for name, per_layer in self._lists.items()}
            settings[layer] = type(self)(**(vars(self) | own))
        return settings


Settings = TypeVar("Settings", bound=_Settings)


def built(method: type[Settings], given: Any) -> Settings | None:
    """Builds settings from a mapping; returns settings and None unchanged."""
    if given is None or isinstance(given, method):
        return given
    if not isinstance(given, Mapping):
        must = f"must be a mapping of settings, or {method.__name__}"
        raise ValueError(f"{method.key}={given!r}: {must}")
    names = [option.name for option in fields(cast(Any, method))]
    for name, value in given.items():
        if name not in names:
            has = f"unknown key; it has {', '.join(names)}"
            raise ValueError(f"{method.key}.{name}={value!r}: {has}")
    if "layer" in names and "layer" not in given:
        raise ValueError(f"{method.key}.layer: no value is set")
    return method(**given)


@dataclass(frozen=True, kw_only=True)
class HTM(_Layered):
    """Settings of Horizontal TokenMixup. Choices default to the paper's method.

    `layer`: index, from 0, of the block whose input is mixed, or several in rising order. Each has
    a ScoreNet of its own and mixes the tokens and labels that the previous one has mixed.
    `tau`: difficulty in nats below which a sample is easy (0: none, inf: all); auto: `for_classes`.
    `rho`: a token is replaced if that raises its saliency by more than rho (inf: none); auto:
    `rho_for`. With several layers `tau` and `rho` may be lists, one value for each layer.
    `difficulty`: excess, ours, leaves out the entropy of soft labels, which smoothing and input
    mixup raise and no model can score below.
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
    `tokenmixup.rules`. A rule, or a detector, may also be a function, see docs/extending.md.
    """

    key = "htm"
    ranges: ClassVar = {
        "layer": Range(0, type_=Integral, is_list=True),
        "tau": Range(0, others=(AUTO, math.inf), is_list=True),
        "rho": Range(0, 1, others=(AUTO, math.inf), is_list=True),
        "score_loss_weight": Range(0),
        "rollout_steps": Range(0, type_=Integral),
    }

    layer: int | Sequence[int]
    tau: float | str | Sequence[float | str] = AUTO
    rho: float | str | Sequence[float | str] = AUTO
    score_loss_weight: float = 0.001
    pooling: Literal["auto", "attention", "average", "class_token"] = "auto"
    stop_gradient: bool = False
    detector: str | Callable[[Any], Any] = "attention"
    rollout_steps: int = 0
    matching: str | Callable[[Any], Any] = "optimal"
    mask_rule: str | Callable[[Any], Any] = "paper"
    labels: str | Callable[[Any], Any] = "saliency"
    order: Literal["in_place", "published"] = "in_place"
    difficulty: Difficulty = "paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rollout_steps and self.detector != "attention":
            must = "must be 0 unless detector=attention, which alone can be rolled out"
            raise ValueError(f"htm.rollout_steps={self.rollout_steps}: {must}")
        if self.order == "published" and len(self.layers) > 1:
            reason = "which moves samples to other rows of the batch"
            must = f"must be one layer with order=published, {reason}"
            raise ValueError(f"htm.layer={self.layer}: {must}")

    def for_classes(self, num_classes: int) -> "HTM":
        """Returns the settings with log10(classes) nats for `tau=auto`.

        The rule is ours: 1.0 for 10 classes and 2.0 for 100, as published. Guessing scores
        ln(classes), 2.3 times as much, so that no sample is easy before ScoreNet has learned.
        """
        taus = []
        for htm in self.by_layer.values():
            taus.append(math.log10(num_classes) if htm.tau == AUTO else htm.tau)
        return replace(self, tau=taus)  # of one layer, the list becomes its value

    def rho_for(self, num_tokens: int) -> float:
        """Returns the rho of one layer, 1.28 / spatial tokens for `auto`.

        The rule is ours: 0.005 for 256 tokens, as published for CIFAR-100. Saliency sums to about
        1, so that rho is 1.28 times its mean.
        """
        if self.rho == AUTO:
            return 1.28 / num_tokens
        return cast(float, self.rho)


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
    ranges: ClassVar = {
        "layer": Range(1, type_=Integral, is_list=True),
        "kappa": Range(1, type_=Integral, is_list=True),
    }

    layer: int | Sequence[int]
    kappa: int | Sequence[int] = 3
    stop_gradient: bool = False
    class_token_offset: Literal["paper", "published"] = "paper"


@dataclass(frozen=True, kw_only=True)
class ManifoldMixup(_Settings):
    """Settings of manifold mixup.

    `alpha`: of the Beta(alpha, alpha) distribution of the kept share.
    `layers`: indices, from 0, of blocks, one of which is drawn for every batch; its input is mixed.
    """

    key = "manifold_mixup"
    ranges: ClassVar = {
        "alpha": Range(LEAST_ALPHA),
        "layers": Range(0, type_=Integral, is_list=True),
    }

    alpha: float = 2.0
    layers: Sequence[int] = (0, 1, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = self.layers
        if not isinstance(layers, list) or not 0 < len(set(layers)) == len(layers):
            raise ValueError(f"{self.key}.layers={layers}: must be a list of different integers")
