"""How much is measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from reproduction.system.errors import UserError

CCT, VIT = "cct_7_3x1", "vit_base_patch16_224"
Size = tuple[str, int]  # model, batch
# model -> data set, recipe, classes
TRAINED_AS = {
    "cct_2_3x2": ("digits", "quickstart", 10),
    CCT: ("cifar100", "cifar_cct", 100),
    VIT: ("imagenet1k", "imagenet_vit", 1000),
}


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Sizes and rounds.

    `pairs`: rounds of whatever is compared; `starts`: of processes and batches of the pipeline.
    `steps`, `oracle`: models and batches of the training steps. `detectors`: batch of the detectors
    and parts. `gain`: samples and tokens of the gain matrix, whose growth goes through
    `gain_samples` at `gain[1]` tokens, and `gain_tokens` at `detectors` samples. `matrix`: rows of
    the product that tells the matrix rate. `images`: of a batch of the pipeline.
    """

    pairs: int = 40
    starts: int = 10
    steps: tuple[Size, ...] = (("cct_2_3x2", 128), (CCT, 16), (VIT, 4))
    oracle: tuple[Size, ...] = ((CCT, 16),)
    detectors: int = 128
    gain: tuple[int, int] = (504, 196)
    gain_samples: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    gain_tokens: tuple[int, ...] = (64, 128, 256, 512, 1024)
    matrix: int = 2048
    images: int = 64


ON_CPU = Scope()
ON_GPU = Scope(
    steps=(("cct_2_3x2", 128), (CCT, 128), (VIT, 128)),
    oracle=((CCT, 128), (VIT, 128)),
    matrix=8192,
)
QUICK = Scope(
    pairs=2,
    starts=1,
    steps=(("cct_2_3x2", 4),),
    oracle=(("cct_2_3x2", 4),),
    detectors=2,
    gain=(12, 16),
    gain_samples=(8, 16, 32),
    gain_tokens=(8, 16, 32),
    matrix=64,
    images=2,
)


def sizes_of(texts: Sequence[str]) -> tuple[Size, ...]:
    """MODEL:BATCH as typed; UserError for another model, and for a batch below 2."""
    sizes = []
    for text in texts:
        model, _, batch = text.partition(":")
        if model not in TRAINED_AS:
            raise UserError(f"sizes={text}: the model must be one of {', '.join(TRAINED_AS)}")
        if not batch.isdecimal() or int(batch) < 2:
            raise UserError(f"sizes={text}: must be MODEL:BATCH, with a batch of 2 or more")
        sizes.append((model, int(batch)))
    return tuple(sizes)
