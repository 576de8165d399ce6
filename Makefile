# Two commands on a fresh machine: `make train` and `make test`. Needs make and Python 3.11 or newer, nothing else.
PYTHON ?= python3
ARGS ?=
EXTRAS ?= test,dev,triton,nvshmem-bitcode,hf,slurm

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed.stamp
# Two tests run at once, those of one process file by file. Ranks and started commands often wait, for one another or
# for a file, so two of their tests at once use the cores better; few of them are long, so they are shared out singly.
ONE_PROCESS := $(wildcard tests/unit tests/kernels tests/compat)
SEVERAL := $(wildcard tests/e2e tests/dist)

# One thread per process: ranks share the cores, and results do not depend on the machine's core count.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest
BY_FILE := -n 2 --dist loadfile
ONE_BY_ONE := -n 2 --dist worksteal
# pytest's exit code 5 says that a tier has no test (yet), which is no error.
EMPTY_IS_FINE := || [ $$? -eq 5 ]

# Both kinds of tests, with the options in $(1); all run, also where some fail.
define tiers
	@failed=; for tests in "$(BY_FILE) $(ONE_PROCESS)" "$(ONE_BY_ONE) $(SEVERAL)"; do \
		echo "== pytest $(1) $$tests"; $(PYTEST) $(1) --durations=10 $$tests $(ARGS) $(EMPTY_IS_FINE) || failed=1; \
	done; test -z "$$failed"
endef

.DEFAULT_GOAL := help
.PHONY: help install train test check slow aot gpu bench-overlap clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## make .venv with the pinned packages; the other targets do it too

train: $(INSTALLED) ## train the quickstart model on this machine (ARGS="train.steps=20" overrides options)
	$(BIN)/moe-engine train experiment=quickstart run.overwrite=true $(ARGS)

test: $(INSTALLED) ## all tests that need no GPU and are not slow
	$(call tiers,)

check: $(INSTALLED) ## format, lint, types, import rules, fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) $(BY_FILE) tests/unit $(EMPTY_IS_FINE)

slow: $(INSTALLED) ## the long tests: full layout matrix, builds, long runs
	$(call tiers,-m slow --timeout=1800)

aot: $(INSTALLED) ## compile every GPU kernel without a GPU and print what its machine code shows
	$(BIN)/python -m moe_kernels.aot $(ARGS)

gpu: $(INSTALLED) ## the tests for a machine with a CUDA device
	$(PYTEST) -m gpu $(ONE_PROCESS) $(SEVERAL) $(ARGS) $(EMPTY_IS_FINE)

bench-overlap: $(INSTALLED) ## what the overlapped pair hides over a slow wire, as root (ARGS="bench.cases=[real100]": at 100 Mbit/s)
	$(BIN)/moe-engine bench overlap $(ARGS)

clean: ## remove the virtual environment and all caches (keeps runs/ and data_cache/)
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11: name a newer one, for example make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "$(PYTHON) cannot make a virtual environment: install its venv package (Debian: python3-venv)"; exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $@
