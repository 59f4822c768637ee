# make setup · make demo · make test · make bench · make sanitize · make emulate · make lint · make cuda-check (wants nvcc)
# Each does everything it needs, on a fresh machine too.
PYTHON ?= python3
VENV := .venv
RUN := $(CURDIR)/$(VENV)/bin
CPP := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

setup: $(VENV)/.built

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet torch==2.13.0 "setuptools>=77" wheel ninja pybind11
	touch $@

# The Python part, editable, and the development tools; the compiled module is then built in place, file by file.
$(VENV)/.installed: $(VENV)/.torch pyproject.toml setup.py
	FAST_TRANSFORMER_SKIP_EXT=1 $(RUN)/pip install --quiet --no-build-isolation --editable ".[dev]"
	touch $@

$(VENV)/.built: $(VENV)/.installed $(CPP)
	PATH="$(RUN):$$PATH" $(RUN)/python setup.py --quiet build_ext --inplace
	touch $@

demo: setup
	$(RUN)/python -m fast_transformer.demo

test: setup
	$(RUN)/python -m pytest -q -n 2

bench: setup
	cd benchmarks && for file in $$(ls bench_*.py | grep -v _gpu); do $(RUN)/python $$file || exit 1; done

# The kernels alone, without torch, under AddressSanitizer and UndefinedBehaviorSanitizer. (make -j compiles side by side.)
SANITIZED := $(patsubst %.cpp,build/sanitize/%.o,tests/sanitize.cpp csrc/cpu/levels.cpp csrc/cpu/tasks.cpp $(wildcard csrc/cpu/levels/*.cpp))
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined

build/sanitize/%.o: %.cpp $(CPP)
	mkdir -p $(@D)
	$(CXX) -std=c++20 -O1 -g -DFT_POISON -fno-tree-slp-vectorize -ffp-contract=fast $(SANITIZE) -w -c $< -o $@

sanitize: $(SANITIZED)
	$(CXX) $(SANITIZE) $(SANITIZED) -o build/sanitize/run
	build/sanitize/run

# The levels of AVX-512 and AMX where there is only AVX2.
emulate: setup
	$(RUN)/python tests/avx512_on_avx2/run.py

# The whole extension against a CUDA build of torch (5.5 GB, in a venv of its own), with nvcc and without a GPU.
CUDA_TORCH ?= 2.14.1
CUDA_VENV := .venv-cuda-$(CUDA_TORCH)

$(CUDA_VENV)/.torch:
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/pip install --quiet torch==$(CUDA_TORCH) "setuptools>=77" wheel ninja pybind11
	touch $@

cuda-check: $(CUDA_VENV)/.torch
	$(CUDA_VENV)/bin/python tests/cuda_check.py

lint: $(VENV)/.installed
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/clang-format --dry-run -Werror $(CPP) tests/*.cpp tests/cuda_on_cpu/* tests/avx512_on_avx2/*.h

.PHONY: setup demo test bench sanitize emulate cuda-check lint
