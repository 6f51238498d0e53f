# Most targets first create a virtual environment in .venv and install the library in it.
# The machine needs make, and Python 3.12 or newer with its venv module.

PYTHON ?= $(shell for p in python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { echo $$p; break; }; done)
# The CUDA 13 build of JAX if there is a GPU, and otherwise only its compiler for the tests.
# EXTRAS=cuda12 if torch was built for CUDA 12.
EXTRAS ?= $(shell nvidia-smi >/dev/null 2>&1 && echo cuda13 || echo compiler)
# Pinned versions. CONSTRAINTS= installs the newest versions that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

# Python stores compiled imports for the next process, even if the environment disables this.
export PYTHONDONTWRITEBYTECODE :=

# Flags of bench.oneshot: make oneshot FLAGS=--quick
FLAGS ?=

.PHONY: help setup compare oneshot test test-all mutants test-gpu test-clean test-versions test-vllm durations wheel sdist docs check format clean

help:
	@echo "make setup       create .venv and install the library in it; most targets do this first"
	@echo "make compare     print a table of parity and speed of every implementation"
	@echo "make oneshot     run tests and benchmarks once and write a report, within 10 minutes"
	@echo "make test        run all tests, in about 12 minutes on two cores; GPU tests run if there is a GPU;"
	@echo "                 PART=1/5 runs a fifth of the tests; make test-all is the same"
	@echo "make mutants     check that tests catch mistakes in the library; PART=1/10 runs a tenth"
	@echo "make test-gpu    run the tests that need one GPU, and record the run; PART=1/2 runs half of them;"
	@echo "                 GPUS=2 runs the tests that need two GPUs"
	@echo "make test-clean  test the package in new environments (base, jax, nnx, torch, both, hf)"
	@echo "make test-versions  test the oldest, pinned and newest versions of dependencies;"
	@echo "                 VERSIONS=pre-release tests pre-releases"
	@echo "make test-vllm   test the vLLM plugin in vLLM's CPU build, in a separate environment of 1.5 GB"
	@echo "make durations   run all tests, and write the time of each to tests/durations.json"
	@echo "make wheel       build dist/*.whl with the kernels of configs/{paper,seed,smallgroup}.yaml"
	@echo "make sdist       build dist/*.tar.gz, from which any machine can build a wheel without kernels"
	@echo "make docs        build the site in build/site: pages, and an API reference from docstrings"
	@echo "make check       check format, lint, types, imports between packages, and plain English"
	@echo "make format      format the sources, and fix lint errors that can be fixed automatically"
	@echo "make clean       remove .venv, build results and caches"

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

# Two workers. Tests of a file run in one worker, since they share compiled programs
# (tests/durations.py).
PYTEST := $(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(READY)
	$(PYTEST) $(if $(PART),--part $(PART))

test-all: test

mutants: $(READY)
	$(RUN) -m tests.mutants $(if $(PART),--part $(PART))

durations: $(READY)
	$(PYTEST) --record-durations

# Commit the record that this appends together with the tested change.
test-gpu: $(READY)
	$(RUN) -m bench.gpu_tests --save_records $(if $(PART),--part $(PART)) $(if $(GPUS),--gpus $(GPUS))

# CLEAN names the environments; by default all (tests/clean_environments.py).
test-clean:
	$(PYTHON) tests/clean_environments.py $(CLEAN)

# VERSIONS names environments of tests/versions.py; by default oldest, pinned and newest.
test-versions: $(READY)
	$(RUN) -m tests.versions $(VERSIONS)

# Runs in a separate environment of 1.5 GB, since vLLM pins its dependencies.
test-vllm: $(READY)
	$(RUN) tests/vllm_environment.py

# Kernels are in the package only while the wheel is built, and not in the checkout.
PRESETS := kernels_pallas/runtime/presets
WHEEL_MIB := 45

wheel: $(READY)
	rm -rf $(PRESETS) build/lib dist
	trap 'rm -rf $(PRESETS)' EXIT; \
		$(RUN) -m nsa_interop.build --preset paper,seed,smallgroup --decode --out $(PRESETS) && \
		$(RUN) -m pip wheel --quiet --no-deps --wheel-dir dist .
	@du -k dist/*.whl | awk '{ printf "%s: %.1f MiB\n", $$2, $$1 / 1024; \
		if ($$1 > $(WHEEL_MIB) * 1024) { print "must be at most $(WHEEL_MIB) MiB"; exit 1 } }'

# The sources from which a wheel is built. No GPU, compiler or kernels are needed.
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
