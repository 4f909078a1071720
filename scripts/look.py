"""Looks into a trained run with HTM: what each tau and rho would mix, and its saliency maps."""

from pathlib import Path

from reproduction.config import Config
from reproduction.runs import RunFolder
from reproduction.start import check_named
from reproduction.system import Parser, one_line_errors, say
from scripts import positive


def print_shares(folder: RunFolder, config: Config, batches: int) -> None:
    """Prints, for each HTM layer, quantiles, samples by tau and tokens by rho."""
    from reproduction.reporting.look import suggestions

    for text in suggestions(folder, config, batches):
        say(text)
    say("\n*: the run's own, at whose tau tokens are counted; pairs are matched anew for each rho.")


def draw(folder: RunFolder, config: Config, path: Path) -> None:
    """Draws the saliency maps again, and prints their entropies."""
    from reproduction.reporting.trained import draw_saliency_maps, load_trained, some_images

    trained = load_trained(config, folder)
    for name, nats in draw_saliency_maps(path, trained, some_images(trained)).items():
        say(f"{name.replace('_', ' ')}: entropy {nats:.3f} nats")
    for suffix in (".png", ".pdf"):
        say(f"written to {path.with_suffix(suffix)}")


@one_line_errors("look.py")
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("run", metavar="RUN", help="folder of a trained run with HTM")
    parser.add_argument(
        "source", metavar="dataset.source=...", nargs="?", help="the function of a run on own data"
    )
    parser.add_argument("--batches", type=positive, default=8, help="to count over (default: 8)")
    parser.add_argument(
        "--saliency", type=Path, nargs="?", const=Path(), metavar="PICTURE.png",
        help="draw the saliency maps instead (default: RUN/saliency.png)",
    )  # fmt: skip
    args = parser.parse_args()
    if args.source and not args.source.startswith("dataset.source="):
        parser.error(f"{args.source}: must be dataset.source=...")
    folder = RunFolder(args.run.removeprefix("run="))
    path = folder.path / "saliency.png" if args.saliency == Path() else args.saliency
    config = folder.read_config()
    check_named(config.dataset, [args.source or ""])
    from reproduction.training.stop import ending

    try:
        if path is None:
            print_shares(folder, config, args.batches)
        else:
            draw(folder, config, path)
    except Exception as error:
        raise ending(error, config) from error


if __name__ == "__main__":
    main()
