"""What training costs on the machine at hand; `scripts/benchmark.py` runs it."""
