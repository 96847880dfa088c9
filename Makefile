# `make demo` and `make test` need Python 3.11 or newer with venv, and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM := .venv-vllm
ARM := .venv-arm
EXTRAS := runtime,p2p,dev
# Compiled once, where they are installed: commands start twice as fast where Python may not write bytecode later.
PACKAGES := hexgen2 cost_model cluster_specs runtime

# Tests start many small processes on few cores; one thread per process is fastest.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE ?= 1
# Tests start hundreds of processes, which import the project: it is compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fleets test-runtime test-search test-alone test-vllm test-arm test-slow environments check clean schema docs-figures

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# Launched fleets spend more time waiting than computing, so the other parts run at the same time. Two of them keep
# two cores busy once the fleets have ended.
test: $(STAMP)
	$(MAKE) --no-print-directory -j5 check test-fleets test-runtime test-search test-alone

FLEETS := tests/runtime/launcher tests/runtime/p2p

test-fleets: $(STAMP)
	$(BIN)/python -m pytest $(FLEETS) --durations 15

# The rest of the runtime (engine, API, ...), with real and scripted workers.
test-runtime: $(STAMP)
	$(BIN)/python -m pytest tests/runtime $(FLEETS:%=--ignore=%) --durations 15

SEARCH := $(addprefix tests/hexgen2/,search strategies simulator replan)

# Searches and simulations, at low priority.
test-search: $(STAMP)
	nice -n 19 $(BIN)/python -m pytest $(SEARCH) --durations 15

# Everything else outside the runtime, at low priority.
test-alone: $(STAMP)
	nice -n 19 $(BIN)/python -m pytest tests --ignore=tests/runtime $(SEARCH:%=--ignore=%) --durations 15

# `--engine vllm` with the real vLLM on CPUs, which has its own virtual environment.
test-vllm: $(STAMP) $(VLLM)/.installed
	PATH="$(CURDIR)/$(VLLM)/bin:$$PATH" $(BIN)/python -m pytest tests/runtime/vllm/test_vllm_engine.py -rs --durations 6

# The compiled kernels on two processors of ARM, which qemu emulates: one that has the instructions for products of
# bytes and of pairs in bfloat16, and one that has only those of ARMv8.2 for bytes. Many times slower than elsewhere.
KERNELS := $(patsubst %,tests/runtime/engine/test_%.py,native integers quantised linear memory attention stored)
EMULATED := $(ARM)/python -m pytest --noconftest -p tests.conftest -rs --durations 6 $(KERNELS)

test-arm: $(STAMP) $(ARM)/.installed
	QEMU_CPU=max,sve=off $(EMULATED)
	QEMU_CPU=neoverse-n1 $(EMULATED)

$(ARM)/.installed: tests/arm_environment.py setup.py $(wildcard runtime/native/*.cpp runtime/native/*.h)
	$(BIN)/python tests/arm_environment.py $(ARM)
	touch $@

# Tests that take minutes each, with vLLM and Ray: failures under load, all cells of the paper's tables.
test-slow: $(STAMP) $(VLLM)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	PATH="$(CURDIR)/$(VLLM)/bin:$$PATH" $(BIN)/python -m pytest tests -m slow -rs --durations 6

$(VLLM)/.installed: tests/vllm_environment.py constraints.txt
	$(PYTHON) tests/vllm_environment.py $(VLLM)
	touch $@

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy hexgen2 cost_model cluster_specs runtime examples benchmarks

schema: $(STAMP)
	$(BIN)/python -c "import json; from hexgen2.placement import json_schema; print(json.dumps(json_schema(), indent=1))" > docs/placement.schema.json

# Fill the README and docs/ with what their commands print.
docs-figures: $(STAMP)
	$(BIN)/python -m benchmarks.docs_figures --all

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard runtime/native/*.cpp runtime/native/*.h)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	$(BIN)/python -m compileall -q $(PACKAGES)
	touch $@

# The virtual environments of the tests; -j2 makes both at once.
environments: $(STAMP) $(VLLM)/.installed

clean:
	rm -rf $(VENV) $(VLLM) $(ARM) .demo
