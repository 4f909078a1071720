"""Runs one part in this process: scripts.on_gpu.part NAME DEVICE FILE.json ENDS [JOBS]."""

import sys
from importlib import import_module
from pathlib import Path

import torch

from scripts.on_gpu.sheet import Sheet

MODULES = {  # where each part is; their imports differ
    "assignment": "assignment.measure_assignment",
    "values": "steps.compare_values",
    "times": "steps.measure_times",
    "kernels": "steps.measure_kernels",
    "seeds": "seeds.train_seeds",
}


def main() -> None:
    name, device, path, ends, *jobs = sys.argv[1:]
    sheet = Sheet(Path(path), torch.device(device), float(ends))
    module, _, function = MODULES[name].partition(".")
    getattr(import_module(f"scripts.on_gpu.{module}"), function)(sheet, *map(int, jobs))
    sheet.finish()


if __name__ == "__main__":
    main()
