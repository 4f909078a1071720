# Everything runs in .venv, which is made on first use; `make help` lists the targets.
PYTHON ?= python3.11
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test lint format check-models report clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## *' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: .venv/installed  ## make .venv with the requirements and this package

.venv/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --requirement requirements.txt --editable .
	touch $@

.venv/installed-dev: requirements-dev.txt .venv/installed
	$(BIN)/pip install --quiet --requirement requirements-dev.txt
	touch $@

quickstart: .venv/installed  ## train and evaluate on real handwritten digits, HTM and VTM on: about 2 minutes
	$(BIN)/python train.py name=quickstart resume=auto

test: .venv/installed-dev  ## run all tests, on up to 4 cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

lint: .venv/installed-dev  ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/installed-dev  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check-models: .venv/installed  ## try TokenMixup on the smallest of each family of timm's that it serves
	$(BIN)/python scripts/check_models.py

report: .venv/installed  ## write the paper's tables with our results to outputs/report
	$(BIN)/python scripts/report.py

clean:  ## remove .venv and caches, keep outputs/
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
