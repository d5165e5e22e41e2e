# Two commands are all a newcomer needs: `make test` and `make demo`. Whichever runs first sets up .venv; after that
# both start in seconds, until pyproject.toml or constraints.txt changes. Nothing outside this folder is written,
# except pip's own download cache.

PYTHON ?= python3
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
# Calls and seed of `make fuzz`.
N ?= 20000
SEED ?= 0
SBC_ARGS ?=
# Where to look for builds of torch besides the usual index; a CPU build that is found there is preferred.
TORCH_INDEX ?=
# The version that `make test-torch` runs the tests on.
TORCH ?=

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
EXTRAS_VENV := .venv-extras
EXTRAS_BIN := $(EXTRAS_VENV)/bin
EXTRAS_READY := $(EXTRAS_VENV)/.installed
EXTRAS_LOG := $(EXTRAS_VENV)/install.log
EXTRAS_PIP := $(EXTRAS_BIN)/python -m pip --disable-pip-version-check --no-input
DOCS_VENV := .venv-docs
DOCS_READY := $(DOCS_VENV)/.installed
DOCS_LOG := $(DOCS_VENV)/install.log
DOCS_PIP := $(DOCS_VENV)/bin/python -m pip --disable-pip-version-check --no-input
# Requirements of the extra alone: the site is built from the text of the code, so Lapis and torch need not be there.
DOCS_NEEDS := import json, re; print(*json.loads(re.search(r"^docs = (\[.*\])", open("pyproject.toml").read(), re.M)[1]))
TORCH_VENV := .venv-torch-$(TORCH)
TORCH_PIP := $(TORCH_VENV)/bin/python -m pip --disable-pip-version-check --no-input
EXTRA_INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
CHECK_PYTHON := import sys; sys.version_info >= (3, 10) or sys.exit("Lapis needs Python >= 3.10. \
	Got: " + sys.version.split()[0] + ". Do: make PYTHON=<a newer python3> ...")

# A module found through PYTHONPATH would hide the pinned one, and a --user install would leave this folder.
unexport PYTHONPATH
export PIP_REQUIRE_VIRTUALENV := 1
export PIP_USER := 0
# Python compiles what is imported, when it is; of torch that is a small part.
export PIP_NO_COMPILE := 1

.DEFAULT_GOAL := help
.PHONY: help test test-extras tamper kills demo docs test-torch bench peer-test fuzz sbc format clean

help:
	@echo "make test    set up, then lint, type check, import contracts and tests (PYTEST_ARGS=... goes to pytest)"
	@echo "make test-extras  set up .venv-extras with every extra, then run the tests that need one"
	@echo "make tamper  edit N=1000 files, which must be refused or give equal results"
	@echo "make kills   kill each long work N=20 times, which must go on to equal results"
	@echo "make demo    set up, then run 'lapis demo' (DEMO_ARGS=... goes to it)"
	@echo "              (TORCH_INDEX=<url>: an index with CPU builds of torch, which save a download of gigabytes)"
	@echo "make docs    build the documentation into site/, warnings are errors"
	@echo "make test-torch TORCH=2.6.0  run the tests on another version of torch, in a virtual environment of its own"
	@echo "make bench   set up the peers beside Lapis in .venv-bench, then measure both (BENCH_ARGS=--help tells more)"
	@echo "make peer-test  compare with laplace-torch and other libraries, in .venv-bench"
	@echo "make fuzz N=20000 SEED=0  random calls of the whole interface, in two processes; exit code 1 on any finding"
	@echo "make sbc     simulation-based calibration: are posteriors right on average? (SBC_ARGS=--help tells more)"
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

# Tests that need an optional package, pages of the documentation among them, skip themselves where it is missing:
# those of files that say importorskip.
test-extras: $(EXTRAS_READY)
	@$(EXTRAS_BIN)/python -m pytest $(PYTEST_ARGS) $$(grep -l importorskip tests/test_*.py docs/guides/*.md)

# Reliability kits at full size: see docs/reliability.md.
tamper: N := 1000
tamper: $(READY)
	@$(BIN)/python tests/tampering.py $(N)

kills: N := 20
kills: $(READY)
	@$(BIN)/python tests/killing.py $(N)

demo: $(READY)
	@$(BIN)/lapis demo $(DEMO_ARGS)

docs: $(DOCS_READY)
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet
	@echo "open site/index.html"

# The pins of torch, and of what its versions pin in turn, are left out; so is the test that compares with the pins.
test-torch:
	@test -n "$(TORCH)" || { echo "Which version? Do: make test-torch TORCH=2.6.0"; exit 1; }
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	@test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	@grep -vE '^(torch|sympy|setuptools)==' constraints.txt >$(TORCH_VENV)/constraints.txt
	@{ $(TORCH_PIP) install -c $(TORCH_VENV)/constraints.txt pip 'setuptools>=77' && \
	   $(TORCH_PIP) install -c $(TORCH_VENV)/constraints.txt $(EXTRA_INDEX) --no-build-isolation \
	     --editable . torch==$(TORCH) pytest pytest-xdist; } >$(TORCH_VENV)/install.log 2>&1 || \
	 { grep -v ^WARNING $(TORCH_VENV)/install.log | tail -n 40; echo "Installation failed."; exit 1; }
	@$(TORCH_VENV)/bin/python -m pytest $(PYTEST_ARGS) \
	   --deselect tests/test_repository.py::test_every_installed_dependency_is_the_pinned_one

# Optional: the same numbers as laplace-torch, ivon-opt and hmmlearn where both mean the same. The peers live in .venv-bench only.
peer-test: $(BENCH_READY)
	@$(BENCH_PIP) install --quiet -c constraints.txt pytest pytest-xdist
	@$(BENCH_BIN)/python -m pytest -n0 -s tests/test_laplace_torch.py tests/test_ivon_opt.py tests/test_hmmlearn.py \
	    tests/test_method_peers.py

bench: $(BENCH_READY)
	@$(BENCH_BIN)/python -m benchmarks $(BENCH_ARGS)
	@$(BENCH_BIN)/python -m benchmarks.optimisers
	@$(BENCH_BIN)/python -m benchmarks.latent
	@$(BENCH_BIN)/python -m benchmarks.methods
	@$(BENCH_BIN)/python -m benchmarks.function_space
	@$(BENCH_BIN)/python -m benchmarks.checks --write

fuzz: $(READY)
	@PYTHONPATH=tests $(BIN)/python -m fuzz --calls $(N) --seed $(SEED)

sbc: $(READY)
	@PYTHONPATH=tests $(BIN)/python -m sbc $(SBC_ARGS)

format: $(READY)
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	@echo "== setting up $(VENV): a few minutes the first time (log: $(LOG))"
	@$(PYTHON) -m venv $(VENV)
	@{ $(PIP) install -c constraints.txt pip setuptools && \
	   $(PIP) install -c constraints.txt $(EXTRA_INDEX) --no-build-isolation --editable '.[dev]'; } >$(LOG) 2>&1 || \
	 { grep -v ^WARNING $(LOG) | tail -n 40; echo "Installation failed."; exit 1; }
	@touch $@

$(BENCH_READY): pyproject.toml constraints.txt benchmarks/requirements.txt
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	@echo "== setting up $(BENCH_VENV): a few minutes the first time (log: $(BENCH_LOG))"
	@$(PYTHON) -m venv $(BENCH_VENV)
	@{ $(BENCH_PIP) install -c constraints.txt pip setuptools && \
	   $(BENCH_PIP) install -c constraints.txt $(EXTRA_INDEX) --no-build-isolation --editable . && \
	   $(BENCH_PIP) install --no-deps -r benchmarks/requirements.txt; } >$(BENCH_LOG) 2>&1 || \
	 { grep -v ^WARNING $(BENCH_LOG) | tail -n 40; echo "Installation failed."; exit 1; }
	@touch $@

$(EXTRAS_READY): pyproject.toml constraints.txt
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	@echo "== setting up $(EXTRAS_VENV): a few minutes the first time (log: $(EXTRAS_LOG))"
	@$(PYTHON) -m venv $(EXTRAS_VENV)
	@{ $(EXTRAS_PIP) install -c constraints.txt pip setuptools && \
	   $(EXTRAS_PIP) install -c constraints.txt $(EXTRA_INDEX) --no-build-isolation --editable '.[dev,all]' build; } \
	   >$(EXTRAS_LOG) 2>&1 || { grep -v ^WARNING $(EXTRAS_LOG) | tail -n 40; echo "Installation failed."; exit 1; }
	@touch $@

$(DOCS_READY): pyproject.toml constraints.txt
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	@echo "== setting up $(DOCS_VENV) (log: $(DOCS_LOG))"
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_PIP) install -c constraints.txt pip $$($(PYTHON) -c '$(DOCS_NEEDS)') >$(DOCS_LOG) 2>&1 || \
	 { grep -v ^WARNING $(DOCS_LOG) | tail -n 40; echo "Installation failed."; exit 1; }
	@touch $@

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(EXTRAS_VENV) $(DOCS_VENV) .venv-torch-* build dist site src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
