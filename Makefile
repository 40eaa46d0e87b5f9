# Everything runs in .venv, which is made on first use. TORCH may name another release or a file.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
# Processes that share the quick tests, and all tests: more of them compute while others wait for servers. Each computes on
# one thread, for threads that wait for each other make small models slow, and needs up to 3 GB.
WORKERS ?= 2
WORKERS_OF_ALL ?= 3
# A file's tests stay in one process; tests/conftest.py has the order.
DIST   := --dist loadfile --no-loadscope-reorder
BIN    := .venv/bin

# Python keeps what it compiles, whatever the shell says: pip leaves that to the first import.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-all check coverage lowest audit lint types kernels kernels-of-tests bytecode plugin wheel clean

setup: .venv/ready

# torch is pinned to the release that the tests ran with: the range in pyproject.toml would take the newest.
# Where PyPI's build brings CUDA libraries that you do not need, give pip the index of PyTorch's CPU builds.
# An old pip takes twice as long to choose; most of the 16,000 files that it would compile are never imported.
.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' \
		|| { echo "error: $(PYTHON) is not Python 3.10 to 3.13; choose another: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv .venv || { echo "error: no venv module; on Debian or Ubuntu: apt install python3-venv"; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/pip install --quiet --no-compile "$(TORCH)" --editable ".[dev]"
	@touch $@

demo: setup
	$(BIN)/trtllm-dflash demo

# Every claim by its principal cases: tests/principal_cases.py has how they are named.
test: MARKED := -m "not exhaustive"
test: test-all

# Their repeats too.
test-all:
	@$(MAKE) --no-print-directory --jobs=4 lint types kernels-of-tests bytecode
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(WORKERS_OF_ALL) $(DIST) $(MARKED)

# What tests/test_plugins.py asks about, compiled on the core that the setup leaves idle. A fault in it is that test's.
kernels-of-tests:
	@$(PYTHON) -m tests.kernel_build

# What the tests import, compiled once: their processes would begin together, and each compile all of it. A fault in it
# is theirs to say.
bytecode: setup
	@OMP_NUM_THREADS=1 $(BIN)/pytest --collect-only --quiet >/dev/null || true

# The quick ones alone: before each commit.
check: setup lint types
	OMP_NUM_THREADS=1 $(BIN)/pytest --quiet --numprocesses $(WORKERS) $(DIST) -m "not slow and not exhaustive"

# All tests, and which lines they ran; a third slower.
coverage: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(WORKERS) $(DIST) --cov --cov-report=term

# All tests with the lowest versions that pyproject.toml allows of what it names; what those ask for is the newest.
# torch stays the pinned one; TORCH=torch==2.7.0 tries the lowest, of which PyPI has the build with CUDA alone.
lowest: .venv-lowest/ready
	OMP_NUM_THREADS=1 .venv-lowest/bin/pytest --numprocesses $(WORKERS) $(DIST)

# Each `"name[extras]>=version,...; marker"` becomes `name==version; marker`. A bound that another one rules out is an
# error here.
.venv-lowest/ready: pyproject.toml
	$(PYTHON) -m venv --clear .venv-lowest
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check "$(TORCH)"
	.venv-lowest/bin/pip freeze | grep '^torch==' > .venv-lowest/versions.txt
	grep -oE '"[A-Za-z0-9_-]+(\[[a-z,]+\])?>=[0-9.]+[^"]*"' pyproject.toml | grep -v '^"torch' | tr -d '"' \
		| sed -E 's/(\[[a-z,]+\])?>=([0-9.]+)(,<[0-9.]+)?/==\2/' >> .venv-lowest/versions.txt
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check --constraint .venv-lowest/versions.txt --editable ".[dev]"
	@touch $@

# Published holes of what is installed, which PyPI knows: needs the network. docs/security.md has what was found before.
audit: setup .venv-audit/ready
	PIPAPI_PYTHON_LOCATION=$(BIN)/python .venv-audit/bin/pip-audit --skip-editable

.venv-audit/ready:
	$(PYTHON) -m venv --clear .venv-audit
	.venv-audit/bin/pip install --quiet --disable-pip-version-check pip-audit
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy --num-workers $(WORKERS)

# The CUDA kernels: nvcc 12.9 or later. The TensorRT plugin too: TENSORRT_INCLUDE=DIR, where NvInfer.h lies.
kernels:
	cmake -S plugins -B plugins/build && cmake --build plugins/build --parallel $$(nproc)

plugin:
	cmake -S plugins -B plugins/build -DTENSORRT_INCLUDE=$(TENSORRT_INCLUDE) && cmake --build plugins/build --parallel $$(nproc)

# dist/trtllm_dflash-*.whl, with the CUDA kernels where nvcc is, or where they are built already.
wheel: setup
	@if command -v nvcc >/dev/null; then $(MAKE) --no-print-directory kernels; fi
	$(BIN)/hatchling build --target wheel

clean:
	rm -rf .venv .venv-lowest .venv-audit engines plugins/build plugins/build-tests
