# Two commands do everything: `make demo` and `make test`. Both set up .venv first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## create .venv and install Motley and its tools into it

$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Motley needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "no venv module: apt-get install python3-venv"; rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP) ## two unequal devices share the bundled model and stream a story
	$(BIN)/motley run -p "Once upon a time" -n 120 --seed 1 --device cpu,cpu -sm tensor -ts 3,1

test: $(STAMP) ## run all tests
	$(BIN)/python -m pytest

check: $(STAMP) ## lint, format check, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## list the benchmarks; BENCH="virtual_devices --rounds 5" runs one
	$(BIN)/python -m benchmarks $(BENCH)

clean: ## remove the environment and all build output
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
