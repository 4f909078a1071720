"""What training costs on the machine at hand: `python -m scripts.benchmark`."""
