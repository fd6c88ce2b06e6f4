# One target per chore; CI calls the same ones. PYTHON is the interpreter that makes .venv (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin
REALIZAR := $(BIN)/realizar
WORKERS ?= 2
PYTEST_ARGS ?=
PEERS_ARGS ?=
FUZZ_ARGS ?=

# Tests start the program hundreds of times: its bytecode is kept, whatever the caller's environment says.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install dev demo wheel lint format test test-full test-gpu clients test-ray parity sanitize fuzz bench-peers clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "realizar needs Python 3.11 or newer; set PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "python3 -m venv failed; on Debian: apt install python3-venv"; exit 1; }

.venv/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

.venv/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch .venv/.installed $@

install: .venv/.installed  ## make .venv with the command .venv/bin/realizar

dev: .venv/.dev  ## the same with what tests and lint need

demo: .venv/.installed  ## fetch SmolLM2-135M, ask it a question, print the answer and its speed
	$(REALIZAR) run smollm2:135m "What is photosynthesis?" \
		--temperature 0 --max-tokens 256 2>&1

COMPILED := src/realizar/backends/cpu/compiled
wheel: .venv/.installed  ## build dist/realizar-*.whl with compiled kernels, which uvx, pipx and pip install
	rm -rf build dist $(COMPILED)
	$(BIN)/python scripts/release/wheel_kernels.py
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	rm -rf build $(COMPILED)
	@du -h dist/*.whl

lint: .venv/.dev  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers $(WORKERS)
	$(BIN)/lint-imports

format: .venv/.dev  ## rewrite the sources to style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint  ## lint, then the test suite; tests that need torch or Chromium skip where it is absent
	$(BIN)/pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-full: lint  ## the wider matrices too
	$(BIN)/pytest -n $(WORKERS) --dist worksteal --full $(PYTEST_ARGS)

parity: .venv/.dev  ## install torch and transformers (1 GB), compare every architecture with transformers, write docs/parity.md
	$(BIN)/python -m pip install --quiet --editable '.[dev,parity]'
	$(BIN)/pytest --no-skips --full --record-parity tests/models/test_architecture_parity.py $(PYTEST_ARGS)
	$(BIN)/pytest --no-skips --full -n $(WORKERS) tests/models/test_parity_rows.py tests/backends/cpu/test_cpu_parity.py $(PYTEST_ARGS)
	PYTHONPATH=tests $(BIN)/python -m parity_table

test-gpu: .venv/.dev  ## what needs a GPU: beside each other, then what needs the device for itself
	$(BIN)/pytest -m gpu -n $(WORKERS) tests/backends/cuda $(PYTEST_ARGS)
	$(BIN)/pytest tests/backends/cuda/test_cuda_row_errors.py tests/backends/cuda/step/test_step_allocations.py $(PYTEST_ARGS)
	$(BIN)/pytest -m gpu -k many_loads tests/backends/cuda/test_device_failures_gpu.py $(PYTEST_ARGS)

.venv-clients/.installed: tests/clients/requirements.txt tests/clients/package.json pyproject.toml
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --requirement tests/clients/requirements.txt --editable .
	.venv-clients/bin/python -m pip install --quiet --no-deps 'instructor==1.17.0' 'diskcache==5.6.3' 'docstring_parser==0.18.0'
	@if command -v npm >/dev/null; then \
		cp tests/clients/package.json .venv-clients/ && npm install --silent --ignore-scripts --prefix .venv-clients; \
	else echo "no npm: the clients of Node are left out"; fi
	@touch $@

clients: .venv-clients/.installed  ## every helper of the pinned clients and frameworks against a server of scripted answers
	.venv-clients/bin/python -m pytest -W default tests/clients $(PYTEST_ARGS)

test-ray: .venv/.dev  ## install Ray Serve (350 MB), then a cluster of two hosts on this machine
	$(BIN)/python -m pip install --quiet --editable '.[dev,ray]'
	$(BIN)/pytest -m ray tests/ray_serve $(PYTEST_ARGS)

# Kernels that a graph starts are also started one by one, and memory for each tensor can't be had during a capture.
SANITIZE_ARGS ?= --first-cases -k "not graph and not draws and not numbers_at_which" \
	$(addprefix tests/backends/cuda/,sampling matmul attention recurrences/test_delta_kernels_gpu.py)
sanitize: .venv/.dev  ## the first case of each test of GPU kernels under compute-sanitizer's memcheck, from CUDA's toolkit
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
		$(BIN)/python -m pytest -m gpu $(SANITIZE_ARGS) $(PYTEST_ARGS)

fuzz: .venv/.dev  ## hostile requests, connections and files against a real server; FUZZ_ARGS=--help tells more
	PYTHONPATH=tests $(BIN)/python -m fuzz $(FUZZ_ARGS)

bench-peers: .venv/.installed  ## decode and prefill against llama.cpp and ik_llama.cpp, side by side
	PYTHONPATH=scripts $(BIN)/python -m peers $(PEERS_ARGS)

clean:  ## remove the environment and caches in this folder
	rm -rf .venv .venv-clients .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist src/*.egg-info
