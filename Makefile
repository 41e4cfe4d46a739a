# Only python3 and make are needed; the targets install the rest into .venv.
#
#   make setup      install into .venv (instant if nothing changed)
#   make train      train a small GPT on 8 virtual devices
#   make quick      lint and the fast tests: under 90 seconds on two cores
#   make test       lint, type checks and tests: under 10 minutes on two cores
#   make test-all   the same, including the slow tests
#   make durations  write what each test of make test takes to tests/durations.txt
#   make test-faults processes that are killed, stopped, slow or preempted; needs make slurm
#   make format     apply ruff's fixes and formatting
#   make browser    install Debian's chromium, which the report page tests need
#   make slurm      install Debian's SLURM, which the fault tests need
#   make docs       build the documentation into site/
#   make benchmarks run the benchmarks that need no accelerator
#   make soak       disturb a training for five minutes, and compare it with an undisturbed one
#   make peer-benchmarks compare with PyTorch DDP on this machine's cores
#   make gpu-benchmarks run those that need a GPU
#   make compiler-benchmarks run those that need the compiler for GPUs only, and install it
#   make clean      remove virtual environments, caches and the built site
#
# PYTHON=/path/to/python selects another interpreter, which gets its own environment.

SHELL := /bin/bash
# Tests start hundreds of processes, which need not compile the source anew.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
ifeq ($(origin PYTHON), file)
VENV := .venv
else
VENV := .venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
endif
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := dev,docs,hf,images,parquet,tensorboard
# How many workers: -n 3 may be faster where tests wait for processes.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile
EVERYDAY := "not full and not faults"

.PHONY: setup train quick test test-all lint types suite durations test-faults browser slurm docs benchmarks soak peer-benchmarks gpu-benchmarks compiler-benchmarks format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11; pass PYTHON=/path/to/python3.11"; exit 2; }
	@echo "installing into $(VENV) (about two minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@
	@echo "installed; to type meshwright without a path: source $(BIN)/activate"

train: setup
	@$(BIN)/meshwright train simulate=8 mesh.fsdp=4 mesh.tensor=2

quick: lint
	@$(PYTEST) -m "quick and not full and not faults"

# Types are checked beside the tests: many of those wait for processes.
test: lint
	@$(MAKE) --no-print-directory -j 2 types suite

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

# A large young generation spares V8 a tenth of the time, in which it would copy what lives long.
types: setup
	@NODE_OPTIONS=--max-semi-space-size=256 $(BIN)/basedpyright --pythonpath $(BIN)/python

suite: setup
	@$(PYTEST) -m $(EVERYDAY)

# What the tests of `make test` take, longest first.
durations: setup
	@set -o pipefail; $(PYTEST) -m $(EVERYDAY) --durations=0 --durations-min=0.1 | \
	  tee >(sed -nE '/^[0-9.]+s (setup|call|teardown) /p' > tests/durations.txt)

# The slow tests also use the real PyTorch and Hugging Face datasets, and run programs that are
# compiled as for users, which takes longer.
test-all: lint types
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e '.[$(EXTRAS),test-all]'
	@XLA_FLAGS= $(PYTEST) -m "not faults"

# Processes that are killed, stopped or preempted, also in jobs of a real SLURM.
test-faults: setup
	@timeout -s INT 1200 $(PYTEST) --no-loadscope-reorder \
		--durations=15 -m faults tests/faults/test_killed_saves.py tests

# The report page tests run in a real browser. Without one they are skipped, and the summary says
# so. This target and `slurm` need root.
browser: setup
	@command -v chromium chromium-browser google-chrome google-chrome-stable >/dev/null || { \
	  echo "installing Debian's chromium for the report page tests"; \
	  root=$$([ "$$(id -u)" = 0 ] || echo "sudo -n"); \
	  { timeout 240 $$root apt-get install -y -qq --no-install-recommends chromium || \
	    { timeout 120 $$root apt-get update -qq && \
	      timeout 240 $$root apt-get install -y -qq --no-install-recommends chromium; }; } \
	  </dev/null >$(VENV)/browser.log 2>&1 || \
	  echo "chromium could not be installed (see $(VENV)/browser.log); those tests will be skipped"; }

# The fault tests submit jobs to a real SLURM, which they start themselves; without it they fail.
slurm:
	@command -v slurmctld >/dev/null && command -v munged >/dev/null || { \
	  echo "installing Debian's slurm-wlm and munge for the fault tests"; \
	  root=$$([ "$$(id -u)" = 0 ] || echo "sudo -n"); \
	  timeout 240 $$root apt-get install -y -qq --no-install-recommends slurm-wlm munge || \
	    { timeout 120 $$root apt-get update -qq && \
	      timeout 240 $$root apt-get install -y -qq --no-install-recommends slurm-wlm munge; }; } \
	  </dev/null

docs: setup
	@$(BIN)/mkdocs build --strict --quiet

benchmarks: setup
	@$(BIN)/python benchmarks/host_overhead.py
	@$(BIN)/python benchmarks/memory_depth.py
	@$(BIN)/python benchmarks/compile_time.py
	@$(BIN)/python benchmarks/data_pipeline.py
	@$(BIN)/python benchmarks/data_scale.py --gib 4
	@$(BIN)/python benchmarks/trainer_overhead.py
	@$(BIN)/python benchmarks/checkpoint_checksums.py
	@$(BIN)/python benchmarks/pipeline.py
	@$(BIN)/python benchmarks/verify_time.py
	@$(BIN)/python benchmarks/plan_search.py
	@$(BIN)/python benchmarks/step_guard.py
	@$(BIN)/python benchmarks/planner_accuracy.py
	@$(BIN)/python benchmarks/published_throughputs.py
	@$(BIN)/python benchmarks/page.py

soak: setup
	@$(BIN)/python benchmarks/soak.py
	@$(BIN)/python benchmarks/page.py

# Needs two cores, and an interpreter that has PyTorch: make peer-benchmarks TORCH_PYTHON=PATH
TORCH_PYTHON ?= $(BIN)/python
peer-benchmarks: setup
	@$(BIN)/python benchmarks/ddp_scaling.py --torch-python $(TORCH_PYTHON)
	@$(BIN)/python benchmarks/page.py

# Needs a GPU, and PyTorch with transformers to compare with.
gpu-benchmarks: setup
	@$(BIN)/python benchmarks/gpu_peers.py \
	  --only gpt2,gpt2_dropout,gpt2_medium,gemma3_1b,llama3_1b,vit_b,resnet50
	@$(BIN)/python benchmarks/gpu_peers.py --only gemma3_1b --sides meshwright,plain_jax
	@$(BIN)/python benchmarks/gpu_user_models.py
	@$(BIN)/python benchmarks/gpu_plain_loop.py
	@$(BIN)/python benchmarks/gpu_lora.py
	@$(BIN)/python benchmarks/gpu_losses.py
	@$(BIN)/python benchmarks/gpu_start.py
	@$(BIN)/python benchmarks/gpu_trainer_overhead.py
	@$(BIN)/python benchmarks/gpu_largest.py
	@$(BIN)/python benchmarks/gpu_pipeline.py
	@$(BIN)/python benchmarks/gpu_reductions.py
	@$(BIN)/python benchmarks/gpu_planner.py
	@$(BIN)/python benchmarks/gpu_sustained.py
	@$(BIN)/python benchmarks/gpu_choice.py
	@$(BIN)/python benchmarks/gpu_generate.py
	@$(BIN)/python benchmarks/gpu_grpo.py
	@$(BIN)/python benchmarks/gpu_scores.py
	@$(BIN)/python benchmarks/gpu_context_attention.py
	@$(BIN)/python benchmarks/gpu_context_attention.py --steps
	@$(BIN)/python benchmarks/gpu_longest.py --side meshwright
	@$(BIN)/python benchmarks/gpu_longest.py --side transformers
	@$(BIN)/python benchmarks/page.py

compiler-benchmarks: setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e '.[$(EXTRAS),cuda12]'
	@$(BIN)/python benchmarks/gpu_overlap.py
	@$(BIN)/python benchmarks/gpu_memory.py
	@$(BIN)/python benchmarks/gpu_unseen.py
	@$(BIN)/python benchmarks/gpu_longest.py --side compiled
	@$(BIN)/python benchmarks/page.py

format: setup
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .

clean:
	rm -rf .venv .venv-* site .pytest_cache .ruff_cache
