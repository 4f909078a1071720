"""Writes scikit-learn's digits as PNG files: the first ten of each to train/, the rest to test/."""

from collections import Counter
from pathlib import Path

from reproduction.errors import Parser, one_line_errors
from reproduction.files import naming

FIRST = 10  # images of each digit


@one_line_errors()
def main() -> None:
    """Writes 100 and 1,697 images, numbered in the order of the data set."""
    parser = Parser(description=__doc__)
    default = Path("data/digits-fit")
    parser.add_argument("folder", type=Path, nargs="?", default=default, help=f"default: {default}")
    folder = parser.parse_args().folder
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    seen = Counter[int]()
    for number, (ink, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        split = "train" if seen[digit] < FIRST else "test"
        seen[digit] += 1
        path = folder / split / str(digit) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        with naming(path):
            Image.fromarray(np.round(ink * 255 / 16).astype(np.uint8)).save(
                path
            )  # 16 levels of ink
    print(f"written to {folder}")


if __name__ == "__main__":
    main()
