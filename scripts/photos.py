"""Crops of three photographs of scikit-learn and matplotlib, for README's picture.

    python train.py name=photos dataset=custom dataset.source=scripts.photos:crops \\
      model.image_size=128 model.conv_layers=null model.patch_size=16 \\
      'augmentation=[htm]' augmentation.htm.rho=0.01

The picture is outputs/photos/mixed_pairs.png, reduced to 1,200 pixels in width and 256 colours.
"""

from pathlib import Path

import numpy as np
from PIL import Image

Crops = list[tuple[Image.Image, str]]


def crops(size: int = 128, train: int = 64, held_out: int = 16) -> tuple[Crops, Crops]:
    """Returns training and held-out crops, at places and scales around each subject."""
    import matplotlib
    import sklearn.datasets

    theirs = Path(str(sklearn.datasets.__file__)).parent / "images"
    portrait = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    halves: tuple[Crops, Crops] = ([], [])
    rng = np.random.default_rng(0)
    for name, path, middle in (  # column and row of the subject
        ("temple", theirs / "china.jpg", (205, 205)),
        ("flower", theirs / "flower.jpg", (310, 215)),
        ("portrait", portrait, (255, 205)),
    ):
        with Image.open(path) as photo:
            for number in range(train + held_out):
                side = rng.uniform(220, 320)
                left, top = np.array(middle) + rng.uniform(-40, 40, 2) - side / 2
                left, top = max(0, left), min(max(0, top), photo.height - side)
                crop = photo.resize((size, size), box=(left, top, left + side, top + side))
                halves[number >= train].append((crop, name))
    return halves
