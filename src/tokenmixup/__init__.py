"""TokenMixup (Choi, Choi and Kim, NeurIPS 2022): attention-guided mixing of tokens.

`attach` puts it on a transformer; the other names are the paper's pieces as pure functions.
"""

from tokenmixup.assignment import gain_matrix, optimal_assignment
from tokenmixup.attach import TokenMixup, attach
from tokenmixup.horizontal import HTM, HorizontalMix, mix_horizontal
from tokenmixup.output import Output, training_loss
from tokenmixup.saliency import attention_saliency
from tokenmixup.scorenet import ScoreNet, difficulty
from tokenmixup.vertical import VTM, select_salient, vertical_attention

__all__ = [
    "HTM",
    "VTM",
    "HorizontalMix",
    "Output",
    "ScoreNet",
    "TokenMixup",
    "attach",
    "attention_saliency",
    "difficulty",
    "gain_matrix",
    "mix_horizontal",
    "optimal_assignment",
    "select_salient",
    "training_loss",
    "vertical_attention",
]
