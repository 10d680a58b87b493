# make wheel: build dist/*.whl and the source distribution.
# make demo: train a small CNN with 2 parties x 2 workers on this machine.
# make check: ruff, mypy, import-linter, vulture and all tests that start no process, within a minute.   make test: everything that CI runs.

VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP = date +%s
# Brings axe-core, which checks the dashboard's accessibility; of its dependencies nothing is used.
AXE := axe-playwright-python==0.1.8
# A plain path: setuptools' own way runs a finder in every Python process.
EDITABLE := --config-settings editable_mode=compat --editable
# The way that imports run (setup.cfg), and what nothing uses.
STRUCTURE = $(BIN)/lint-imports --no-cache --no-logo && $(BIN)/vulture --min-confidence 60 $(PYTHON_CODE)
PYTHON_CODE := geomx_cli tests benchmarks templates
# Where Python may not keep compiled modules, each of a job's processes compiles all of ours anew and starts half as fast.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test wheel clean

demo: $(VENV)/.demo
	@start=$$($(STAMP)); $(BIN)/geomx data fetch fashion-mnist || exit $$?; \
	 echo "data in place in $$(( $$($(STAMP)) - start )) s"
	@start=$$($(STAMP)); $(BIN)/geomx launch --local --algo hfa --k1 20 --k2 10 || exit $$?; \
	 echo "trained in $$(( $$($(STAMP)) - start )) s"
	@printf '%s\n' "next:" \
	 "  . $(BIN)/activate          from now on geomx is a command of this shell" \
	 "  geomx launch --help           more parties, other algorithms, slow links, a script of your own" \
	 "  geomx init                    for training on several machines"

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(STRUCTURE)
	$(BIN)/python -m pytest --no-processes

test: $(VENV)/.test
	tests/tools.sh
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(STRUCTURE)
	$(BIN)/python -m pytest

wheel: $(VENV)/.test
	$(BIN)/python -m build --outdir dist .

$(VENV)/bin/python:
	@start=$$($(STAMP)); $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; \
	 echo "made $(VENV) in $$(( $$($(STAMP)) - start )) s"

$(VENV)/.demo: setup.cfg | $(VENV)/bin/python
	@start=$$($(STAMP)); echo "installing geomx and MXNet into $(VENV)"; \
	 $(BIN)/python -m pip install --quiet --disable-pip-version-check $(EDITABLE) '.[mxnet]' || exit $$?; \
	 echo "installed in $$(( $$($(STAMP)) - start )) s"
	@touch $@

$(VENV)/.test: setup.cfg Makefile | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(EDITABLE) '.[test]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(AXE)
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build dist *.egg-info
