"""TokenMixup (Choi, Choi and Kim, NeurIPS 2022): attention-guided mixing of tokens.

`attach` puts it on a transformer; the other names are the paper's pieces as pure functions.
"""

from tokenmixup.assignment import gain_matrix, optimal_assignment
from tokenmixup.attach import TokenMixup, attach
from tokenmixup.horizontal import HTM, HorizontalMix, mix_horizontal
from tokenmixup.manifold import ManifoldMixup
from tokenmixup.output import Output, training_loss
from tokenmixup.saliency import attention_saliency, gradient_saliency, rollout_saliency
from tokenmixup.scorenet import ScoreNet, difficulty
from tokenmixup.structure import why_not
from tokenmixup.vertical import VTM, select_salient, vertical_attention

__all__ = [
    "HTM",
    "VTM",
    "HorizontalMix",
    "ManifoldMixup",
    "Output",
    "ScoreNet",
    "TokenMixup",
    "attach",
    "attention_saliency",
    "difficulty",
    "gain_matrix",
    "gradient_saliency",
    "mix_horizontal",
    "optimal_assignment",
    "rollout_saliency",
    "select_salient",
    "training_loss",
    "vertical_attention",
    "why_not",
]
