"""What a machine with a GPU has to show, in one command: `python -m scripts.check_gpu`."""
