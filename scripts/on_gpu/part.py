"""Runs one part in this process: scripts.on_gpu.part FUNCTION DEVICE FILE.json ENDS [JOBS]."""

import sys
from importlib import import_module
from pathlib import Path

import torch

from scripts.on_gpu.sheet import Sheet


def main() -> None:
    path_of_function, device, path, ends, *jobs = sys.argv[1:]
    sheet = Sheet(Path(path), torch.device(device), float(ends))
    module, _, function = path_of_function.partition(".")
    getattr(import_module(f"scripts.on_gpu.{module}"), function)(sheet, *map(int, jobs))


if __name__ == "__main__":
    main()
