# Two commands: `make demo` runs the main job, `make test` runs the whole check. Each does its own set-up.
# On a machine with an NVIDIA GPU add GPU=1.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
LOCK := requirements/$(if $(GPU),cuda,cpu).lock
VENV := .venv
BIN := $(VENV)/bin
# torch comes by pip, whose settings may name its build; the many others by uv, which unpacks them side by side, from
# pip's index, or by pip where uv lacks a setting. Both compile bytecode: where Python may write none, imports take twice
# as long without.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
INDEX := $${PIP_INDEX_URL:-$$($(BIN)/pip config get global.index-url 2>/dev/null || echo https://pypi.org/simple)}
UV := UV_DEFAULT_INDEX=$(INDEX) $(BIN)/uv pip install --quiet --compile-bytecode --system-certs --python $(BIN)/python
# Named by content: changed locks install again, nothing else does.
STAMP := $(VENV)/installed-$(shell cat $(LOCK) pyproject.toml | sha256sum | cut -c1-16)

.PHONY: setup demo test lint faults dashboard docs docs-serve clean

setup: $(STAMP)

$(STAMP):
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info[:2] >= (3, 11) else "erase-rec needs Python 3.11 or newer, found " + sys.version.split()[0] + "; set PYTHON=python3.11")'
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) uv==0.13.9 $$(grep '^torch==' $(LOCK))
	$(UV) --no-deps -r $(LOCK) || $(PIP) --no-deps -r $(LOCK)
	$(PIP) --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
	touch $@

demo: setup
	$(BIN)/python train.py --config ctr_erase.yaml

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -n auto --dist worksteal

# One fault of each kind; FAULTS=50 SEED=1: so many at random, with a log in build/.
faults: setup
	$(BIN)/python benchmarks/faults.py $(if $(FAULTS),--faults $(FAULTS) --seed $(or $(SEED),1) --out build/faults)

dashboard: setup
	$(BIN)/erase-rec dashboard runs

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean:
	rm -rf $(VENV) build *.egg-info
