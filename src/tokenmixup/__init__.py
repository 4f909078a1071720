"""TokenMixup (Choi, Choi and Kim, NeurIPS 2022): attention-guided mixing of tokens.

`attach` adds it to a transformer; the other functions are the parts of the method. They are
imported on first use, so that the settings are available without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokenmixup.settings import HTM, VTM, ManifoldMixup

if TYPE_CHECKING:
    from tokenmixup.adapters import Adapter, blocks_of
    from tokenmixup.assignment import gain_matrix, optimal_assignment
    from tokenmixup.horizontal import HorizontalMix, Rules, mix_horizontal
    from tokenmixup.module import TokenMixup, attach
    from tokenmixup.output import Output, training_loss
    from tokenmixup.saliency import gradient_saliency, rollout_saliency
    from tokenmixup.scorenet import ScoreNet, difficulty
    from tokenmixup.vertical import salient_indices

__version__ = "1.0.0"
__all__ = ["HTM", "VTM", "Adapter", "ManifoldMixup", "Output", "TokenMixup", "attach", "blocks_of"]
__all__ += ["HorizontalMix", "Rules", "gain_matrix", "mix_horizontal", "training_loss"]
__all__ += ["gradient_saliency", "optimal_assignment", "rollout_saliency"]
__all__ += ["ScoreNet", "difficulty", "salient_indices"]
PARTS = (
    "adapters",
    "assignment",
    "horizontal",
    "module",
    "output",
    "saliency",
    "scorenet",
    "vertical",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for part in PARTS:
            module = import_module(f"{__name__}.{part}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
