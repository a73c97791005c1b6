# Two commands do everything: `make demo` and `make test`. Both set up .venv first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SANITIZE_SETS ?= avx2;avx512_vnni
# Give an interpreter that has llama-cpp-python already, and none is built.
PEERS_PYTHON ?= build/peers/bin/python
PEERS_STAMP := $(if $(filter build/peers/bin/python,$(PEERS_PYTHON)),build/peers/.installed)
PEERS_LLAMA_CPP := llama-cpp-python==0.3.36 # deep contexts are made in its format: benchmarks/peer_llama_state.py

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu check format bench bench-peers sanitize clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## create .venv and install Motley and its tools into it

$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/* csrc/*/*)
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

test-gpu: $(STAMP) ## run the tests that need an NVIDIA GPU (`make test` skips them)
	TRITON_INTERPRET=0 $(BIN)/python -m pytest tests/gpu

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

bench-peers: $(STAMP) $(PEERS_STAMP) ## time Motley beside its peers, turn by turn; PEERS="--weights Q4_0 --rounds 9" for more
	$(BIN)/python -m benchmarks peers --python $(PEERS_PYTHON) $(PEERS)

# PyPI has llama.cpp as source only: this compiles for a quarter of an hour or more, once. Where the machine claims AMX
# but does not run it, what the default flags give dies of an illegal instruction; peer_amx.py prints others there. No
# cache: pip would take a wheel that it built with other flags.
build/peers/.installed: | $(STAMP)
	$(PYTHON) -m venv build/peers
	CMAKE_ARGS="-DLLAVA_BUILD=OFF $$($(BIN)/python benchmarks/peer_amx.py)" \
		build/peers/bin/python -m pip install --quiet --no-cache-dir $(PEERS_LLAMA_CPP)
	@touch $@

sanitize: ## run every native kernel under ASan and UBSan, then the threads under TSan
	for kind in address,undefined thread; do \
		cmake -S . -B build/sanitize-$$kind -DMOTLEY_SANITIZE=$$kind -DMOTLEY_X86_SETS="$(SANITIZE_SETS)" && \
		cmake --build build/sanitize-$$kind --target core_check -j2 && build/sanitize-$$kind/core_check || exit 1; \
	done

clean: ## remove the environment and all build output
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
