# Two commands are all a newcomer needs: `make test` and `make demo`. Whichever runs first sets up .venv; after that
# both start in seconds, until pyproject.toml or constraints.txt changes. Nothing outside this folder is written,
# except pip's own download cache.

PYTHON ?= python3
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
LOG := $(VENV)/install.log
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
BENCH_VENV := .venv-bench
BENCH_BIN := $(BENCH_VENV)/bin
BENCH_READY := $(BENCH_VENV)/.installed
BENCH_LOG := $(BENCH_VENV)/install.log
BENCH_PIP := $(BENCH_BIN)/python -m pip --disable-pip-version-check --no-input
CHECK_PYTHON := import sys; sys.version_info >= (3, 10) or sys.exit("Lapis needs Python >= 3.10. \
	Got: " + sys.version.split()[0] + ". Do: make PYTHON=<a newer python3> ...")

# A module found through PYTHONPATH would hide the pinned one, and a --user install would leave this folder.
unexport PYTHONPATH
export PIP_REQUIRE_VIRTUALENV := 1
export PIP_USER := 0

.DEFAULT_GOAL := help
.PHONY: help test demo bench peer-test format clean

help:
	@echo "make test    set up, then lint, type check, import contracts and tests (PYTEST_ARGS=... goes to pytest)"
	@echo "make demo    set up, then run 'lapis demo' (DEMO_ARGS=... goes to it)"
	@echo "make bench   set up the peers beside Lapis in .venv-bench, then measure both (BENCH_ARGS=--help tells more)"
	@echo "make peer-test  compare log evidences with laplace-torch, in .venv-bench"
	@echo "make format  rewrite the code the way 'make test' wants it"
	@echo "make clean   remove .venv and everything else that make and the tools created"

test: $(READY)
	@echo "== ruff check"
	@$(BIN)/ruff check --quiet .
	@echo "== ruff format --check"
	@$(BIN)/ruff format --check --quiet . || { echo "Do: make format"; exit 1; }
	@echo "== mypy --strict src"
	@$(BIN)/mypy
	@echo "== import contracts"
	@$(BIN)/lint-imports --no-logo
	@echo "== pytest"
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

demo: $(READY)
	@$(BIN)/lapis demo $(DEMO_ARGS)

# Optional: the same numbers as laplace-torch where both mean the same. The peers live in .venv-bench only.
peer-test: $(BENCH_READY)
	@$(BENCH_PIP) install --quiet -c constraints.txt pytest pytest-xdist
	@$(BENCH_BIN)/python -m pytest -n0 -s tests/test_laplace_torch.py

bench: $(BENCH_READY)
	@$(BENCH_BIN)/python -m benchmarks $(BENCH_ARGS)

format: $(READY)
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	@echo "== setting up $(VENV): a few minutes the first time (log: $(LOG))"
	@$(PYTHON) -m venv $(VENV)
	@{ $(PIP) install -c constraints.txt pip setuptools && \
	   $(PIP) install -c constraints.txt --no-build-isolation --editable '.[dev]'; } >$(LOG) 2>&1 || \
	 { grep -v ^WARNING $(LOG) | tail -n 40; \
	   echo "Installation failed. If pip names a package from the end of constraints.txt, see there what to do."; \
	   exit 1; }
	@touch $@

$(BENCH_READY): pyproject.toml constraints.txt benchmarks/requirements.txt
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	@echo "== setting up $(BENCH_VENV): a few minutes the first time (log: $(BENCH_LOG))"
	@$(PYTHON) -m venv $(BENCH_VENV)
	@{ $(BENCH_PIP) install -c constraints.txt pip setuptools && \
	   $(BENCH_PIP) install -c constraints.txt --no-build-isolation --editable . && \
	   $(BENCH_PIP) install --no-deps -r benchmarks/requirements.txt; } >$(BENCH_LOG) 2>&1 || \
	 { grep -v ^WARNING $(BENCH_LOG) | tail -n 40; echo "Installation failed."; exit 1; }
	@touch $@

clean:
	rm -rf $(VENV) $(BENCH_VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
