PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# bf16 matrix products can die with SIGILL where AMX is advertised and refused; tests need no network.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-oldest check bench commands table fuzz configs rooms tampering guarantees survey audit modules notebooks report docs clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 16

setup: $(STAMP) ## create .venv and install lemonx with its tools (once, and when the requirements change)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "lemonx needs Python 3.11 or newer: make PYTHON=/path/to/python3 setup"; exit 1; }
	@echo "setup 1/3: a virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setup 2/3: torch and transformers (the large part)"
	@$(BIN)/python -m pip install --quiet --quiet torch transformers
	@echo "setup 3/3: lemonx and its tools"
	@$(BIN)/python -m pip install --quiet --quiet --editable '.[dev]'
	@touch $@
	@echo "setup done"

# The tests look at the report in a browser, and say so where there is none. Tried once: it may need a network.
BROWSER := $(VENV)/.browser
$(BROWSER): $(STAMP)
	@for name in chromium chromium-browser google-chrome chrome; do command -v $$name >/dev/null && exit 0; done; \
	if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		echo "a browser for the tests of the report: apt-get install chromium"; \
		export DEBIAN_FRONTEND=noninteractive; \
		install="timeout 300 apt-get install -y -qq --no-install-recommends chromium"; \
		{ $$install || { timeout 120 apt-get update -qq && $$install; }; } >/dev/null 2>&1 || \
			echo "it could not be installed: the report is tested without a browser"; \
	else echo "no chromium here: the report is tested without a browser"; fi
	@touch $@

demo: setup ## train a small language model, grow it, train on beside the alternatives, and draw the curves (a minute or two)
	@$(BIN)/python examples/demo.py

# Processes that the tests start would compile the package each time, where no bytecode is written.
test: setup $(BROWSER) ## run the tests and the examples in docstrings
	PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2

# torch 2.6 for Linux comes with CUDA. pip applies PIP_CONSTRAINT to the tools that build lemonx too, and -c does not.
OLDEST := .venv-oldest/bin/python
test-oldest: ## run the tests of the core with Python 3.11 and the oldest releases that lemonx allows (5 GB in .venv-oldest)
	@test -x $(OLDEST) || $(PYTHON) -m venv .venv-oldest
	@PIP_CONSTRAINT= $(OLDEST) -m pip install --quiet -c constraints-oldest.txt -e . hypothesis peft psutil pytest pytest-xdist
	HF_HUB_OFFLINE=1 $(OLDEST) -m pytest -n 2 tests/test_expand.py tests/test_cli.py tests/test_families.py \
		tests/test_fsck.py tests/test_hub.py tests/test_in_memory.py tests/checkpoints tests/verification

check: setup ## lint, format, types, direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	@count=$$(grep -rho 'dict\[str, Any\]' src --include='*.py' | wc -l); test $$count -le 20 || \
		{ echo "dict[str, Any] stands $$count times in src, 20 at most: name the type behind it"; exit 1; }

bench: setup ## measure the speed and memory of an expansion, and add it to benchmarks/history.csv
	$(BIN)/python benchmarks/expand.py --record

commands: setup ## time every command from the moment that it is typed, and write docs/faq.md
	$(BIN)/python docs/make/measured.py commands

table: setup ## write the README's example, the matrix of docs/families.md, and measure docs/exactness.md
	$(BIN)/python docs/make/readme.py --write
	$(BIN)/python docs/make/options.py --write
	HF_HUB_OFFLINE=1 $(BIN)/python docs/make/measured.py exactness

fuzz: setup ## damage headers, indices and configs 100000 times (RUNS=...), and whole folders 20000 times (FOLDERS=...)
	$(BIN)/python benchmarks/fuzz.py --runs $(or $(RUNS),100000)
	$(BIN)/python benchmarks/fuzz.py --folders $(or $(FOLDERS),20000)

configs: setup ## grow models of 3500 random configs, of which some 3000 run: RUNS=... for another number, CASE=... to repeat one, JOBS=...
	$(BIN)/python $(if $(CASE),benchmarks/configs.py --case $(CASE),docs/make/measured.py configs --runs $(or $(RUNS),3500) --jobs $(or $(JOBS),1))

rooms: setup ## count lines and files of every room; REV=... beside those of an earlier commit
	@$(BIN)/python benchmarks/rooms.py $(REV)

tampering: setup ## change entries of every tensor and every field of every config.json: who notices, and what changes
	HF_HUB_OFFLINE=1 $(BIN)/python docs/make/measured.py tampering --entries $(or $(ENTRIES),3)

guarantees: setup ## write the lists of faults and attacks in docs/guarantees.md from the tables that the tests read
	$(BIN)/python docs/make/guarantees.py --write

survey: setup ## measure every model type of transformers, tiny, and write docs/families.md; goes on from RECORD=FILE
	HF_HUB_OFFLINE=1 $(BIN)/python docs/make/survey.py --write --record $(or $(RECORD),docs/results/survey.json) --jobs $(or $(JOBS),2)

audit: setup ## compare every table with a run of its models, and write docs/add-an-architecture.md
	HF_HUB_OFFLINE=1 $(BIN)/python docs/make/measured.py audit --growths

modules: setup ## grow modules composed at random, 10000 of them (RUNS=...), and judge each by inputs of their own; CASE=... repeats one, RECORD=FILE goes on
	$(BIN)/python $(if $(CASE),benchmarks/fuzz_modules.py --case $(CASE),docs/make/measured.py fuzz_modules --runs $(or $(RUNS),10000) $(if $(RECORD),--record $(RECORD)))

notebooks: setup ## run the notebooks of docs/notebooks, and store what they print
	$(BIN)/python docs/make/notebooks.py

report: setup ## write docs/report.html: all results with their curves
	$(BIN)/python docs/make/experiments.py --report

docs: report ## build this documentation as a site, in site/
	$(BIN)/python docs/make/pictures.py --write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

clean: ## remove .venv, caches and build products
	rm -rf $(VENV) .venv-oldest build dist site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
