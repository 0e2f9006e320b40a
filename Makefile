# `make bench` and `make test` work from nothing: they make .venv, install and run.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TORCH  ?= $(shell sed -n 's/^torch==//p' constraints.txt)
# another torch: make test TORCH=2.11.0
PIP     = sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt && $(BIN)/pip install -q -c $(VENV)/constraints.txt

.PHONY: bench test test-slow test-stacks lint types docs clean

bench: $(VENV)/installed
	$(BIN)/dissensus bench --jobs 2

# One more than cores: some tests wait for other processes.
WORKERS = $(shell python3 -c "import os; print(1 + os.cpu_count())")

test: $(VENV)/installed-test
	$(BIN)/python -m compileall -q src tests  # once, and not by every worker
	$(BIN)/pytest -n $(WORKERS) --dist worksteal --assert=plain || ($(BIN)/pytest --last-failed; exit 1)  # values in the second

test-slow: $(VENV)/installed-test
	$(BIN)/pytest -m slow

# Every package must be there: what is missing would be skipped.
test-stacks: $(VENV)/installed-stacks
	$(BIN)/python -c "import transformers, peft, timm, lightning, accelerate, torchmetrics, torchvision, ray, yaml"
	$(BIN)/pytest -n auto --dist worksteal -m "" tests/stacks

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python benchmarks/weight.py --check

types: $(VENV)/installed-test
	$(BIN)/mypy

docs: $(VENV)/installed-docs
	PATH="$(abspath $(BIN)):$$PATH" NO_MKDOCS_2_WARNING=1 mkdocs build --strict   # ruff, beside it, lays out signatures

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e ".[bench]"
	touch $@

$(VENV)/installed-test: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e ".[test,lint]"
	touch $@ $(VENV)/installed

$(VENV)/installed-stacks: $(VENV)/installed-test
	$(PIP) -e ".[test,lint,stacks]"
	touch $@

# The site is made from the pages and the source alone: torch is not needed for it.
$(VENV)/installed-docs: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" > $(VENV)/docs.txt
	$(PIP) -r $(VENV)/docs.txt
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
