# `make demo` and `make test` are all that a newcomer needs; both set up .venv first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --constraint requirements.lock

DEMO_PROMPT := What are three benefits of regular exercise?
DEMO_TOKENS := 128

# Of `make fuzz`, in all.
REQUESTS ?= 100000

.PHONY: help setup demo up test fuzz lint format proto clean

help:
	@echo "make setup   create $(VENV) with the versions of requirements.lock"
	@echo "make demo    start everything, stream one answer, show where the time went, stop"
	@echo "make up      start everything and keep it running until Ctrl-C"
	@echo "make test    run all tests"
	@echo "make fuzz    send 100000 good, bad and broken requests to a tiny stack (REQUESTS=...)"
	@echo "make lint    ruff, mypy, buf, and whether the gRPC stubs are fresh"
	@echo "make format  ruff's formatter and its safe fixes"
	@echo "make proto   make the gRPC stubs and the descriptor set from proto/"
	@echo "make clean   remove $(VENV) and caches (models in the user's cache stay)"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is %s; set PYTHON=" % sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@echo "installing into $(VENV), which takes a few minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) --editable '.[dev]'
	@# The official DFlash code is the oracle of a test; its own dependencies are not wanted.
	@$(PIP_INSTALL) --no-deps dflash
	@touch $@

demo: setup
	$(BIN)/flashduet generate --start --max-tokens $(DEMO_TOKENS) "$(DEMO_PROMPT)"

up: setup
	$(BIN)/flashduet up

test: setup
	$(BIN)/python -m pytest

fuzz: setup
	$(BIN)/python -m tests.fuzz --requests $(REQUESTS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/generate_stubs.py --check
	cd proto && $(abspath $(BIN))/buf lint

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: setup
	$(BIN)/python scripts/generate_stubs.py
	cd proto && $(abspath $(BIN))/buf lint

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
