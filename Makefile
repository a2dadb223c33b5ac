# make train, make test: each sets up what it needs in .venv the first time. make help lists the rest.

PYTHON ?= python3
WORKERS ?= 2
MODEL ?=
ARGS ?=
PYTEST_ARGS ?=
TORCH ?= torch
OLDEST_TORCH ?= torch==2.5.1
FRAMEWORKS ?= accelerate==1.15.0 transformers==5.23.0 lightning==2.6.6 deepspeed==0.19.8
JAX_PYTHON ?=

VENV := .venv
BIN := $(VENV)/bin
KEYS := .muster

# CuPy and NCCL come with the CUDA release that the driver can run: 580 and later run CUDA 13.
DRIVER := $(shell sed -n 's/^NVRM.*  *\([0-9][0-9]*\)\.[0-9][0-9.]* .*/\1/p' /proc/driver/nvidia/version 2>/dev/null)
CUDA := $(shell [ -z "$(DRIVER)" ] || { [ "$(DRIVER)" -ge 580 ] && echo cuda13 || echo cuda12; })
comma := ,
GPU_EXTRA := $(if $(CUDA),$(comma)$(CUDA))

TRAIN_READY := $(VENV)/.ready-train$(CUDA)
DEV_READY := $(VENV)/.ready-dev$(CUDA)
TORCH_READY := $(VENV)/.ready-torch$(CUDA)

.DEFAULT_GOAL := help
.PHONY: help train test test-torch run-test-torch test-torch-oldest run-test-torch-oldest test-frameworks run-test-frameworks test-jax test-system run-test-system test-newest run-test-newest docs run-docs lint format proto clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' $(MAKEFILE_LIST) | expand -t 20
	@echo
	@echo "make train takes WORKERS=4, MODEL=NAME and ARGS='--epochs 3'; all take PYTHON=python3.12;"
	@echo "make test-torch takes TORCH='torch==2.13.0' or whatever pip is to install as torch."

train: $(TRAIN_READY) ## Train on this machine: a scheduler and WORKERS=2 workers
	@$(BIN)/python -m muster train -n $(WORKERS) $(if $(MODEL),--model $(MODEL)) $(ARGS)

test: $(DEV_READY) ## Run all tests, linters and type checks
	@$(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadfile $(PYTEST_ARGS)

# In an environment of its own, so that make test runs the same with and without it.
test-torch: ## Run the tests that need torch, on the CPU where there is no GPU
	@$(MAKE) --no-print-directory VENV=.venv-torch run-test-torch

run-test-torch: $(TORCH_READY)
	@$(BIN)/python -c 'import torch; print("With torch", torch.__version__)'
	@$(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadfile $(PYTEST_ARGS) \
		tests/gpu tests/contracts tests/parallel tests/torch tests/communicators tests/programs \
		tests/examples tests/bench/training tests/bench/parallel tests/bench/test_torch_groups.py tests/end_to_end/test_readme.py

test-torch-oldest: ## Run a short set of them on the oldest torch that Muster takes
	@$(MAKE) --no-print-directory VENV=.venv-torch-oldest TORCH='$(OLDEST_TORCH)' run-test-torch-oldest

run-test-torch-oldest: $(TORCH_READY)
	@$(BIN)/python -c 'import torch; print("With torch", torch.__version__)'
	@$(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadfile $(PYTEST_ARGS) \
		tests/programs tests/torch tests/communicators

test-system: ## Run what takes minutes: floods, blame, a soak; one after the other
	@$(MAKE) --no-print-directory VENV=.venv-torch run-test-system

run-test-system: $(TORCH_READY)
	@$(BIN)/python -m pytest -q -m system $(PYTEST_ARGS) tests

# Also in an environment of its own. A Python that is too new for what the tests need is no failure.
test-newest: ## Run the pure unit tests on the newest Python found, if it is newer than PYTHON
	@for minor in 20 19 18 17 16 15 14 13 12 ""; do python3.$$minor -c "" 2>/dev/null && break; done; \
	if [ -z "$$minor" ] || ! $(PYTHON) -c "import sys; sys.exit(sys.version_info >= (3, $$minor))"; then \
		echo "No Python newer than $$($(PYTHON) -V 2>&1) is found: nothing to run."; exit 0; \
	fi; \
	[ -x .venv-newest/bin/python3.$$minor ] || rm -rf .venv-newest; \
	newest="$(MAKE) --no-print-directory VENV=.venv-newest PYTHON=python3.$$minor CUDA="; \
	$$newest .venv-newest/.ready-dev || \
		{ echo "What the tests need cannot be installed for Python 3.$$minor: nothing to run."; exit 0; }; \
	echo "With Python 3.$$minor:"; $$newest run-test-newest

run-test-newest: $(DEV_READY)
	@$(BIN)/python -m pytest -q $(PYTEST_ARGS) tests/wire tests/certs tests/scheduler/core \
		tests/scheduler/test_config.py tests/worker/test_config.py tests/worker/session/test_machine.py \
		tests/worker/session/test_progress.py tests/worker/session/test_leave.py \
		tests/worker/session/test_pace.py tests/launch/test_plan.py \
		tests/launch/test_worker_counts.py \
		tests/launch/test_parsing.py tests/launch/test_rank_table.py tests/training \
		tests/simulation

docs: ## Build the documentation site in build/docs; warnings are errors
	@$(MAKE) --no-print-directory VENV=.venv-docs CUDA= run-docs

run-docs: $(VENV)/.ready-docs
	@$(BIN)/python -m sphinx -q -E -W --keep-going -b html docs build/docs
	@echo "The site is build/docs/index.html"

test-frameworks: ## Run the frameworks on top of torch, in an environment of their own
	@$(MAKE) --no-print-directory VENV=.venv-frameworks run-test-frameworks

run-test-frameworks: $(VENV)/.ready-frameworks
	@$(BIN)/python -m pytest -q $(PYTEST_ARGS) tests/frameworks

# JAX has mutual TLS since 0.12, which needs Python 3.12. A machine without one is no failure.
test-jax: ## Run JAX's own jax.distributed, where there is a Python 3.12 or later
	@for python in $(JAX_PYTHON) python3.12 python3.13 python3.14 ""; do $$python -c "" 2>/dev/null && break; done; \
	if [ -z "$$python" ]; then \
		echo "test-jax is skipped: JAX with mutual TLS needs Python 3.12 or later (JAX_PYTHON=...)."; exit 0; \
	fi; \
	$(MAKE) --no-print-directory VENV=.venv-jax PYTHON=$$python .venv-jax/.ready-jax && \
	.venv-jax/bin/python -m pytest -q $(PYTEST_ARGS) tests/end_to_end/test_jax.py

lint: $(DEV_READY) ## Check style, types and import rules only
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(DEV_READY) ## Reformat the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

proto: $(DEV_READY) ## Generate muster/wire/v1 from proto/
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. \
		proto/muster/wire/v1/*.proto

clean: ## Remove what make and runs have written, certificates included
	@rm -rf $(VENV) .venv-torch .venv-torch-oldest .venv-newest .venv-docs .venv-frameworks .venv-jax $(KEYS) device muster-runs checkpoints build dist *.egg-info
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c '' >/dev/null 2>&1 || \
		{ echo "$(PYTHON) is not found or does not run: install Python 3.11 or later, or name one, as in make PYTHON=python3.12."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is $$($(PYTHON) -V 2>&1), but Muster needs Python 3.11 or later: make PYTHON=python3.12."; exit 1; }
	@echo "Making a virtual environment in $(VENV)/ with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv $(VENV) >$(VENV).log 2>&1 && $(VENV)/bin/python -m pip --version >>$(VENV).log 2>&1 || \
		{ cat $(VENV).log; rm -rf $(VENV) $(VENV).log; \
		echo "$(PYTHON) cannot make a virtual environment with pip: install its venv package (python3-venv on Debian)."; \
		exit 1; }
	@rm -f $(VENV).log

$(TRAIN_READY): pyproject.toml | $(VENV)/bin/python
	@echo "Installing what training needs (once; a minute or two)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[train$(GPU_EXTRA)]'
	@touch $@

$(VENV)/.ready-docs: pyproject.toml | $(VENV)/bin/python
	@echo "Installing what the site needs (once; a minute or two)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[docs]'
	@touch $@

$(DEV_READY): pyproject.toml | $(VENV)/bin/python
	@echo "Installing what the tests need (once; a minute or two)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[dev$(GPU_EXTRA)]'
	@touch $@ $(TRAIN_READY)

$(TORCH_READY): $(DEV_READY)
	@echo "Installing $(TORCH) (once; it is large)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check '$(TORCH)'
	@touch $@

$(VENV)/.ready-frameworks: $(TORCH_READY)
	@echo "Installing Accelerate, Transformers, Lightning and DeepSpeed (once)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check '$(TORCH)' $(FRAMEWORKS)
	@touch $@

$(VENV)/.ready-jax: $(DEV_READY)
	@echo "Installing JAX (once)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check 'jax>=0.12'
	@touch $@
