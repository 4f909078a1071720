"""Without a GPU the kernels for one run in Triton's interpreter, which it decides when imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
