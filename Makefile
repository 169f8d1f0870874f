# make demo and make test each work as the first command on a fresh clone.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-wide test-all lint format types clean

demo: $(READY)
	$(BIN)/tntprune demo --out demo

PYTEST := $(BIN)/pytest -n 2 --dist loadgroup

test: $(READY)
	$(PYTEST) -m 'not wide'

# The whole corpora of broken input, command lines and kills, of which `make test` runs a short version.
test-wide: $(READY)
	$(PYTEST) -m wide

test-all: test test-wide

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY)
	$(BIN)/mypy

clean:
	rm -rf .venv build dist demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '.[dev]'
	touch $@
