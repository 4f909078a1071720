# All targets run in .venv, which is created on first use. `make help` lists them.
BIN := .venv/bin

# glibc asks for huge pages: faster steps on some CPUs (docs/performance.md, "Memory on a CPU"). Others ignore it.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

REPRODUCED := $(patsubst %,reproduce-%,table1 table2 table3 table4 table5 figure3 figure4 openmixup all)
SWEEPS := sweep-tau sweep-rho sweep-kappa

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev quickstart test test-all test-lowest test-plugins test-slurm lint format lock audit report clean status runs \
  $(REPRODUCED) $(SWEEPS) study publish bench check-gpu chaos

##@ Using

help:  ## list all targets
	@awk -F ':.*## *' '/^##@/ {print "\n" substr($$0, 5)} /^[a-z0-9-]+:.*##/ {printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo 'Variables of tables, figures and sweeps (see $(BIN)/python -m scripts.reproduce --help):'
	@echo '  SEEDS=3 SCALE=full|smoke SET="key=value ..." DATA=folder DEVICES=1 OUTPUTS=outputs JOBS=1 LAUNCHER=basic DRY_RUN=1'

# The newest Python that runs. Finding a name on PATH is not enough, since it may be a broken shim.
PYTHON ?= $(shell for v in 3.13 3.12 3.11; do python$$v -c "import venv" 2>/dev/null && echo python$$v && break; done)
INTERPRETER = $(or $(PYTHON),$(error Python 3.13, 3.12 or 3.11 not found: install one, or set PYTHON=path))

setup: .venv/installed  ## create .venv with the requirements and this package

# Installs the tested versions by hash. ANTLR's runtime has no wheel, so the locked setuptools builds it.
# pip shows its progress on a terminal alone.
INSTALL = test -t 1 || quiet=--quiet; $(BIN)/pip install $$quiet
INSTALL_LOCKED = $(INSTALL) --require-hashes --only-binary :all: --no-binary antlr4-python3-runtime --requirement
INSTALL_PROJECT = install --quiet --no-deps --no-build-isolation --editable .

.venv/installed: requirements.lock pyproject.toml
	@echo 'Installing PyTorch with CUDA and the other packages into .venv: about 6 GB, some minutes'
	$(INTERPRETER) -m venv .venv
	sed -n '/^setuptools==/,/[^\\]$$/p' requirements.lock > .venv/builder.lock
	$(INSTALL_LOCKED) .venv/builder.lock
	$(INSTALL_LOCKED) requirements.lock --no-build-isolation
	$(BIN)/pip $(INSTALL_PROJECT)
	touch $@

.venv/installed-dev: requirements-dev.lock .venv/installed
	$(INSTALL_LOCKED) requirements-dev.lock --no-build-isolation
	touch $@

quickstart: .venv/installed  ## train and evaluate with HTM and VTM on real handwritten digits, in a few minutes
	$(BIN)/python train.py name=quickstart resume=auto

runs: .venv/installed  ## show all runs in OUTPUTS: what differs, accuracy, mixing, status; RUNS="folder ..." AGAINST=key=value
	$(BIN)/python -m scripts.runs $(or $(RUNS),$(if $(OUTPUTS),"$(OUTPUTS)")) $(if $(AGAINST),--against "$(AGAINST)")

bench: .venv/installed  ## measure what HTM and VTM add to a step on this machine; ROUNDS=40
	$(BIN)/python -m scripts.bench $(if $(ROUNDS),--rounds $(ROUNDS)) \
	  $(if $(OUTPUTS),--out "$(OUTPUTS)/bench.csv")

clean:  ## remove .venv and caches, keep outputs/
	rm -rf .venv .venv-tools .venv-lowest .venv-plugins .mypy_cache .pytest_cache .ruff_cache .hypothesis

##@ Reproducing

# The paper's tables and sweeps, with the variables that `make help` lists.
# SET="key=value ..." has overrides of train.py for all rows, DATA the folder with CIFAR and imagenet/.
REPRODUCE = $(if $(DATA),DATA="$(DATA)") $(BIN)/python -m scripts.reproduce
OVERRIDES = $(if $(SEEDS),seeds=$(SEEDS)) $(if $(SCALE),scale=$(SCALE)) $(if $(DEVICES),devices=$(DEVICES)) \
  $(if $(OUTPUTS),output_root="$(OUTPUTS)") $(SET) $(if $(JOBS),jobs=$(JOBS)) \
  $(if $(LAUNCHER),hydra/launcher=$(LAUNCHER)) $(if $(DRY_RUN),dry_run=$(DRY_RUN))
STUDY_figure3 := table1/cifar100_htm seeds=1
STUDY_figure4 := table1/cifar100_htm
STUDY_openmixup := results/openmixup_cifar100.yaml

reproduce-table1:  ## train Table 1: CCT-7/3x1 on CIFAR-10 and CIFAR-100
reproduce-table2:  ## train Table 2: ViT-B/16 on ImageNet-1K
reproduce-table3:  ## train Table 3: saliency detectors
reproduce-table4:  ## train Table 4: HTM without one of its parts
reproduce-table5:  ## train Table 5: comparison and combination with other mixup methods
reproduce-figure3:  ## train a run of Figure 3: saliency by gradient, full rollout, one step
reproduce-figure4:  ## train the runs of Figure 4: mixed samples per batch over training
reproduce-openmixup:  ## train DeiT-S on CIFAR-100 by OpenMixup's protocol, with HTM and VTM
reproduce-all:  ## train all tables, figures and sweeps; SCALE=smoke runs everything in minutes
$(REPRODUCED): reproduce-%: .venv/installed
	$(REPRODUCE) $(or $(STUDY_$*),$*) $(OVERRIDES)

sweep-tau:  ## train HTM with tau from 0 (mixes no sample) to inf (all samples)
sweep-rho:  ## train HTM with rho from 0 to inf (replaces no token)
sweep-kappa:  ## train VTM with kappa from 1 to all 256 tokens
$(SWEEPS): .venv/installed
	$(REPRODUCE) $@ $(OVERRIDES)

study: .venv/installed  ## train your own study; FILE=results/NAME.yaml
	$(REPRODUCE) "$(or $(FILE),$(error FILE=: must be the file of a study, as in results/))" $(OVERRIDES)

status: .venv/installed  ## show the progress of the paper's runs; FILE=results/NAME.yaml shows your study
	$(REPRODUCE) $(or $(FILE),all) $(OVERRIDES) dry_run=1

report: .venv/installed  ## write the paper's tables from the runs that are there; FILE=results/NAME.yaml writes your study's
	$(REPRODUCE) $(or $(FILE),all) --no-train $(OVERRIDES)

publish: .venv/installed  ## add the line of a finished run to its study's; RUN=outputs/NAME FILE=results/NAME.yaml
	$(BIN)/python -m scripts.publish "$(or $(RUN),$(error RUN=: must be the folder of a finished run))" \
	  "$(or $(FILE),$(error FILE=: must be the file of its study, in results/))"

##@ Developing

setup-dev: .venv/installed-dev  ## also install what tests and lint need

# uv and pip-audit work only on requirement files, so they have a separate environment.
.venv-tools/installed:
	$(INTERPRETER) -m venv .venv-tools
	.venv-tools/bin/pip install --quiet 'uv>=0.5,<1' 'pip-audit>=2.7,<3'
	touch $@

test: .venv/installed-dev  ## run the tests that are not marked slow, on up to 4 cores
	$(BIN)/python -m pytest

test-all: .venv/installed-dev  ## run all tests, the slow ones too
	$(BIN)/python -m pytest -m "slow or not slow"

test-lowest: .venv-tools/installed  ## run `make test` with the lowest versions that the requirements allow
	$(INTERPRETER) -m venv .venv-lowest
	.venv-tools/bin/uv pip install --quiet --python .venv-lowest --resolution lowest-direct \
	  --requirement requirements-dev.txt --editable .
	.venv-lowest/bin/python -m pytest

# Hydra's plugins lie beside the packages of .venv, in a folder of their own.
.venv-plugins/installed: requirements-plugins.txt .venv/installed-dev
	$(INTERPRETER) -m venv .venv-plugins
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' \
	  > "$$(.venv-plugins/bin/python -c 'import site; print(site.getsitepackages()[0])')/base.pth"
	.venv-plugins/bin/pip install --quiet --requirement requirements-plugins.txt
	touch $@

test-plugins: .venv-plugins/installed  ## run sweeps by Hydra's joblib and Optuna plugins
	PYTHONPATH="$(CURDIR)/src" .venv-plugins/bin/python -m pytest tests/plugins -n 0

test-slurm: .venv-plugins/installed  ## run sweeps on the SLURM cluster of this machine, as root; takes a quarter of an hour
	TEST_SLURM=1 PYTHONPATH="$(CURDIR)/src" .venv-plugins/bin/python -m pytest tests/slurm -n 0

lint: .venv/installed-dev  ## check formatting, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/installed-dev  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

COMPILE = .venv-tools/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
  --custom-compile-command "make lock" --upgrade

lock: .venv-tools/installed  ## lock the newest packages that the requirements allow, for all platforms
	$(COMPILE) requirements.txt --output-file requirements.lock
	$(COMPILE) requirements-dev.txt --constraint requirements.lock --output-file requirements-dev.lock

audit: .venv-tools/installed  ## check the locked packages for known vulnerabilities; needs a network
	.venv-tools/bin/pip-audit --strict --disable-pip --require-hashes --requirement requirements-dev.lock

# A test that hangs or crashes ends its worker, and the next one goes on.
check-gpu: .venv/installed-dev  ## check a GPU against the CPU, and the kernels for it; OUTPUTS/check-gpu.xml has the figures
	$(BIN)/python -m pytest tests/gpu tests/tokenmixup/test_kernels.py --device cuda -n 1 -m "slow or not slow" -o faulthandler_timeout=200 \
	  -o faulthandler_exit_on_timeout=true --junit-xml "$(or $(OUTPUTS),outputs)/check-gpu.xml"

chaos: .venv/installed-dev  ## kill runs and ranks many times, and compare with undisturbed ones; KILLS=10 of each run
	KILLS=$(or $(KILLS),10) $(BIN)/python -m pytest tests/reproduction/test_kills.py -m slow
