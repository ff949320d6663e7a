# headrace: set up, run, test. `make run` is all that a first look needs.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup run up test faults check clean

VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= examples/terminal/run.toml
# Words of setup.sh: PYTHON, PIP_ARGS, VLLM, REQUIRE_VLLM.
export VENV PYTHON PIP_ARGS VLLM REQUIRE_VLLM

help: ## show the targets
	@grep -E '^[a-z]+:.*## ' Makefile | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

setup: ## make the virtual environment and install everything
	@bash setup.sh

run: setup ## train the example for as many steps as its configuration says
	$(BIN)/headrace up --config $(CONFIG)

up: setup ## train until stopped
	$(BIN)/headrace up --config $(CONFIG) --max-steps 0

test: setup ## run the tests
	@bash setup.sh pretrained
	$(BIN)/python -m pytest

faults: setup ## whole runs in which parts are killed or damaged
	$(BIN)/python -m pytest -m faults

check: setup ## lint, formatting, types, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

clean: ## remove the virtual environment and caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info build dist
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +
