# dspark: setup, checks and figures. `make help` lists the targets.
#
#   VENV=DIR     virtual environment to make and use (default .venv)
#   PYTHON=EXE   Python >= 3.11 to make it with (default python3)
#   JOBS=N       test processes (default 2)
#   ARGS="..."   further arguments for the target's main command

SHELL := bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=

BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
PY := $(BIN)/python
STAMPS := $(VENV)/.stamps
RUST := $(shell find rust_sched -name target -prune -o -type f \( -name '*.rs' -o -name '*.toml' -o -name '*.lock' \) -print)
CARGO := PYO3_PYTHON=$(abspath $(PY)) cargo
INSTALL := $(PY) -m uv pip install --quiet --python $(PY)
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 $(PY) -m pytest

##@ Main

.PHONY: demo
demo: setup  ## decode real prompts plainly and speculatively, and compare
	$(BIN)/dspark demo $(ARGS)

.PHONY: test
test: setup  ## the default test suite (minutes on two cores)
	$(PYTEST) -n $(JOBS) -m "not slow and not real" $(ARGS)

.PHONY: setup
setup: $(STAMPS)/native $(STAMPS)/drafter  ## environment, dependencies and native code; does nothing when up to date

##@ Checks

.PHONY: test-slow
test-slow: setup  ## tests marked slow, and those on the real model
	$(PYTEST) -n $(JOBS) -m "(slow or real) and not soak" $(ARGS)

.PHONY: test-soak
test-soak: setup  ## what wants a quiet machine and an hour: twenty seeds, a thousand faulty requests a phase
	$(PYTEST) -n $(JOBS) -m soak $(ARGS)
	$(PYTEST) -n $(JOBS) -m soak tests/kernels_aot $(ARGS)

.PHONY: test-kernels
test-kernels: setup  ## the GPU kernels without a GPU: in Triton's interpreter, and compiled for four architectures
	TRITON_INTERPRET=1 $(PYTEST) -n $(JOBS) tests/kernels_interp $(ARGS)
	$(PYTEST) -n $(JOBS) -m "not soak" tests/kernels_aot $(ARGS)

.PHONY: test-gpu
test-gpu: setup  ## the same kernels on a GPU; skipped without one
	$(PYTEST) tests/gpu $(ARGS)

.PHONY: test-ray
test-ray: $(STAMPS)/ray  ## the example for Ray Serve, on a local cluster of two replicas
	$(PYTEST) tests/examples/test_ray_serve_app.py $(ARGS)

.PHONY: test-plugins
test-plugins: setup  ## each package of plugins/ in an environment of its own, with this repository's wheel
	$(PY) plugins/check.py --jobs $(JOBS) $(ARGS)

.PHONY: test-rust
test-rust: setup  ## Rust unit, property and documentation tests
	@if cargo nextest --version >/dev/null 2>&1; then set -x; \
	  $(CARGO) nextest run --manifest-path rust_sched/Cargo.toml $(ARGS); \
	else set -x; \
	  $(CARGO) test --manifest-path rust_sched/Cargo.toml --lib --bins --tests $(ARGS); \
	fi
	$(CARGO) test --manifest-path rust_sched/Cargo.toml --doc

.PHONY: lint
lint: setup  ## ruff, mypy, stubtest, clippy and rustfmt
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(PY) -m mypy.stubtest dspark._sched
	$(CARGO) clippy --manifest-path rust_sched/Cargo.toml --workspace --all-targets -- -D warnings
	cargo fmt --manifest-path rust_sched/Cargo.toml --all -- --check
	$(CARGO) clippy --manifest-path plugins/dspark-drafter-suffix/Cargo.toml --all-targets -- -D warnings
	cargo fmt --manifest-path plugins/dspark-drafter-suffix/Cargo.toml -- --check

.PHONY: format
format: setup  ## rewrite the sources as lint wants them
	$(PY) -m ruff check --fix
	$(PY) -m ruff format
	cargo fmt --manifest-path rust_sched/Cargo.toml --all
	cargo fmt --manifest-path plugins/dspark-drafter-suffix/Cargo.toml

.PHONY: mutants
mutants: setup  ## apply every seeded fault; each must be caught
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) -m tests.mutants.run --jobs $(JOBS) $(ARGS)

.PHONY: api
api: setup  ## write the public surface to tests/api/public.txt, where a change of it is meant
	$(PY) -m tests.api.surface

##@ Figures

.PHONY: verify
verify: setup  ## compare the real model with plain decoding, in full; writes the result
	HF_HUB_OFFLINE=1 $(PY) -m benchmarks.verify $(ARGS)

.PHONY: verify-ci
verify-ci: setup  ## the same on 8 prompts of 32 tokens; writes nothing
	HF_HUB_OFFLINE=1 $(PY) -m benchmarks.verify --prompts 8 --tokens 32 --no-write $(ARGS)

.PHONY: bench
bench: setup  ## speed of the frame and of the scheduler
	HF_HUB_OFFLINE=1 $(PY) -m benchmarks.frame $(ARGS)
	$(CARGO) bench --manifest-path rust_sched/Cargo.toml

##@ Rest

.PHONY: docs
docs: $(STAMPS)/docs  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict $(ARGS)

.PHONY: clean
clean:  ## remove what builds and tests leave, but not the environment
	rm -rf target rust_sched/target plugins/*/target site dist build dspark/_sched*.so dspark/_sched*.pyd
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis $(STAMPS)/native
	find . -name .git -prune -o -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help
help:  ## this list
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' Makefile

# Stamp files: each names a state of the environment and is newer than what that state was made from.

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"dspark needs Python >= 3.11 and {sys.executable} is {v[0]}.{v[1]}: set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check uv
	@mkdir -p $(STAMPS)
	@touch $@

$(STAMPS)/deps: $(STAMPS)/venv pyproject.toml requirements/demo.txt
	$(INSTALL) --requirements pyproject.toml --extra dev
	$(INSTALL) --no-deps --requirements requirements/demo.txt
	@touch $@

$(STAMPS)/native: $(STAMPS)/deps $(RUST)
	@command -v cargo >/dev/null || { echo "dspark needs a Rust toolchain: cargo is not on PATH" >&2; exit 1; }
	env -u CONDA_PREFIX VIRTUAL_ENV=$(abspath $(VENV)) $(PY) -m maturin develop --uv --release
	@touch $@

$(STAMPS)/drafter: $(STAMPS)/native plugins/dspark-smollm2/pyproject.toml
	$(INSTALL) --no-deps --editable plugins/dspark-smollm2
	@touch $@

$(STAMPS)/ray: $(STAMPS)/native
	$(INSTALL) --requirements pyproject.toml --extra ray
	@touch $@

$(STAMPS)/docs: $(STAMPS)/venv pyproject.toml
	$(INSTALL) --requirements pyproject.toml --extra docs
	@touch $@
