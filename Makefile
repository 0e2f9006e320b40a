# `make bench` and `make test` work from nothing: they make .venv, install and run.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: bench test test-slow lint types clean

bench: $(VENV)/installed
	$(BIN)/dissensus bench --jobs 2

test: $(VENV)/installed-test
	$(BIN)/pytest -n auto --dist worksteal

test-slow: $(VENV)/installed-test
	$(BIN)/pytest -m slow

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-test
	$(BIN)/mypy

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/installed-test: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/pip install -q -c constraints.txt -e ".[test,lint]"
	touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
