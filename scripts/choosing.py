"""Prints the numbers of docs/choosing.md and draws its picture, from a run with htm.tau=0."""

from pathlib import Path

from reproduction.runs.compose import config_of
from reproduction.runs.folder import RunFolder, check_writable
from reproduction.runs.parse import parse_saved
from reproduction.system.errors import UserError
from reproduction.system.terminal import Parser, one_line_errors, say

DRAWS = 10_000  # batches of input mixing
RECIPES = {10: "table1/cifar10_htm", 100: "table1/cifar100_htm"}


@one_line_errors("choosing.py")
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("run", metavar="RUN", help="folder of a run with htm.tau=0")
    parser.add_argument("picture", metavar="PICTURE.png", type=Path, nargs="?", help="to be drawn")
    args = parser.parse_args()
    folder = RunFolder(args.run.removeprefix("run="))
    if args.picture is not None and args.picture.suffix != ".png":
        raise UserError(f"{args.picture}: must end in .png")
    config = parse_saved(folder.read_config())
    htm = config.augmentation.htm
    if htm is None or any(each.tau != 0 for each in htm.each.values()):
        raise UserError(f"run={folder.path}: must be a run with augmentation.htm.tau=0")
    if args.picture is not None:
        check_writable(args.picture, str(args.picture))
    import numpy as np

    from reproduction.data.build import drawn_weights
    from reproduction.reporting.choosing import (
        draw_choice,
        floor,
        look_at,
        share_table,
    )

    for classes, experiment in RECIPES.items():
        theirs = config_of([f"experiment={experiment}"])
        assert theirs.augmentation.htm is not None
        smoothing, tau = theirs.recipe.label_smoothing, theirs.augmentation.htm.tau
        least, most = floor(np.array([1.0, 0.5]), smoothing, classes)
        weights = np.array([*drawn_weights(theirs, range(DRAWS)).values()])
        above = floor(weights, smoothing, classes) >= tau
        say(
            f"{experiment}: floor {least:.4f} nats, {most:.4f} at weight 0.5; "
            f"{above.mean():.1%} of {len(above):,} batches cannot mix at tau = {tau:g}"
        )
    seen, tau = look_at(folder, config)
    for layer, nats in zip(htm.layers, seen[0].difficulty, strict=True):
        say(
            f"htm.layer={layer}: {(nats < tau).float().mean():.1%} of {len(nats):,} images are "
            f"easier than tau = {tau:g}, median {nats.median():.2f} nats"
        )
    say(f"the donor's share, mean (5 to 95 %), where htm.layer={htm.layers[-1]} mixes all images:")
    say(share_table(seen).to_markdown(index=False, disable_numparse=True))
    if args.picture is not None:
        draw_choice(args.picture, seen, htm.layers, tau, config.recipe.label_smoothing)
        say(f"written to {args.picture} and .pdf")


if __name__ == "__main__":
    main()
