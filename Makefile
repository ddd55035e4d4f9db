# Every developer verb, one line each. `make` alone lists them.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
CODE = protocol worker scheduler cluster benchmarks tests

.PHONY: help install demo test coverage check format serve doctor clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

install: $(VENV)/installed ## create the virtual environment with pinned dependencies

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	@echo "setting up $(VENV) (once; a few minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: install ## serve the shipped model on a local cluster, ask it, shut it down
	$(BIN)/loopmesh demo

test: install ## run all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q

coverage: install ## branch coverage of the pure floors, which is to be complete
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest -q -m "not ray" tests/scheduler tests/protocol tests/contract tests/cluster/test_drivers.py tests/cluster/test_async_driver.py
	$(BIN)/coverage report

check: install ## formatting, lint, types, import directions
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install ## format the code and fix what can be fixed
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

serve: install ## serve the shipped model on port 8000
	$(BIN)/loopmesh serve

doctor: install ## check this machine and say what to do
	$(BIN)/loopmesh doctor

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
