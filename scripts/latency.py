"""Table 3's latency: what each saliency detector adds to a training step on this machine.

Steps of CCT-7/3x1 without mixing and with HTM by each detector train in turns. HTM mixes every
sample (tau = inf). A detector adds the time of its step less that of the plain one in the same
round: saliency, assignment and mixing. The gradient is a forward and a backward pass of the whole
model; random tokens are paired by attention. The paper measured on an RTX A6000, so that only
ratios compare. The report of Table 3 shows what is written.
"""

from pathlib import Path

import torch

from reproduction.errors import Parser, one_line_errors, say
from reproduction.files import write_json
from reproduction.studies.rows import LATENCY, latencies
from reproduction.studies.study import PAPER_FOLDER, read
from reproduction.studies.table import REPORT, as_markdown
from reproduction.training.ranks import resolve_device
from scripts import positive
from scripts.bench import CASES, Work, in_turns, machine, training_step, words_of

MODEL = "cct_7_3x1"


@one_line_errors()
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--rounds", type=positive, default=20)
    parser.add_argument("--images", type=positive, help="in a batch (default: 128, on a CPU 16)")
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), help="folder of the runs")
    args = parser.parse_args()
    study = read(PAPER_FOLDER / "table3.yaml")
    device = resolve_device("auto", 1)
    case = CASES[MODEL]
    images = args.images or case.images(device)
    words = {"plain": words_of(MODEL, "eager", device, [])}
    for name in study.latencies:
        mixing = ["augmentation.htm.rho=0", f"augmentation.htm.detector={name}"]
        words[name] = words_of(MODEL, "eager", device, ["htm"]) + mixing
    works = dict[str, Work]()
    for name, overrides in words.items():
        if device == "cuda":
            overrides.append("recipe.precision=float16")  # as in the experiments
        works[name] = training_step(overrides, case.classes, images)
    times = in_turns(works, args.rounds, device)
    added = times[[*study.latencies]].sub(times.plain, axis=0)  # ms, rounds x detectors
    about = (
        f"{MODEL}, {images} images, {args.rounds} rounds, torch {torch.__version__}, "
        f"{machine(device)}"
    )
    ms = {name: added[name].quantile([0.25, 0.5, 0.75]).tolist() for name in study.latencies}
    path = args.outputs / REPORT / LATENCY
    write_json(path, {"about": about, "ms": ms})
    for title, texts in latencies(study, args.outputs).items():
        say(f"{title}\n\n{as_markdown(texts)}\n\nwritten to {path}")


if __name__ == "__main__":
    main()
