# make demo: train a small CNN with 2 parties x 2 workers on this machine.   make test: everything that CI runs.

VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP = date +%s

.PHONY: demo test clean

demo:
	@start=$$($(STAMP)); $(MAKE) --no-print-directory $(VENV)/.demo || exit $$?; \
	 echo "installed in $$(( $$($(STAMP)) - start )) s"; \
	 start=$$($(STAMP)); $(BIN)/geomx data fetch fashion-mnist || exit $$?; \
	 echo "data in place in $$(( $$($(STAMP)) - start )) s"; \
	 start=$$($(STAMP)); $(BIN)/geomx launch || exit $$?; \
	 echo "trained in $$(( $$($(STAMP)) - start )) s"

test: $(VENV)/.test
	tests/tools.sh
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.demo: setup.cfg | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[mxnet]'
	@touch $@

$(VENV)/.test: setup.cfg | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build *.egg-info
