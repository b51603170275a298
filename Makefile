# make quickstart | test | test-all | test-examples | test-gpu | test-vllm | test-trackers | soak | hosts | bench | docs | lint | venv
#
#   PYTHON            the interpreter that makes the virtual environment (3.11 or newer)
#   VENV              where it is made
#   JOBS              processes that run the quick tests, some of which wait for others (3)
#   JOBS_ALL          processes that run all tests, half of which wait for others (4)
#   SOAK              arguments of the soak, e.g. SOAK="--minutes 60 --out benchmarks/results/soak.json"
#   TORCH_INDEX_ARGS  extra arguments for installing torch. On a machine without a GPU, where pip would fetch the large CUDA build:
#                       make quickstart TORCH_INDEX_ARGS="--index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 3
JOBS_ALL ?= 4
TORCH_INDEX_ARGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(BIN)/python .ci/install.py --quiet
# Byte code is kept whatever the machine says: hundreds of processes import the same packages.
PYTEST := env -u PYTHONDONTWRITEBYTECODE -u PYTHONUNBUFFERED OMP_NUM_THREADS=1 $(BIN)/python -m pytest --hypothesis-profile quick

.PHONY: quickstart test test-all test-examples test-gpu test-vllm test-trackers soak hosts bench docs lint venv

quickstart: $(VENV)/.core
	$(BIN)/agentevo models smollm2-135m-instruct
	$(BIN)/agentevo train coins run.dir=runs/quickstart run.overwrite=true

# What a person waits for: four minutes on 2 cores.
test: $(VENV)/.dev
	$(PYTEST) --numprocesses $(JOBS) --dist worksteal -m "not slow and not soak"

# As CI runs it: whole runs, killed processes, measured memory, too.
test-all: $(VENV)/.dev
	$(PYTEST) --numprocesses $(JOBS_ALL) --dist worksteal -m "not soak and not examples"

# The examples, for a step each. Those of other frameworks have fifteen environments (build/frameworks), which take minutes, so CI does without.
test-examples: $(VENV)/.dev
	$(PYTEST) --numprocesses $(JOBS) --dist loadfile -m examples

# What needs a CUDA GPU: kernels, steps, the engine and runs there against the CPU. Minutes, most of which PyTorch compiles.
test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu tests/gpu

# vLLM as an engine, and what it makes of our checkpoints. Installing it takes minutes and 4 GB (build/vllm), so CI does without.
test-vllm: $(VENV)/.dev build/vllm/.agentevo
	AGENTEVO_VLLM=build/vllm/bin/python OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/runs/processes/test_vllm.py
	OMP_NUM_THREADS=1 build/vllm/bin/python -m pytest tests/inference/test_vllm_engine.py tests/inference/test_vllm_options.py tests/inference/test_vllm_images.py tests/runs/orchestration/test_vllm_run.py

# AgentEvo beside it, so that it is an engine: what vLLM has brought stays as it is.
build/vllm/.agentevo: build/vllm/.installed pyproject.toml
	build/vllm/bin/python -m pip install --quiet --constraint benchmarks/requirements-vllm.txt --editable '.[lora,serve]' hypothesis pytest pytest-timeout
	touch $@

# vLLM's models that see need torchvision. A build for another torch can't be imported, and nothing else could either.
build/vllm/.installed: benchmarks/requirements-vllm.txt
	$(PYTHON) -m venv build/vllm
	build/vllm/bin/python -m pip install --quiet $(TORCH_INDEX_ARGS) $$(grep ^torch== $<)
	build/vllm/bin/python -m pip install --quiet --no-deps --requirement $<
	build/vllm/bin/python -m pip install --quiet --no-deps $(TORCH_INDEX_ARGS) torchvision==0.28.0
	build/vllm/bin/python -c "import torchvision" || build/vllm/bin/python -m pip uninstall --quiet --yes torchvision
	touch $@

# What real trackers make of what we log, each in an environment of its own (build/trackers): minutes and GBs, so CI does without.
TRACKERS := mlflow swanlab trackio wandb
test-trackers: $(VENV)/.dev $(TRACKERS:%=build/trackers/%/.installed)
	AGENTEVO_TRACKERS=build/trackers $(BIN)/python -m pytest tests/observability/trackers/test_real_trackers.py

build/trackers/%/.installed: tests/observability/trackers/requirements/%.txt
	$(PYTHON) -m venv build/trackers/$*
	build/trackers/$*/bin/python -m pip install --quiet --requirement $<
	touch $@

# Hours: every single case and all examples of properties, programs started cold; 500 kills of each part, then twenty minutes
# of everything with kills of anything, and two runs of `wait` (docs/replay.md).
soak: $(VENV)/.dev
	OMP_NUM_THREADS=1 AGENTEVO_COLD=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal -m "not examples"
	AGENTEVO_FAULT_KILLS=500 $(BIN)/python -m pytest -s tests/faults
	PYTHONPATH=tests/support $(BIN)/python tests/faults/soak.py $(SOAK)
	$(BIN)/python tests/faults/wait_twice.py

# Minutes, as root: a run over network namespaces as hosts, whose links are slow, cut and come back (docs/replay.md).
hosts: $(VENV)/.dev
	$(PIP) install --quiet 'moto[server]' s3fs
	$(PYTEST) --numprocesses $(JOBS) tests/runs/processes/test_hosts.py tests/runs/processes/test_elastic.py

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/run.py

# The documentation site, in build/site. A link that leads nowhere fails. `make docs DOCS=serve` shows it while you write.
DOCS ?= build --quiet
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(DOCS)

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/ast-grep scan --config .ci/ast-grep/sgconfig.yml src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/lint-imports --config .ci/packages.toml
	$(BIN)/python .ci/plain.py
	$(BIN)/python .ci/long.py

venv: $(VENV)/.dev

$(VENV)/.core: $(VENV)/.torch
	$(INSTALL) --editable '.[train]'
	touch $@

$(VENV)/.dev: $(VENV)/.torch
	$(INSTALL) --editable '.[dev,all]'
	touch $(VENV)/.core $@

# Torch goes first and alone, so that TORCH_INDEX_ARGS can't redirect anything else.
$(VENV)/.torch: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "AgentEvo needs Python 3.11 or newer: make ... PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH_INDEX_ARGS) torch
	touch $@
