# `make demo` and `make test` need Python 3.11 or newer with venv, and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM := .venv-vllm
EXTRAS := runtime,p2p,dev

# Many small processes share few cores here; one thread each is fastest.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test test-fleets test-alone test-vllm test-slow environments check clean schema

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: check
	$(MAKE) --no-print-directory -j2 test-fleets test-alone

# Fleets of processes, with deadlines, one after another; they wait more than they compute.
test-fleets: $(STAMP)
	$(BIN)/python -m pytest tests/runtime --durations 15

# All that runs in one process, in the time that the fleets leave.
test-alone: $(STAMP)
	nice -n 19 $(BIN)/python -m pytest tests --ignore=tests/runtime --durations 15

# `--engine vllm` with the real vLLM, on CPUs, from an environment of its own.
test-vllm: $(STAMP) $(VLLM)/.installed
	PATH="$(CURDIR)/$(VLLM)/bin:$$PATH" $(BIN)/python -m pytest tests/runtime/vllm/test_vllm_engine.py -rs --durations 6

# What takes minutes for each test, with vLLM and Ray: failures under load, all cells of the paper's tables.
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

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard runtime/native/*.cpp)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

# What the tests run in; with -j2 beside each other.
environments: $(STAMP) $(VLLM)/.installed

clean:
	rm -rf $(VENV) $(VLLM) .demo
