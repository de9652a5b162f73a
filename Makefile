# Two commands do everything on a fresh clone: `make demo` and `make test`.
# They need Python 3.11 or newer, make and git; everything else goes into .venv: what the demo needs
# at first, and with the first command for developers their tools.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
# Tests start many processes, which need not compile the library anew, whatever the shell says.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check docs notebooks conformance mutants bench clean

help:
	@echo "make demo      train a small CNN on digits with four losses: a table, a report (< 2 minutes)"
	@echo "               the first time after a set-up of 3 minutes and 6 GB (torch with CUDA)"
	@echo "make test      the fast test suite and the golden vectors (< 12 minutes on 2 cores)"
	@echo "make test-all  every test, also the slow ones (< 80 minutes on 2 cores)"
	@echo "make check     ruff, mypy --strict, the import-layer rule, the documentation"
	@echo "make docs      the documentation as web pages, in site/ (< 40 s); open site/index.html"
	@echo "make notebooks run the notebooks and store their outputs (< 3 minutes)"
	@echo "make mutants   small wrong changes to the arithmetic: does a test fail for each? (hours)"
	@echo "make bench     CPU benchmarks; rows go to benchmarks/results (quiet machine, please)"
	@echo "make clean     remove .venv and every cache"
	@echo
	@echo "All but demo need the tools of developers: 3 minutes and 1 GB more, the first time."
	@echo "PYTHON=python3.12 picks the interpreter, WORKERS=8 the number of test processes."

# What the demo needs, which is what a user installs; the tools of developers come on top of it.
$(VENV)/.installed-demo: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit( \
	  "largemargin needs Python 3.11 or newer, but \"$(PYTHON)\" is %d.%d. " % v[:2] + \
	  "Name another one: make PYTHON=python3.12 ...")'
	@echo "Setting up $(VENV), once: 3 minutes and 6 GB on a fast line, nearly all of it torch with CUDA."
	@echo "Without CUDA, 1.5 GB: make demo PIP_EXTRA_INDEX_URL=... with torch's index of CPU builds"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --editable '.[report]'
	@touch $@

$(VENV)/.installed: $(VENV)/.installed-demo papers/pyproject.toml
	@echo "Adding the tools of developers to $(VENV), once: 3 minutes and 1 GB more."
	@$(BIN)/python -m pip install --quiet --editable '.[dev]' --editable papers
	@# An oracle of the tests; its own pins are older than what the rest needs.
	@$(BIN)/python -m pip install --quiet --no-deps 'torchattacks>=3.5'
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	@echo "Installing the libraries the benchmarks compare with."
	@$(BIN)/python -m pip install --quiet --editable '.[bench]'
	@touch $@

demo: $(VENV)/.installed-demo
	@$(BIN)/largemargin demo
	@echo
	@echo "largemargin lies in $(BIN). To type the commands above as they stand, once per shell:"
	@echo "  . $(BIN)/activate"

test: $(VENV)/.installed
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "not slow"
	@$(MAKE) --no-print-directory conformance

test-all: $(VENV)/.installed
	$(PYTEST) -n $(WORKERS) --dist worksteal
	@$(MAKE) --no-print-directory conformance

conformance: $(VENV)/.installed
	@echo "Golden vectors (tests/golden):"
	@OMP_NUM_THREADS=1 $(BIN)/python tests/conformance.py tests/golden

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src papers/largemargin_papers
	$(PYTEST) -q tests/test_layers.py
	@$(MAKE) --no-print-directory docs

# Strict: a warning is an error. Nothing is fetched, and the pages fetch nothing.
docs: $(VENV)/.installed
	OMP_NUM_THREADS=1 NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@$(BIN)/python docs/check_site.py site

notebooks: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python notebooks/execute.py

# All of them, or MUTANTS='--sample 200 --seed 1', or MUTANTS='--file losses/cosface.py'.
mutants: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants/run.py --workers $(WORKERS) $(MUTANTS)

bench: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/cpu_heads.py
	$(BIN)/python benchmarks/small_steps.py

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name '*.egg-info' -prune -exec rm -rf {} +
	find . -name __pycache__ -prune -exec rm -rf {} +
