"""Draws Figure 3 of a trained run with HTM: draw_saliency.py RUN [PICTURE]."""

import argparse
from pathlib import Path

from reproduction.errors import UserError
from reproduction.parse import parse_saved
from reproduction.runs import RunFolder, check_writable


def main() -> None:
    """Writes RUN/saliency.png, or PICTURE, a .pdf beside it, and prints the entropies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("picture", metavar="PICTURE", nargs="?", type=Path)
    args = parser.parse_args()
    folder = RunFolder(args.run)
    path = args.picture or folder.path / "saliency.png"
    try:
        config = parse_saved(folder.read_config())
        if path.suffix != ".png":
            raise UserError(f"{path}: must end in .png; a .pdf is written beside it")
        check_writable(path, str(path))
        from reproduction.reporting.saliency_maps import draw_saliency_maps

        entropies = draw_saliency_maps(path, config, folder.last_path)
    except UserError as error:
        parser.exit(2, f"draw_saliency.py: {error}\n")
    for name, nats in entropies.items():
        print(f"{name.replace('_', ' ')}: entropy {nats:.3f} nats")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
