"""Draws Figure 3 of a trained run with HTM: draw_saliency.py RUN [PICTURE] [--images N]."""

import argparse
from pathlib import Path

from reproduction.runs.folder import RunFolder, check_writable
from reproduction.runs.parse import parse_saved
from reproduction.system.errors import UserError
from reproduction.system.terminal import ending_in_a_line


@ending_in_a_line("draw_saliency.py")
def main() -> None:
    """Writes RUN/saliency.png, or PICTURE, with a .pdf and a .json; prints the entropies."""
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS)
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("picture", metavar="PICTURE", nargs="?", type=Path, help="a .png")
    parser.add_argument("--images", metavar="N", type=int, help="to take entropies over")
    args = parser.parse_args()
    folder = RunFolder(args.run)
    path = args.picture or folder.path / "saliency.png"
    if path.suffix != ".png":
        raise UserError(f"{path}: must end in .png")
    if args.images is not None and args.images < 1:
        raise UserError(f"--images={args.images}: must be 1 or more")
    config = parse_saved(folder.read_config())
    check_writable(path, str(path))
    from reproduction.reporting.gallery import draw_figure3

    entropies = draw_figure3(path, config, folder, args.images)
    for name, nats in entropies.items():
        print(f"{name.replace('_', ' ')}: entropy {nats:.3f} nats")
    print(
        *(f"written to {path.with_suffix(suffix)}" for suffix in (".png", ".pdf", ".json")),
        sep="\n",
    )


if __name__ == "__main__":
    main()
