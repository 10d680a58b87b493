# make wheel: build dist/*.whl and the source distribution.
# make demo-torch: train a small CNN with 2 parties x 2 workers on this machine, with PyTorch.
# make demo: the same with MXNet.
# make docs: build the documentation site into site/. Every link has to resolve.
# make lint: ruff, mypy, import-linter and vulture; a hook for git runs it (.pre-commit-config.yaml).
# make check: lint, and the quick tests that start no process, within a minute.   make test: everything that CI runs.
# make release: wheel, source distribution, pages and notes of the version in dist/, installed and tried in a fresh environment.

VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# PyTorch's own environment: MXNet wants an old numpy.
TORCH_VENV := .venv-torch
TORCH_BIN := $(TORCH_VENV)/bin
# That of the frameworks around PyTorch, which are large.
FRAMEWORKS_VENV := .venv-frameworks
FRAMEWORKS_BIN := $(FRAMEWORKS_VENV)/bin
# That of the documentation site, which only reads our sources.
DOCS_VENV := .venv-docs
DOCS_BIN := $(DOCS_VENV)/bin
# The version is exact so that pip finds a build for CPUs where only those are offered; PyPI's is for CUDA.
TORCH := torch==2.13.0
INSTALL = -m pip install --quiet --disable-pip-version-check
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

# $(call TRAIN,bin,framework): fetches the data and trains, and prints the command.
TRAIN = start=$$($(STAMP)); $(1)/geomx data fetch fashion-mnist || exit $$?; \
 echo "data in place in $$(( $$($(STAMP)) - start )) s"; \
 train="launch --local --framework $(2) --algo hfa --k1 20 --k2 10"; echo "geomx $$train"; \
 start=$$($(STAMP)); $(1)/geomx $$train || exit $$?; \
 echo "trained with $(2) in $$(( $$($(STAMP)) - start )) s: geomx $$train"

.PHONY: demo demo-torch docs lint check test wheel release clean

demo: $(VENV)/.demo
	@$(call TRAIN,$(BIN),mxnet)
	@printf '%s\n' "next:" \
	 "  . $(BIN)/activate          from now on geomx is a command of this shell" \
	 "  geomx launch --help           more parties, other algorithms, slow links, a script of your own" \
	 "  geomx init                    for training on several machines"

demo-torch: $(TORCH_VENV)/.demo
	@$(call TRAIN,$(TORCH_BIN),torch)
	@printf '%s\n' "next:" \
	 "  . $(TORCH_BIN)/activate          from now on geomx is a command of this shell" \
	 "  geomx init --template torch         a script of your own; docs/how-to/three-lines.md explains its three lines" \
	 "  geomx init --template torch-lm      a language model; or geomx launch --network gpt, the bundled one" \
	 "  geomx launch --help                 more parties, other algorithms, slow links; with --framework torch"

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(STRUCTURE)

check: lint
	$(BIN)/python -m pytest --no-processes --numprocesses 3

docs: $(DOCS_VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build --strict
	@echo "site/index.html"

test: $(VENV)/.test $(TORCH_VENV)/.test $(FRAMEWORKS_VENV)/.test docs
	tests/tools.sh
	$(MAKE) --no-print-directory lint
	@echo "$(BIN)/python -m pytest, and beside it those of tests/pytorch and tests/frameworks"; \
	 { $(TORCH_BIN)/python -m pytest --numprocesses 2 tests/pytorch; torch=$$?; \
	   $(FRAMEWORKS_BIN)/python -m pytest --numprocesses 2 tests/frameworks && exit $$torch; \
	 } >$(TORCH_VENV)/tests.txt 2>&1 & beside=$$!; \
	 trap 'kill $$beside' INT TERM; \
	 $(BIN)/python -m pytest; main=$$?; \
	 wait $$beside; beside=$$?; cat $(TORCH_VENV)/tests.txt; \
	 exit $$((main || beside))

wheel: $(VENV)/.test
	$(BIN)/python -m build --outdir dist .

release: $(VENV)/.test
	deploy/release.sh $(BIN)/python

$(VENV)/bin/python:
	@start=$$($(STAMP)); $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; \
	 echo "made $(VENV) in $$(( $$($(STAMP)) - start )) s"

$(VENV)/.demo: setup.cfg | $(VENV)/bin/python
	@start=$$($(STAMP)); echo "installing geomx and MXNet into $(VENV)"; \
	 $(BIN)/python $(INSTALL) $(EDITABLE) '.[mxnet]' || exit $$?; \
	 echo "installed in $$(( $$($(STAMP)) - start )) s"
	@touch $@

$(VENV)/.test: setup.cfg Makefile | $(VENV)/bin/python
	$(BIN)/python $(INSTALL) $(EDITABLE) '.[test]'
	$(BIN)/python $(INSTALL) --no-deps $(AXE)
	@touch $@ $(VENV)/.demo

$(TORCH_VENV)/bin/python:
	@start=$$($(STAMP)); $(PYTHON) -m venv $(TORCH_VENV) || { rm -rf $(TORCH_VENV); exit 1; }; \
	 echo "made $(TORCH_VENV) in $$(( $$($(STAMP)) - start )) s"

$(TORCH_VENV)/.torch: Makefile | $(TORCH_VENV)/bin/python
	@start=$$($(STAMP)); echo "installing $(TORCH) into $(TORCH_VENV)"; \
	 $(TORCH_BIN)/python $(INSTALL) $(TORCH) || exit $$?; \
	 echo "installed in $$(( $$($(STAMP)) - start )) s"
	@touch $@

$(TORCH_VENV)/.demo: setup.cfg $(TORCH_VENV)/.torch
	@start=$$($(STAMP)); echo "installing geomx into $(TORCH_VENV)"; \
	 $(TORCH_BIN)/python $(INSTALL) $(EDITABLE) '.[torch]' || exit $$?; \
	 echo "installed in $$(( $$($(STAMP)) - start )) s"
	@touch $@

$(TORCH_VENV)/.test: setup.cfg $(TORCH_VENV)/.torch
	$(TORCH_BIN)/python $(INSTALL) $(EDITABLE) '.[test-torch]'
	@touch $@ $(TORCH_VENV)/.demo

$(FRAMEWORKS_VENV)/.test: setup.cfg Makefile
	@start=$$($(STAMP)); echo "installing $(TORCH) and frameworks around it into $(FRAMEWORKS_VENV)"; \
	 test -x $(FRAMEWORKS_BIN)/python || $(PYTHON) -m venv $(FRAMEWORKS_VENV) || exit $$?; \
	 $(FRAMEWORKS_BIN)/python $(INSTALL) $(TORCH) || exit $$?; \
	 $(FRAMEWORKS_BIN)/python $(INSTALL) $(EDITABLE) '.[test-frameworks]' || exit $$?; \
	 echo "installed in $$(( $$($(STAMP)) - start )) s"
	@touch $@

$(DOCS_VENV)/.docs: docs/requirements.txt
	test -x $(DOCS_BIN)/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_BIN)/python $(INSTALL) --requirement docs/requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) $(TORCH_VENV) $(FRAMEWORKS_VENV) $(DOCS_VENV) build dist site *.egg-info
