"""What is measured on a machine with a GPU, part by part: `python -m scripts.on_gpu`."""
