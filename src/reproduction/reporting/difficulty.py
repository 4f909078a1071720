"""How difficult a trained run finds its training images. Letters: b batch, c classes."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reproduction.reporting.figures import BLUE, ORANGE, figure
from reproduction.reporting.trained import Sample, Trained, block_inputs
from reproduction.storage import write_text
from tokenmixup.scorenet import difficulty

AT_ONCE = 64
BINS_A_NAT = 10


def draw_difficulty(path: Path, trained: Trained, sample: Sample) -> None:
    """Draws the distribution of the difficulty of `sample`; `path`.json holds it as well.

    There, `edges` are in nats, one more than `counts`; the last bin, above what guessing scores, is
    open above. `tau` is "inf" where every image is mixed.
    """
    htm = trained.module.htm
    assert htm is not None
    nats = image_difficulty(trained.module, sample)
    tau = math.inf if htm.ablate == "scorenet" else htm.tau
    top = math.ceil(math.log(len(trained.source.classes))) + 1
    edges = np.arange(top * BINS_A_NAT + 1) / BINS_A_NAT
    counts, _ = np.histogram(nats.clip(max=edges[-1]), edges)
    with figure(path, figsize=(6, 3)) as ax:
        ax.stairs(counts, edges, fill=True, color=BLUE)
        if tau < math.inf:
            ax.axvline(tau, color=ORANGE)
        ax.set_title(f"{np.mean(nats < tau):.0%} of {len(nats)} images are easy (tau = {tau:g})")
        ax.set_xlabel(f"difficulty [nats], {top} and more in the last bin")
        ax.set_ylabel("images")
    told = {
        "edges": edges.tolist(),
        "counts": counts.tolist(),
        "tau": tau if tau < math.inf else "inf",
        "images": len(nats),
    }
    write_text(path.with_suffix(".json"), json.dumps(told) + "\n")


@torch.no_grad()
def image_difficulty(module: Any, sample: Sample) -> np.ndarray:
    """ScoreNet's cross-entropy of each image as HTM judges it, in nats: `b`."""
    layer, found = module.htm.layer, []
    batches = (part.split(AT_ONCE) for part in (sample.images, sample.targets))
    for images, targets in zip(*batches, strict=True):
        entry = block_inputs(module.model, images, layer)[layer]
        found.append(difficulty(module.scorenet(entry.tokens, entry.num_prefix_tokens), targets))
    return torch.cat(found).cpu().numpy()
