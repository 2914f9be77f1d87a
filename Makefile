# Two commands on a fresh machine: `make demo` and `make test`. Both install what they need.
# make check     style and types         make gpu-check  on a machine with NVIDIA GPUs
# make env       environment only        make wheel      build the distribution
SHELL := /bin/bash
VENV ?= .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: env demo check test gpu-check wheel clean
.DELETE_ON_ERROR:

env: $(READY)

$(READY): pyproject.toml constraints.txt scripts/setup.sh scripts/debian-packages.txt
	scripts/setup.sh $(VENV)

demo: env
	scripts/demo.sh $(VENV)

check: env
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

test: check
	$(PYTHON) -m pytest

gpu-check: env
	scripts/gpu_check.sh $(VENV)

wheel: env
	$(PYTHON) -m build --wheel --no-isolation

clean:
	rm -rf $(VENV) .cache build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
