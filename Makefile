# keptset from a checkout. `make help` lists what there is. Nothing here needs root.
#
# PYTHON=/path/to/python3   make the environment with this interpreter
# ARGS='...'                passed on to `keptset demo`, to pytest or to the soak

PYTHON ?=
ARGS ?=

# A PYTHONPATH of the caller's could put another keptset first.
unexport PYTHONPATH

VENV := .venv
VENV_GPU := .venv-gpu
VENV_TORCH := .venv-torch

# An environment is ready for as long as what it was made from has not changed.
KEY := $(shell (echo '$(PYTHON)'; cat pyproject.toml hatch_build.py tests/oldest.txt tests/torch.txt) | cksum | cut -d' ' -f1)
READY_DEMO := $(VENV)/.ready-demo-$(KEY)
READY_TEST := $(VENV)/.ready-test-$(KEY)
READY_GPU := $(VENV_GPU)/.ready-$(KEY)
READY_TORCH := $(VENV_TORCH)/.ready-$(KEY)

.NOTPARALLEL:
.PHONY: help environments demo test test-gpu-wheel test-torch soak lint typecheck format clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s%s\n", $$1, $$2}' Makefile

demo: $(READY_DEMO)  ## set up .venv and run `keptset demo`
	$(VENV)/bin/keptset demo $(ARGS)

test: lint typecheck  ## every check and test, in .venv
	$(VENV)/bin/python -m pytest $(ARGS)

test-gpu-wheel: $(READY_GPU)  ## the tests with paddlepaddle-gpu 2.6.2 and the oldest supported packages, in .venv-gpu
	$(VENV_GPU)/bin/python -m pytest $(ARGS)

test-torch: $(READY_TORCH)  ## the trainer's half with torch and without Paddle, in .venv-torch
	$(VENV_TORCH)/bin/python -m pytest tests/trainer_bridge tests/scripts/test_bench_scoring.py $(ARGS)

environments: $(READY_TEST) $(READY_GPU) $(READY_TORCH)  ## only set up .venv, .venv-gpu and .venv-torch

soak: $(READY_TEST)  ## readers against 100,000 mutated inputs each, the spool against 200 kills, the audit in full; goes on where it was ended
	$(VENV)/bin/python tests/soak/soak.py $(ARGS)
	$(VENV)/bin/keptset bench audit-power --out docs
	$(VENV)/bin/python -m keptset.scripts.bench_audit_power_docs docs

lint: $(READY_TEST)  ## formatting and lint
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .

typecheck: $(READY_TEST)  ## types: strict for schemas and trainer_bridge
	$(VENV)/bin/mypy

format: $(READY_TEST)  ## put the code into its format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:  ## remove the environments and all caches
	rm -rf $(VENV) $(VENV_GPU) $(VENV_TORCH) .links .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY_DEMO):
	@python=$$(.ci/find-python 3.10 3.13 $(or $(PYTHON),python3 any)) && rm -f $(VENV)/.ready-* && \
	    .ci/environment $(VENV) "$$python" -e '.[cpu,demo,report]'
	@touch $@

$(READY_TEST):
	@python=$$(.ci/find-python 3.10 3.13 $(or $(PYTHON),python3 any)) && rm -f $(VENV)/.ready-* && \
	    .ci/environment $(VENV) "$$python" -e '.[cpu,demo,report,dev]'
	@touch $@ $(READY_DEMO)

# The oldest Python shows the most here; one that PYTHON names comes first if it fits.
$(READY_GPU):
	@python=$$(.ci/find-python 3.10 3.12 $(PYTHON) any) && rm -f $(VENV_GPU)/.ready-* && \
	    .ci/environment $(VENV_GPU) "$$python" -c tests/oldest.txt -e '.[gpu,demo,report,dev]'
	@touch $@

# Paddle is left out on purpose: neither framework may need the other.
$(READY_TORCH):
	@python=$$(.ci/find-python 3.10 3.13 $(or $(PYTHON),python3 any)) && rm -f $(VENV_TORCH)/.ready-* && \
	    .ci/environment $(VENV_TORCH) "$$python" -c tests/torch.txt -e '.[torch]' pytest hypothesis
	@touch $@
