# `make quickstart`, `make quickstart-train` and `make test` install what they need into .venv first.
PYTHON ?= python3
DATASET ?= python_docs
SERVE ?= 1
METHODS ?= untrained twinbert scalingdoc scalingdual scalingnote
# A method is a file of configs/methods, or FILE:VARIANT: METHODS="scalingnote embeddistill:matching".
METHOD_FILES = $(foreach method,$(METHODS),configs/methods/$(subst :,.yaml:,$(method))$(if $(findstring :,$(method)),,.yaml))
SET ?=
REPEAT ?= 1
BIN := .venv/bin
CONFIG := configs/quickstart/$(DATASET).yaml
DATA := $(if $(filter-out python_docs,$(DATASET)),data/$(DATASET))
# Real data beside the checkout, where there is some; a user's machine downloads it instead.
ifneq ($(wildcard ../shared/data),)
export SCALINGNOTE_DATA ?= $(abspath ../shared/data)
endif

.PHONY: quickstart quickstart-train compare benchmarks docs test test-slow check image-check version-check readme-check audit format proto lock clean

# A published model, its query side distilled into a table, hybrid search.
quickstart: .venv/installed-quickstart
	$(BIN)/scalingnote run configs/published/python_docs.yaml $(SET:%=--set %) $(if $(filter-out 0,$(SERVE)),--serve)

# Both towers trained from clicks, from random weights, then stage II.
quickstart-train: .venv/installed $(DATA)
	$(BIN)/scalingnote run $(CONFIG) $(SET:%=--set %) $(if $(filter-out 0,$(SERVE)),--serve)

compare: .venv/installed $(DATA)
	$(BIN)/scalingnote compare $(CONFIG) --methods $(METHOD_FILES) $(SET:%=--set %)

# A public data set in our columns.
data/%: .venv/installed
	$(BIN)/python -m benchmarks.public_sets $*

# Every benchmark at a small size into build/benchmarks/COMMIT, about an hour on 2 cores; compare: python -m benchmarks.compare OLD NEW.
benchmarks: .venv/installed-bench
	$(BIN)/python -m benchmarks.suite --repeat $(REPEAT)

# The documentation as a site in build/site; a broken link fails. `make docs DOCS=serve`: at http://localhost:8000, built anew at every change.
DOCS ?= build
docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(DOCS)

test: .venv/installed-dev
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

# Clusters that lose nodes, killed drivers and servers, the wheel in an environment of its own.
test-slow: .venv/installed-dev
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m slow

check: .venv/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest tests/core/test_config.py

# Every line of the Dockerfile in a clean directory; CLEAN=--clean installs all packages anew, as the image does.
# Of the images with GPU packages, these are only resolved: the package index must have them all.
image-check: .venv/installed-dev
	$(BIN)/python tests/image_check.py $(CLEAN)
	$(BIN)/python tests/image_check.py --variant gpu
	$(BIN)/python tests/image_check.py --variant vllm

# The tests of models and training with other versions than the pinned ones: VERSIONS="torch==2.14.1".
VERSIONS ?= torch==2.14.1
version-check: .venv/installed-dev
	$(BIN)/python tests/version_check.py $(VERSIONS)

# The README's first commands from the wheel with the real model, over five minutes; `make test-slow` runs them with a small one.
readme-check: .venv/installed-dev
	$(BIN)/python tests/readme_check.py $(CLEAN)

# Known vulnerabilities of the pinned versions; needs the network.
audit: .venv/installed-dev
	$(BIN)/pip-audit --strict --no-deps --disable-pip -r constraints.txt

format: .venv/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Code of the gRPC gateway, committed; a test compares it with a fresh generation.
proto: .venv/installed-dev
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. scalingnote/serve/grpc/scalingnote.proto

# Versions change here and nowhere else: edit pyproject.toml, run this, run the tests, commit both.
lock: .venv/installed-dev .venv/installed-docs
	$(BIN)/pip freeze --exclude-editable | grep -v '^torch==' > constraints.txt
	echo 'torch==2.13.0' >> constraints.txt
	$(BIN)/python tests/gpu_versions.py --write

clean:
	rm -rf .venv runs build *.egg-info

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ScalingNote needs Python 3.11 or newer, found " + sys.version.split()[0] + ": make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cpu]'
	touch $@

.venv/installed-quickstart: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cpu,quickstart]'
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cpu,dev]'
	touch $@

.venv/installed-bench: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cpu,bench]'
	touch $@

# Neither torch nor Ray: the reference is read from settings and parser.
.venv/installed-docs: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@
