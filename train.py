"""Trains one run, or every point of a sweep: python train.py [-m] [key=value ...]."""

from reproduction.cli import run
from reproduction.jobs import check_all, main, resolve

if __name__ == "__main__":
    run("train", resolve, check_all, main)
