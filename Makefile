# make demo and make test each work as the first command on a fresh clone.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: site demo test test-wide test-all test-oldest lint format types clean

demo: $(READY)
	$(BIN)/tntprune demo --out demo

# The documentation, in site/.
site: $(READY)
	$(BIN)/mkdocs build --strict

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
	rm -rf .venv .venv-oldest site build dist demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '.[dev]'
	touch $@

# The oldest versions that pyproject.toml claims, on the oldest Python.
OLDEST := torch==2.10.0 timm==1.0.27 numpy==1.26.4 pillow==11.0.0 safetensors==0.5.0 tqdm==4.66.0 tyro==1.0.0 \
	filelock==3.20.1 jinja2==3.1.0
OLDEST_PYTHON ?= python3.10

test-oldest:
	test -x .venv-oldest/bin/python || $(OLDEST_PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --disable-pip-version-check --quiet $(OLDEST) fvcore hypothesis pytest scikit-learn --editable .
	.venv-oldest/bin/python -m pytest -m 'not wide and not slow' --ignore-glob '*hf*' \
		tests/ops tests/methods tests/backbones
