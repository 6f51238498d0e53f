# Every target sets itself up: a virtual environment in .venv, then the library in it.
# Needed on the machine: make, and Python 3.12 or newer with its venv module.

PYTHON ?= $(shell for p in python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { echo $$p; break; }; done)
# The CUDA 13 build of JAX where a GPU answers, its compiler for the tests where none does;
# EXTRAS=cuda12 for a CUDA 12 torch.
EXTRAS ?= $(shell nvidia-smi >/dev/null 2>&1 && echo cuda13 || echo compiler)
# Pinned versions; CONSTRAINTS= for the newest that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

# What a process imports is not compiled again by the next one, wherever that is switched off.
export PYTHONDONTWRITEBYTECODE :=

# Flags of bench.oneshot: make oneshot FLAGS=--quick
FLAGS ?=

.PHONY: help setup compare oneshot test test-all mutants test-gpu test-clean test-versions test-vllm durations wheel sdist docs check format clean

help:
	@echo "make compare     parity and speed of every path, one table"
	@echo "make oneshot     environment, tests, every bench and a report, within 10 minutes"
	@echo "make test        all tests, about 12 minutes on two cores (GPU tests run where there is a GPU);"
	@echo "                 PART=1/5 a fifth of them; make test-all is the same"
	@echo "make mutants     mistakes in the library that tests must catch; PART=1/10 a tenth of them"
	@echo "make test-gpu    every test that needs a GPU; PART=1/2 half of them, GPUS=2 those that need two"
	@echo "make test-clean  the package in new environments: base, jax, nnx, torch, both, hf"
	@echo "make test-versions  what other versions can break: oldest, pinned and newest; VERSIONS=pre-release"
	@echo "make test-vllm   the plugin in vLLM's CPU build: installs it beside the environment"
	@echo "make durations   all tests, and what each took, into tests/durations.json"
	@echo "make wheel       dist/*.whl with the kernels of configs/{paper,seed,smallgroup}.yaml"
	@echo "make sdist       dist/*.tar.gz, of which a wheel without kernels is built anywhere"
	@echo "make docs        the site, in build/site: pages, and an API reference from docstrings"
	@echo "make check       format, lint, types, layers, plain English"
	@echo "make format      rewrite the sources in the house format"

$(READY): pyproject.toml $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "Python 3.12 or newer is needed (set PYTHON=...)"; exit 1; }
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(RUN) -m pip install --quiet --disable-pip-version-check \
		$(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --config-settings editable_mode=compat \
		--editable ".[test,dev$(if $(EXTRAS),$(comma)$(EXTRAS))]"
	touch $(READY)

comma := ,

setup: $(READY)

compare: $(READY)
	$(RUN) -m bench.compare --framework both

oneshot: $(READY)
	$(RUN) -m bench.oneshot $(FLAGS)

# Two workers; tests of a file share what they compile (tests/durations.py).
PYTEST := $(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(READY)
	$(PYTEST) $(if $(PART),--part $(PART))

test-all: test

mutants: $(READY)
	$(RUN) -m tests.mutants $(if $(PART),--part $(PART))

durations: $(READY)
	$(PYTEST) --record-durations

# The record that it appends is committed with what was tested.
test-gpu: $(READY)
	$(RUN) -m bench.gpu_tests --save_records $(if $(PART),--part $(PART)) $(if $(GPUS),--gpus $(GPUS))

# CLEAN names the environments to try, none: all (tests/clean_environments.py).
test-clean:
	$(PYTHON) tests/clean_environments.py $(CLEAN)

# VERSIONS names environments of tests/versions.py, none: oldest, pinned and newest.
test-versions: $(READY)
	$(RUN) -m tests.versions $(VERSIONS)

# In an environment of its own, 1.5 GB: vLLM pins what it needs.
test-vllm: $(READY)
	$(RUN) tests/vllm_environment.py

# Kernels lie in the package while the wheel is made, not in the checkout.
PRESETS := kernels_pallas/runtime/presets
WHEEL_MIB := 45

wheel: $(READY)
	rm -rf $(PRESETS) build/lib dist
	trap 'rm -rf $(PRESETS)' EXIT; \
		$(RUN) -m nsa_interop.build --preset paper,seed,smallgroup --decode --out $(PRESETS) && \
		$(RUN) -m pip wheel --quiet --no-deps --wheel-dir dist .
	@du -k dist/*.whl | awk '{ printf "%s: %.1f MiB\n", $$2, $$1 / 1024; \
		if ($$1 > $(WHEEL_MIB) * 1024) { print "must be at most $(WHEEL_MIB) MiB"; exit 1 } }'

# No GPU, no compiler and no kernels: what `make wheel` is made of.
sdist: $(READY)
	$(RUN) -m build --quiet --sdist --outdir dist .

docs: $(READY)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[docs]"
	$(RUN) -m mkdocs build --strict

check: $(READY)
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(VENV)/bin/pyrefly check
	$(VENV)/bin/lint-imports
	$(RUN) -m tests.plain_english

format: $(READY)
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
