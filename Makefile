# `make demo` and `make test` set everything up by themselves, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ENGINES := $(VENV)/.engines
# Many processes of the tests import torch: without bytecode each would compile it.
export PYTHONDONTWRITEBYTECODE :=
# More arguments for pip, such as an index of CPU builds of torch.
PIP_ARGS ?=
DATA ?=

.PHONY: help setup demo docs test test-full tests-fast tests-full coverage lint fuzz format lost-ranks lowest bench test-gpu bench-gpu clean

help:
	@echo "make demo            from a generated click log to a trained model; a few minutes"
	@echo "make demo DATA=path  the same on a log of your own"
	@echo "make test            lint, types, layers and the fast tests; two to five minutes on two quiet cores"
	@echo "make test-full       the same with all tests, as in CI; up to 45 minutes"
	@echo "make coverage        all tests once more, with the lines that they run counted"
	@echo "make docs            the pages of docs/ as a site, in site/index.html; links are checked"
	@echo "make setup           build .venv; .venv/bin/placer is the command"
	@echo "make bench           benchmarks of this machine, into benchmarks/results/; an hour"
	@echo "make test-gpu        the executor's tests on this machine's GPU"
	@echo "make bench-gpu       the executor on this machine's GPU; eight minutes"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("placer needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
# Python compiles what is imported, a quarter of all: pip would compile everything, on one core.
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e '.[dev]'
# By itself it asks for FBGEMM's CUDA build; the extra above has what it imports.
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt $(PIP_ARGS) --no-deps torchrec
	@touch $@

# Spark, Dask, Ray and what else takes long to install and only some slow tests read logs with.
$(ENGINES): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e '.[engines]'
	@touch $@

demo: setup
	$(BIN)/placer demo $(if $(DATA),--data $(DATA))

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "site/index.html is written"

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# OpenBLAS has kernels for each kind of processor, which round differently: recorded plans are of one.
BLAS := $(if $(filter x86_64,$(shell uname -m)),OPENBLAS_CORETYPE=Haswell)
PYTEST := OMP_NUM_THREADS=1 $(BLAS) $(BIN)/pytest -n 2 --dist worksteal

# Types are checked on one core, so that it takes less time beside the tests than before them.
test: setup
	$(MAKE) --no-print-directory -j 2 lint tests-fast

test-full: $(ENGINES)
	$(MAKE) --no-print-directory -j 2 lint tests-full

# What docs/testing.md says of them: a few cases of every matrix, a few examples of hypothesis.
tests-fast: setup
	$(PYTEST) -m "not slow and not real" --hypothesis-profile fast

tests-full: $(ENGINES)
	$(PYTEST)

# Tracing every line makes the tests slower: for whoever changes them, not for every change.
coverage: setup
	$(PYTEST) --cov --cov-report=term:skip-covered --cov-fail-under=90

# Changed files of every format, for an hour; those that are not handled go to tests/fuzz/corpus.
fuzz: setup
	$(BIN)/python tests/fuzz/fuzz_run.py --seconds $(or $(SECONDS),3600)

# Two ranks, one of which is killed, stopped or ends at each phase of a step and of a checkpoint.
lost-ranks: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/ranks/lost_ranks_run.py

# Planning with the lowest versions that pyproject.toml allows, and kernels compiled by the lowest
# Triton; it needs an index of packages.
lowest: setup
	$(PYTHON) tests/lowest_run.py
	$(BIN)/pip install --quiet --upgrade --no-deps --target $(VENV)/.triton 'triton==3.2.*'
	PYTHONPATH=$(VENV)/.triton $(BIN)/python tests/executor/compile_for_hopper.py --all > /dev/null

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[fbgemm]'
	$(BIN)/python benchmarks/published.py
	$(BIN)/python benchmarks/profiling.py
	$(BIN)/python benchmarks/cpu.py

# The executor's tests with kernels that are compiled, on a machine with a GPU.
test-gpu: setup
	TRITON_INTERPRET=0 $(PYTEST) tests/executor/test_executor_triton.py \
		tests/executor/test_executor_tiered.py tests/executor/test_executor_tiers.py \
		tests/executor/test_executor_bags.py tests/test_topology_detect.py

bench-gpu: setup
	$(BIN)/python benchmarks/gpu.py

clean:
	rm -rf $(VENV) demo site .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
