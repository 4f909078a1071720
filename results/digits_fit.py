"""Writes the images of digits_fit.yaml to data/digits-fit: ten of each digit to train, the rest."""

from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image
from sklearn.datasets import load_digits

digits = load_digits()
earlier = pd.Series(digits.target).groupby(digits.target).cumcount()  # of the same digit
for number, (ink, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
    half = "train" if earlier[number] < 10 else "test"
    path = Path(f"data/digits-fit/{half}/{digit}/{number:04}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.round(ink * 255 / 16).astype(np.uint8)).save(path)  # 16 levels of ink
