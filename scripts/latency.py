"""Table 3's latency: what each saliency detector adds to a training step on this machine.

Steps of CCT-7/3x1 without mixing and with HTM by each detector train in turns. HTM mixes every
sample (tau = inf). A detector adds the time of its step less that of the plain one in the same
round: saliency, assignment and mixing. The gradient is a forward and a backward pass of the whole
model; random tokens are paired by attention. The paper measured on an RTX A6000, so that only
ratios compare.
"""

import os

import pandas as pd
import torch

from reproduction.system import Parser, hardware_name, one_line_errors, say
from reproduction.training.ranks import resolve_device
from scripts import positive
from scripts.bench import CASES, in_turns, training_step

MODEL = "cct_7_3x1"
PRINTED = {"attention": 16, "gradient": 236, "random": 5}  # ms, in Table 3
REFERENCE = "attention"  # of the ratios


def words_of(detector: str | None, device: str) -> list[str]:
    """The overrides of train.py for a step with this detector, or without mixing."""
    precision = "float16" if device == "cuda" else "float32"  # float16 is that of the experiments
    words = [f"model={MODEL}", *CASES[MODEL][0], f"recipe.precision={precision}"]
    if detector is None:
        return [*words, "augmentation=[]"]
    htm = [f"augmentation.htm.{word}" for word in ("tau=inf", "rho=0", f"detector={detector}")]
    return [*words, "augmentation=[htm]", *htm]


@one_line_errors("latency.py")
def main() -> None:
    parser = Parser(prog="latency.py", description=__doc__)
    parser.add_argument("--rounds", type=positive, default=20)
    parser.add_argument("--images", type=positive, help="in a batch (default: 128, on a CPU 16)")
    args = parser.parse_args()
    device = resolve_device("auto", 1)
    _, classes, _, *batches = CASES[MODEL]
    images = args.images or batches[device == "cuda"]
    works = {
        name: training_step(words_of(detector, device), classes, images)
        for name, detector in {"plain": None, **{x: x for x in PRINTED}}.items()
    }
    times = in_turns(works, args.rounds, device)
    added = times[[*PRINTED]].sub(times.plain, axis=0)  # ms, rounds x detectors
    low, median, high = (added.quantile(x) for x in (0.25, 0.5, 0.75))
    printed = pd.Series(PRINTED)
    table = {"ms": median, "from": low, "to": high, "ratio": median / median[REFERENCE]}
    table |= {"paper's ms": printed, "paper's ratio": printed / printed[REFERENCE]}
    say(
        f"{MODEL}, {images} images, {args.rounds} rounds, torch {torch.__version__}, "
        f"{hardware_name(device)}, load average {os.getloadavg()[0]:.1f}\n\n"
        f"{pd.DataFrame(table).to_markdown(floatfmt='.1f')}"
    )


if __name__ == "__main__":
    main()
