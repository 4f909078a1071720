"""What each tau and rho would mix on batches of a trained run with HTM, to help choose them.

Each layer is measured as if earlier ones did not mix. Code of your own that the run has, such as a
data set, runs only if an override names it.
"""

import dataclasses
from collections import defaultdict

import pandas as pd
import torch

from reproduction.compose import check_asked
from reproduction.data.inputs import build_training_inputs
from reproduction.errors import Parser, UserError, one_line_errors, say
from reproduction.folder import RunFolder
from reproduction.reporting.trained import load_trained, training_batches, with_htm
from tokenmixup import mix_horizontal
from tokenmixup.rules import rules_of

BATCHES = 8
SHARES = {"tau": "easy samples", "rho": "replaced tokens of the easy samples of this run"}
TAUS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
RHOS = (0.0, 0.001, 0.003, 0.005, 0.01, 0.02)


@one_line_errors()
def main() -> None:
    """Prints, for each HTM layer, the easy samples by tau, and of these the tokens by rho."""
    parser = Parser(description=__doc__)
    parser.add_argument("run", metavar="RUN", help="folder of a trained run")
    parser.add_argument("overrides", nargs="*", metavar="KEY=package.module:factory")
    args = parser.parse_args()
    folder = RunFolder(args.run.removeprefix("run="))
    config = folder.read_config()
    check_asked(config, args.overrides, "images", "model", "inputs", "tokens")
    if config.augmentation.htm is None:
        raise UserError(f"run={folder.path}: was trained without htm")
    trained = load_trained(config, folder)
    htm = trained.module.htm
    assert htm is not None
    module = with_htm(trained.module, dataclasses.replace(htm, tau=0.0))
    module.scorenets = trained.module.scorenets
    module.train()
    module.model.eval()
    inputs = build_training_inputs(config, trained.device)
    size = config.recipe.batch_size // config.devices // config.recipe.grad_accum_steps
    shares = defaultdict[tuple[int, str, float], list[float]](list)
    for step, (pixels, classes) in enumerate(training_batches(trained, max(size, 1), BATCHES)):
        mixed = inputs(pixels, classes, config.seed, step, 0)
        targets = mixed.targets(len(trained.data.classes), config.recipe.label_smoothing)
        with torch.no_grad():
            layers = module(mixed.images, targets).layers
        for seen in layers:
            own = htm.by_layer[seen.layer]
            tau, rho = float(own.tau), own.rho_for(seen.saliency.shape[1])
            for x in sorted({*TAUS, tau}):
                share = (seen.difficulty < x).float().mean()
                shares[seen.layer, "tau", x].append(float(share))
            easy = seen.difficulty < tau
            for x in sorted({*RHOS, rho}):
                tokens = seen.saliency[..., None]  # any will do, as will targets
                mixed_at_rho = mix_horizontal(
                    tokens, targets, seen.saliency, seen.difficulty, tau, x, rules_of(own)
                )
                share = mixed_at_rho.mask[easy].float().mean()
                shares[seen.layer, "rho", x].append(float(share))
    means = pd.Series({key: pd.Series(x).mean() for key, x in shares.items()})
    for (layer, key), of_layer in means.groupby(level=[0, 1]):
        texts = of_layer.droplevel([0, 1]).map("{:.1%}".format).rename(SHARES[key])
        texts = texts.rename("{:.4g}".format).rename_axis(key)
        say(f"\nlayer {layer}\n{texts.replace('nan%', '-').to_markdown(disable_numparse=True)}")


if __name__ == "__main__":
    main()
