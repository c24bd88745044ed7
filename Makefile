# Two commands: `make run` serves the model inside the package (or MODEL=...), `make test` proves that everything works.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?=
DATA ?= ../shared/data

.PHONY: run install install-test lint test eval-model clean

run: install
	$(BIN)/quire serve $(MODEL)

install: $(VENV)/installed
install-test: $(VENV)/installed-test

SOURCES := pyproject.toml CMakeLists.txt $(wildcard csrc/*/*)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# Editable, so that a change in Python needs no new install; a change in csrc/ builds again.
$(VENV)/installed: $(BIN)/python $(SOURCES)
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/installed-test: $(BIN)/python $(SOURCES)
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@ $(VENV)/installed

lint: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

# Bits per byte of the shipped model on held-out stories, beside a public model's.
eval-model: install-test
	$(BIN)/python training/evaluate.py --data $(DATA) --assets src/quire/assets

clean:
	rm -rf $(VENV) build
