"""Draws Figure 3 for a trained run with HTM: draw_saliency.py RUN [PICTURE] [--images N]."""

from pathlib import Path

from reproduction.runs.folder import RunFolder, check_writable
from reproduction.runs.parse import parse_saved
from reproduction.system.errors import UserError
from reproduction.system.terminal import Parser, one_line_errors, positive


@one_line_errors("draw_saliency.py")
def main() -> None:
    """Writes RUN/saliency.png or PICTURE, with a .pdf and a .json; prints the entropies."""
    parser = Parser(description=__doc__)
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument("picture", metavar="PICTURE", nargs="?", type=Path, help=".png to write")
    parser.add_argument("--images", metavar="N", type=positive, help="images for the entropies")
    args = parser.parse_args()
    folder = RunFolder(args.run)
    path = args.picture or folder.path / "saliency.png"
    if path.suffix != ".png":
        raise UserError(f"{path}: must end in .png")
    config = parse_saved(folder.read_config())
    check_writable(path, str(path))
    from reproduction.reporting.gallery import draw_saliency_maps
    from reproduction.reporting.trained import batch_size, load_trained, some_images
    from reproduction.training.endings import explaining_data

    trained = load_trained(config, folder, config.device)
    with explaining_data():
        sample = some_images(trained, args.images or batch_size(trained))
    try:
        entropies = draw_saliency_maps(path, trained, sample)
    except ValueError as error:
        raise UserError(f"{folder.path}: {error}") from error
    for name, nats in entropies.items():
        print(f"{name.replace('_', ' ')}: entropy {nats:.3f} nats")
    for suffix in (".png", ".pdf", ".json"):
        print(f"written to {path.with_suffix(suffix)}")


if __name__ == "__main__":
    main()
