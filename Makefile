# make train, make test: each sets up what it needs in .venv the first time. make help lists the rest.

PYTHON ?= python3
WORKERS ?= 2
MODEL ?=
ARGS ?=
PYTEST_ARGS ?=
NOX_ARGS ?=
SESSIONS := test-torch test-torch-oldest test-system test-frameworks test-newest test-lowest test-jax docs

VENV := .venv
BIN := $(VENV)/bin
KEYS := .muster

# CuPy and NCCL come with the CUDA release that the driver can run: 580 and later run CUDA 13.
DRIVER := $(shell sed -n 's/^NVRM.*  *\([0-9][0-9]*\)\.[0-9][0-9.]* .*/\1/p' /proc/driver/nvidia/version 2>/dev/null)
CUDA := $(shell [ -z "$(DRIVER)" ] || { [ "$(DRIVER)" -ge 580 ] && echo cuda13 || echo cuda12; })
comma := ,
GPU_EXTRA := $(if $(CUDA),$(comma)$(CUDA))
export CUDA

TRAIN_READY := $(VENV)/.ready-train$(CUDA)
DEV_READY := $(VENV)/.ready-dev$(CUDA)

.DEFAULT_GOAL := help
.PHONY: help train test lint format proto clean $(SESSIONS)

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' $(MAKEFILE_LIST) | expand -t 24
	@echo
	@echo "make train takes WORKERS=4, MODEL=NAME and ARGS='--epochs 3'; all take PYTHON=python3.12;"
	@echo "make test-torch takes TORCH='torch==2.13.0' or whatever pip is to install as torch,"
	@echo "all tests PYTEST_ARGS='-x -k word'; those in .nox also NOX_ARGS=--install-only."

train: $(TRAIN_READY) ## Train on this machine: a scheduler and WORKERS=2 workers
	@$(BIN)/python -m muster train -n $(WORKERS) $(if $(MODEL),--model $(MODEL)) $(ARGS)

test: $(DEV_READY) ## Run the tests, and check style and import rules
	@$(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadfile $(PYTEST_ARGS)

# In environments of their own, so that make test runs the same with and without them: sessions of noxfile.py.
test-torch: ## Run the tests that need torch, on the CPU where there is no GPU
test-torch-oldest: ## Run a short set of them on the oldest torch that Muster takes
test-system: ## Run what takes minutes: types, floods, blame, a soak
test-frameworks: ## Run the frameworks on top of torch
test-newest: ## Run the pure unit tests on the newest Python found, if it is newer than PYTHON
test-lowest: ## Run the pure unit tests and a launch with the lowest versions of what Muster needs
test-jax: ## Run JAX's own jax.distributed, where there is a Python 3.12 or later
docs: ## Build the documentation site in build/docs; warnings are errors

$(SESSIONS): $(DEV_READY)
	@$(BIN)/python -m nox -s $@ $(NOX_ARGS) -- $(PYTEST_ARGS)

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
	@rm -rf $(VENV) .nox $(KEYS) device muster-runs checkpoints build dist *.egg-info
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

$(DEV_READY): pyproject.toml | $(VENV)/bin/python
	@echo "Installing what the tests need (once; a minute or two)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[dev$(GPU_EXTRA)]'
	@touch $@ $(TRAIN_READY)
