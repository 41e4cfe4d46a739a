# `make train` and `make test` set everything up on a machine with only python3 and make.
#
#   make setup      install into .venv (instant when nothing changed)
#   make train      the main job, on 8 simulated devices
#   make test       lint, types and the suite
#   make test-all   also what is too long for every day
#   make browser    install Debian's chromium, if no browser is there for the tests of reports
#   make docs       build the documentation into site/
#   make benchmarks measure what can be measured without an accelerator
#
# PYTHON=/path/to/python picks another interpreter; it gets an environment of its own.

SHELL := /bin/bash
PYTHON ?= python3
ifeq ($(origin PYTHON), file)
VENV := .venv
else
VENV := .venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
endif
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BROWSER := $(VENV)/.browser
EXTRAS := dev,docs,hf,images,parquet,tensorboard

.PHONY: setup train test test-all lint types suite browser docs benchmarks format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11; write PYTHON=/path/to/python3.11"; exit 2; }
	@echo "installing into $(VENV) (about two minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

train: setup
	@$(BIN)/meshwright train simulate=8 mesh.fsdp=4 mesh.tensor=2

test: lint types suite

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup
	@$(BIN)/basedpyright --pythonpath $(BIN)/python

suite: setup browser
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "not full"

test-all: lint types browser
	@$(BIN)/python -m pytest -n 2 --dist loadfile

# The report page is tried in a real browser; where Debian's cannot be installed, that is skipped.
browser: setup $(BROWSER)

$(BROWSER):
	@command -v chromium chromium-browser google-chrome >/dev/null || { \
	  echo "installing Debian's chromium for the tests of the report page"; \
	  root=$$([ "$$(id -u)" = 0 ] || echo "sudo -n"); \
	  { timeout 240 $$root apt-get install -y -qq --no-install-recommends chromium || \
	    { timeout 120 $$root apt-get update -qq && \
	      timeout 240 $$root apt-get install -y -qq --no-install-recommends chromium; }; } \
	  </dev/null >$(VENV)/browser.log 2>&1 || \
	  echo "it could not be installed (see $(VENV)/browser.log); those tests are skipped"; }
	@touch $@

docs: setup
	@$(BIN)/mkdocs build --strict --quiet

benchmarks: setup
	@$(BIN)/python benchmarks/host_overhead.py
	@$(BIN)/python benchmarks/memory_depth.py
	@$(BIN)/python benchmarks/compile_time.py
	@$(BIN)/python benchmarks/data_pipeline.py
	@$(BIN)/python benchmarks/trainer_overhead.py
	@$(BIN)/python benchmarks/pipeline.py
	@$(BIN)/python benchmarks/page.py

format: setup
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .

clean:
	rm -rf .venv .venv-* site .pytest_cache .ruff_cache
