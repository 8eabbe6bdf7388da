# Everything a newcomer or CI needs. Each target installs what it uses, once, into .venv.
#   make train                       train the default model on 8 local ranks
#   make train ARGS="CONFIG.yaml"    any arguments of `threefold train`
#   make train TORCH_INDEX=URL       take torch from that index (see pytorch.org/get-started)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
TORCH_INDEX ?=
ARGS ?=
TESTS ?= tests
KILLS ?= 100
VERSIONS ?=

# Without its bytecode every process of the tests would compile torch, transformers and the tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install install-oldest train test test-ranks test-faults test-launchers test-examples test-browser test-stores test-templates test-long test-families test-oldest test-versions test-wheel check check-static check-house check-imports docs fix vendor wheel gpu gpu-wheels clean help

help:
	@sed -n 's/^#   //p' Makefile; echo "make test | test-ranks | test-faults | test-launchers | test-examples | test-browser | test-stores | test-templates | test-long | test-families | test-oldest | test-versions | test-wheel | check | docs | fix | vendor | wheel | gpu | gpu-wheels | clean"

# uv, or pip where it cannot be had.
INSTALL := $(PYTHON) tools/install.py

# What cannot be installed here is skipped with a reason, which tools/ci.py also reads.
SKIP = { echo "$(1)" | tee -a "$${THREEFOLD_CI_NOTES:-/dev/null}"; }

$(VENV)/.python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed" if sys.version_info < (3, 11) else 0)'
	$(INSTALL) $(VENV)
	@touch $@

# Torch is installed first and alone: with TORCH_INDEX, it is not held to the constraints' version.
$(VENV)/constraints.txt: $(VENV)/.python pyproject.toml constraints.txt
	$(if $(TORCH_INDEX),$(INSTALL) $(VENV) --index-url "$(TORCH_INDEX)" "torch>=2.11",)
	grep -v $(if $(TORCH_INDEX),'^torch==','^$$') $(CONSTRAINTS) > $@

$(VENV)/.runtime: $(VENV)/constraints.txt
	$(INSTALL) $(VENV) -c $< -e .
	@touch $@

# At once with what a run needs: what is there is not installed a second time.
$(VENV)/.dev: $(VENV)/constraints.txt
	$(INSTALL) $(VENV) -c $< -e '.[dev]'
	@touch $(VENV)/.runtime $@

# What examples and pages in a browser need besides. Tried anew as long as some of it is missing, but not beside tests.
$(VENV)/.extras: $(VENV)/.dev tests/browser/requirements.txt
	@rm -f $(VENV)/.missing
	$(INSTALL) $(VENV) --no-deps torchao==0.18.0 trl==1.16.0 \
	  || { $(call SKIP,torchao or trl cannot be installed; what needs them is skipped); touch $(VENV)/.missing; }
	$(INSTALL) $(VENV) --no-deps torchtitan==0.3.0 spmd_types==0.2.3 tyro==1.0.17 docstring-parser==0.18.0 \
	  || { $(call SKIP,torchtitan cannot be installed; what needs it is skipped); touch $(VENV)/.missing; }
	DS_BUILD_OPS=0 $(INSTALL) $(VENV) --no-deps --no-build-isolation deepspeed==0.19.8 hjson py-cpuinfo msgpack einops ninja \
	  || { $(call SKIP,deepspeed cannot be installed; what needs it is skipped); touch $(VENV)/.missing; }
	$(INSTALL) $(VENV) -c $(VENV)/constraints.txt mlflow-skinny lightning-fabric \
	  || { $(call SKIP,mlflow-skinny or lightning-fabric cannot be installed; what needs them is skipped); touch $(VENV)/.missing; }
	$(INSTALL) $(VENV) -c $(VENV)/constraints.txt lm-eval==0.4.13 \
	  || { $(call SKIP,lm-eval cannot be installed; what needs it is skipped); touch $(VENV)/.missing; }
	$(INSTALL) $(VENV) -r tests/browser/requirements.txt \
	  || { $(call SKIP,playwright cannot be installed; what needs it is skipped); touch $(VENV)/.missing; }
	@[ -e $(VENV)/.missing ] && [ -z "$${THREEFOLD_CI_NOTES:-}" ] || touch $@

# Everything that goes into .venv, so that nothing changes under tests that run side by side.
install: $(VENV)/.dev $(VENV)/.extras

train: $(VENV)/.runtime
	$(BIN)/threefold train $(ARGS)

PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations=10
# The files with tests that have a marker: what else there is need not be imported.
WITH = $(shell grep -rlE 'mark\.$(1)\b' tests --include='test_*.py' | sort)
ELSEWHERE := slow or launchers or examples or browser or stores or long

# Of all tests, what `make check` asks is not asked a second time, and what is all elsewhere not imported.
ASIDE := $(if $(filter tests,$(TESTS)),$(addprefix --ignore=tests/,unit/test_imports.py unit/test_house.py browser stores))

test: $(VENV)/.dev
	$(PYTEST) -m "not (ranks or $(ELSEWHERE))" $(ASIDE) $(TESTS)

# Whole runs and meshes that take longer: some ten seconds a file, or more.
test-ranks: $(VENV)/.dev
	$(PYTEST) -m "ranks and not ($(ELSEWHERE))" tests/ranks

# Kills, stalls and lost hosts in their long forms (KILLS=10: a sample). Two hosts need root and iproute2.
test-faults: $(VENV)/.dev
	$(BIN)/python -m pytest -q --durations=10 -m "slow and not long" $(call WITH,slow)
	$(BIN)/python benchmarks/chaos.py --kills $(KILLS)

# Real launchers: torchrun, accelerate, mpirun, Slurm, SageMaker's toolkit, two hosts. Their Python parts have their own
# venv. Tests whose launcher is missing are skipped with the reason.
LAUNCHERS := .venv-launchers
DEBIAN := slurm-wlm munge openmpi-bin mpich iproute2

# The system's packages of a list: as root, where one of them is missing.
APT = if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && ! dpkg -s $(1) > /dev/null 2>&1; then \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(1); } \
	  || $(call SKIP,$(1): not all could be installed; what needs them is skipped); fi

$(LAUNCHERS)/.installed: tests/launchers/requirements.txt $(VENV)/.python
	$(INSTALL) $(LAUNCHERS) -r tests/launchers/requirements.txt
	$(INSTALL) $(LAUNCHERS) --no-deps sagemaker-train==1.27.0
	@touch $@

test-launchers: $(VENV)/.dev
	@$(MAKE) $(LAUNCHERS)/.installed || $(call SKIP,$(LAUNCHERS) cannot be installed; what needs it is skipped)
	@$(call APT,$(DEBIAN))
	$(BIN)/python -m pytest -q --durations=10 -m "launchers and not long" tests/launchers

# Examples by the command of their page (those of minutes: test-long), and longer versions of tests that are short elsewhere.
test-examples: install
	$(PYTEST) -m "examples and not long" $(call WITH,examples)

# The pages of runs in the system's Chromium. Where it cannot be had, they are skipped with the reason.
test-browser: install
	@command -v chromium > /dev/null || $(call APT,chromium)
	$(BIN)/python -m pytest -q --durations=10 -m "browser and not long" tests/browser

# Real servers of object stores, from a venv of their own. Where they cannot be had, what needs them is skipped with the reason.
STORES := .venv-stores

$(STORES)/.installed: tests/stores/requirements.txt $(VENV)/.python
	$(INSTALL) $(STORES) -r tests/stores/requirements.txt
	@touch $@

test-stores: $(VENV)/.dev
	@$(MAKE) $(STORES)/.installed || $(call SKIP,$(STORES) cannot be installed; what needs it is skipped)
	$(BIN)/python -m pytest -q --durations=10 -m "stores and not long" tests/stores

# Published chat templates, by tests/published_templates.txt: those in the Hub's cache, or in a folder:
# make test-templates THREEFOLD_TEMPLATES=FOLDER
test-templates: $(VENV)/.dev
	THREEFOLD_TEMPLATES=$(THREEFOLD_TEMPLATES) $(BIN)/python -m pytest -q -n 2 -rs tests/unit/test_published_templates.py

# `train.reduce: exact` for 50 steps on every split of up to 8 data ranks, also on 2 cp or tp ranks each; the estimate of
# memory for published models, every family and every mesh; every architecture, example, optimizer and compiled layer in
# all their cases; every launcher with a run, every hang on a second mesh; 2,000 histories of folders, every ending of a run.
# More than an hour.
test-long: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m long tests
	$(MAKE) test-wheel

# Every causal architecture of transformers on every mesh; fails if one is wrong, or fails without being refused by name.
test-families: $(VENV)/.dev
	$(BIN)/python benchmarks/families.py --all --check --write docs/models.md

# What depends on versions, on the oldest Python, torch and transformers that pyproject admits.
install-oldest: $(VENV)/.python
	$(BIN)/python tools/versions.py oldest --install

test-oldest: $(VENV)/.python
	$(BIN)/python tools/versions.py oldest

# Before a release: all of it, on the oldest and on the newest that can be had.
test-versions: $(VENV)/.python
	$(BIN)/python tools/versions.py --all $(VERSIONS)

# Two at a time: some wait for processes of their own.
check: $(VENV)/.dev
	@$(MAKE) --no-print-directory -j 2 -O check-imports check-torch check-static check-house

check-static:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

check-house:
	$(BIN)/python tools/house.py

check-imports:
	$(BIN)/python -m pytest -q -p no:cacheprovider -k "not loads_no_torch" tests/unit/test_imports.py tests/unit/test_house.py

# Each module in a process of its own.
check-torch:
	$(BIN)/python -m pytest -q -p no:cacheprovider -k loads_no_torch tests/unit/test_imports.py

fix: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The pages of docs/, README.md, CHANGELOG.md and the known errors as a site in site/. A link or an anchor that leads nowhere ends it.
DOCS := .venv-docs

$(DOCS)/.installed: docs/requirements.txt $(VENV)/.python
	$(INSTALL) $(DOCS) -r docs/requirements.txt
	@touch $@

# Draws the diagrams. Without npm the site shows them as text.
$(DOCS)/mermaid.min.js: tools/vendor.py $(DOCS)/.installed
	-$(BIN)/python tools/vendor.py --docs $(DOCS)

docs: $(DOCS)/.installed $(DOCS)/mermaid.min.js
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict --clean

# The library of the charts, by npm, at the version and with the checksums of tools/vendor.py.
vendor:
	$(PYTHON) tools/vendor.py

# The wheel and the sdist of a release, and what somebody has who installs them: the wheel on each Python of its classifiers
# that is here, the sdist by its tests. Minutes a Python, and gigabytes where torch's CUDA build comes with it.
wheel: $(VENV)/.python
	rm -rf dist
	$(BIN)/python -m pip install -q build
	$(BIN)/python -m build --outdir dist

test-wheel: $(VENV)/.dev wheel
	$(BIN)/python tools/built.py dist
	$(BIN)/python tools/built.py dist --sdist

# All that a GPU is asked, in pieces that are kept as they come; benchmarks/gpu.py has the order. On a machine with a CUDA build
# of torch, and without a network after `make gpu-wheels` elsewhere: ONLY="PIECE ...", TO=FOLDER, SECONDS=580.
SECONDS ?= 580
gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu.py --seconds $(SECONDS) $(if $(ONLY),--only $(ONLY),) $(if $(TO),--to $(TO),)

gpu-wheels:
	$(PYTHON) -m pip download -q --no-deps --only-binary :all: --implementation cp --python-version 3.12 \
	  --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 -d gpu-wheels -r benchmarks/gpu-wheels.txt
	du -sh gpu-wheels

clean:
	rm -rf $(VENV) $(LAUNCHERS) $(STORES) $(DOCS) .venv-versions build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
