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

.PHONY: train test test-ranks test-faults test-launchers test-examples test-browser test-long test-families test-versions check docs fix vendor wheel clean help

help:
	@sed -n 's/^#   //p' Makefile; echo "make test | test-ranks | test-faults | test-launchers | test-examples | test-browser | test-long | test-families | test-versions | check | docs | fix | vendor | wheel | clean"

$(VENV)/.python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Torch is installed first and alone: with TORCH_INDEX, it is not held to the constraints' version.
$(VENV)/.runtime: $(VENV)/.python pyproject.toml constraints.txt
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install -q --index-url "$(TORCH_INDEX)" "torch>=2.11",)
	grep -v $(if $(TORCH_INDEX),'^torch==','^$$') $(CONSTRAINTS) > $(VENV)/constraints.txt
	$(BIN)/python -m pip install -q -c $(VENV)/constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(BIN)/python -m pip install -q -c $(VENV)/constraints.txt -e '.[dev]'
	@touch $@

train: $(VENV)/.runtime
	$(BIN)/threefold train $(ARGS)

PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations=10
ELSEWHERE := slow or launchers or examples or browser or long

test: $(VENV)/.dev
	$(PYTEST) -m "not (ranks or $(ELSEWHERE))" $(TESTS)

# Whole runs and meshes that take longer: some ten seconds a file, or more.
test-ranks: $(VENV)/.dev
	$(PYTEST) -m "ranks and not ($(ELSEWHERE))" tests/ranks

# Kills, stalls and lost hosts in their long forms (KILLS=10: a sample). Two hosts need root and iproute2.
test-faults: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m slow tests
	$(BIN)/python benchmarks/chaos.py --kills $(KILLS)

# Real launchers: torchrun, accelerate, mpirun, Slurm, SageMaker's toolkit, two hosts. Their Python parts have their own
# venv. Tests whose launcher is missing are skipped with the reason.
LAUNCHERS := .venv-launchers
DEBIAN := slurm-wlm munge openmpi-bin mpich iproute2

$(LAUNCHERS)/.installed: tests/launchers/requirements.txt $(VENV)/.python
	$(PYTHON) -m venv $(LAUNCHERS)
	$(LAUNCHERS)/bin/python -m pip install -q -r tests/launchers/requirements.txt
	$(LAUNCHERS)/bin/python -m pip install -q --no-deps sagemaker-train==1.27.0
	@touch $@

test-launchers: $(VENV)/.dev $(LAUNCHERS)/.installed
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && ! dpkg -s $(DEBIAN) > /dev/null 2>&1; then \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(DEBIAN); } \
	  || echo "$(DEBIAN): not all could be installed; what needs them is skipped"; fi
	$(BIN)/python -m pytest -q -m launchers tests/launchers

# Every example by the command of its page, and longer versions of tests that are short elsewhere.
test-examples: $(VENV)/.dev
	$(BIN)/python -m pip install -q --no-deps torchao==0.18.0 || echo "torchao cannot be installed; what needs it is skipped"
	$(BIN)/python -m pip install -q --no-deps trl==1.16.0 || echo "trl cannot be installed; what needs it is skipped"
	$(BIN)/python -m pip install -q -c $(VENV)/constraints.txt mlflow-skinny lightning-fabric \
	  || echo "mlflow-skinny or lightning-fabric cannot be installed; what needs them is skipped"
	$(BIN)/python -m pip install -q -c $(VENV)/constraints.txt lm-eval==0.4.13 \
	  || echo "lm-eval cannot be installed; what needs it is skipped"
	$(PYTEST) -m "examples and not long" tests

# The pages of runs in the system's Chromium. Where it cannot be had, they are skipped with the reason.
test-browser: $(VENV)/.dev
	$(BIN)/python -m pip install -q -r tests/browser/requirements.txt || echo "playwright cannot be installed; what needs it is skipped"
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && ! command -v chromium > /dev/null; then \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } \
	  || echo "chromium cannot be installed; what needs it is skipped"; fi
	$(BIN)/python -m pytest -q -m browser tests/browser

# `train.reduce: exact` for 50 steps on every split of up to 8 data ranks, also on 2 cp or tp ranks each; the estimate of
# memory for published models, every family and every mesh; every architecture, example, optimizer and compiled layer in
# all their cases, some of which need what test-examples installs. More than an hour.
test-long: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m long tests

# Every causal architecture of transformers on every mesh; fails if one is wrong, or fails without being refused by name.
test-families: $(VENV)/.dev
	$(BIN)/python benchmarks/families.py --all --check --write docs/models.md

# The oldest and the newest Python, torch and transformers that pyproject admits; docs/versions.md has the table.
test-versions: $(VENV)/.python
	$(BIN)/python tools/versions.py $(VERSIONS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/unit/test_imports.py tests/unit/test_house.py

fix: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The pages of docs/, README.md and the known errors as a site in site/. A link or an anchor that leads nowhere ends it.
DOCS := .venv-docs

$(DOCS)/.installed: docs/requirements.txt $(VENV)/.python
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -q -r docs/requirements.txt
	@touch $@

docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict --clean

# The library of the charts, by npm, at the version and with the checksums of tools/vendor.py.
vendor:
	$(PYTHON) tools/vendor.py

wheel: $(VENV)/.python
	$(BIN)/python -m pip install -q build
	$(BIN)/python -m build --wheel --outdir dist

clean:
	rm -rf $(VENV) $(LAUNCHERS) $(DOCS) .venv-versions build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
