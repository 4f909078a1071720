"""Finds the timm models that TokenMixup supports, and tests that it works with them."""

import copy
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import timm
import torch
from torch import nn

from reproduction.config import ROOT
from tokenmixup import Output, attach, find_encoder, training_loss, why_not

PAGE = ROOT / "docs" / "models.md"
CLASSES = 10
SMALL = 64  # pixels, of models with stages; others get 4 x 4 tokens
# Words of a model name that describe its size.
SIZES = re.compile(
    r"(\d+\w?|\d*(xx?s|s|m|l)\d*|tiny|small|medium(d)?|base|large|huge|giant|gigantic|plus|mini|nano"
    r"|wee|pwee|little|betwixt|intermediate|enormous|patch\d+|so\d+m\d*|\d+b|\d+m)"
)


class Verdict(NamedTuple):
    """Whether a timm model is supported, found without running it."""

    name: str
    module: str  # timm.models.<module>
    parameters: int
    reason: str | None  # why it is not supported, None if it is
    takes_vtm: bool = True  # or HTM alone

    @property
    def family(self) -> str:
        """timm's module, and the name without its size."""
        words = [word for word in self.name.split("_") if not SIZES.fullmatch(word)]
        return f"{self.module}: {'_'.join(words)}"


def survey(names: Iterable[str]) -> list[Verdict]:
    """Checks each model on the meta device, without allocating or downloading weights."""
    return [_verdict(name) for name in names]


def smallest_of_families(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Returns the smallest supported model of each family."""
    families: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        if verdict.reason is None:
            families[verdict.family].append(verdict)
    return [min(family, key=lambda v: v.parameters) for family in families.values()]


def page_of(verdicts: Sequence[Verdict]) -> str:
    """docs/models.md: by timm's modules, how many are supported, and why the others are not."""
    lines = [
        "# Supported models\n",
        f"{count_of(verdicts)}. HTM alone is for models whose attention is not",
        "over all tokens: by windows, or with fewer keys than queries.",
        "`python scripts/list_models.py --page` writes this page. Without `--page` it prints the",
        "verdict on every model. `make check-models` trains and evaluates the smallest model of",
        "each family. Models of torchvision and transformers, and your own:",
        "[adapters.md](adapters.md).\n",
        "| timm module | HTM | HTM and VTM | models | reason for the others |",
        "|---|---:|---:|---:|---|",
    ]
    modules: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        modules[verdict.module].append(verdict)
    for module, members in sorted(modules.items()):
        reasons = Counter(_short_reason(x.reason) for x in members if x.reason is not None)
        text = "; ".join(reason for reason, _ in reasons.most_common())
        htm, both = _counts(members)
        lines.append(f"| {module} | {htm} | {both} | {len(members)} | {text} |")
    return "\n".join(lines) + "\n"


def count_of(verdicts: Sequence[Verdict]) -> str:
    """How many models are supported, in one sentence without a stop."""
    (htm, both), number = _counts(verdicts), len(verdicts)
    return f"timm {timm.__version__}: {htm} of {number} models take HTM, {both} HTM and VTM"


def _counts(verdicts: Iterable[Verdict]) -> tuple[int, int]:
    supported = [verdict for verdict in verdicts if verdict.reason is None]
    return len(supported), sum(verdict.takes_vtm for verdict in supported)


def _short_reason(reason: str) -> str:
    """Drops the class name and the block number from a reason."""
    return re.sub(r"^\w+:? (block \d+ is )?", "", reason).replace("|", "/")


def _verdict(name: str) -> Verdict:
    with torch.device("meta"):
        model = _create(name)
    reason = why_not(model)
    if reason is None and getattr(model, "num_classes", 0) != CLASSES:
        reason = f"{type(model).__name__} is an encoder without a classifier"
    module = type(model).__module__.rpartition(".")[2]
    takes_vtm = reason is None and find_encoder(model).has_parts
    return Verdict(name, module, sum(p.numel() for p in model.parameters()), reason, takes_vtm)


def _create(name: str, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated names
        try:
            return timm.create_model(name, num_classes=CLASSES, **options)
        except TypeError:  # an encoder without num_classes
            return timm.create_model(name, **options)


def try_out(name: str, depth: int | None = None) -> None:
    """Attaches HTM, VTM if possible and manifold mixup, trains one step and compares evaluation.

    Uses small images if possible, and all blocks unless `depth` is set. Evaluation
    must equal the plain model. Raises AssertionError or an error of the model on failure.
    """
    torch.manual_seed(0)
    model, size = _small(name, {} if depth is None else {"depth": depth})
    plain = copy.deepcopy(model)
    htm = {"layer": 1, "tau": float("inf"), "rho": 0.0}
    vtm = {"layer": 2} if find_encoder(model).has_parts else None
    module = attach(model, CLASSES, htm=htm, vtm=vtm, manifold_mixup={"layers": [0, 1]})
    images = torch.randn(2, 3, size, size)
    output = module.train()(images, torch.eye(CLASSES)[:2])
    assert isinstance(output, Output)
    assert output.logits.shape == (2, CLASSES)
    assert output.stats["mixed_samples"] == 2
    assert output.stats["mixed_tokens"] > 0
    loss = training_loss(output, score_loss_weight=1.0)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())
    plain.load_state_dict(model.state_dict())  # for batch norm statistics of hybrid models
    with torch.no_grad():
        assert torch.equal(module.eval()(images), plain.eval()(images))


def _small(name: str, options: dict[str, Any]) -> tuple[nn.Module, int]:
    """Builds the model for small images, or for timm's default size if that is fixed."""
    with torch.device("meta"):
        full: Any = _create(name)
    embedding = getattr(full, "patch_embed", None) or full.embeds
    has_stages = not find_encoder(full).has_parts
    size = SMALL if has_stages else 4 * embedding.feat_ratio(as_scalar=True)
    try:
        return _create(name, img_size=size, **options), size
    except (TypeError, AssertionError):
        return _create(name, **options), full.pretrained_cfg["input_size"][-1]
