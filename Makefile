# Everything a person or CI runs. Needs Python 3.10 to 3.12 with venv, pip and make; nothing else.
#   make demo      install, then train over a local swarm that loses peers on the way
#   make test      install, then all tests          make check    lint and test
#   make lint      format, style, types, layers     make bench    all benchmarks
#   make install   .venv alone                      make tree     README's file tree from the modules' docstrings
#   make format    let ruff rewrite                 make proto    code from the .proto schemas
#   make clean     remove all that was made
# Another interpreter: make install PYTHON=python3.11. Some tests: make test PYTEST_ARGS="tests/protocols -x".

PYTHON ?= python3
PYTEST_ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed

export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: install demo test check lint format bench tree proto clean

install: $(STAMP)

# The stamp is written last, so that an installation that broke off is taken up again.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 10) <= v <= (3, 12) or sys.exit( \
	  "make: Gossamer needs Python 3.10, 3.11 or 3.12, but $(PYTHON) is %d.%d; try: make install PYTHON=python3.11" % v)'
	@$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear .venv
	@echo "installing into .venv (a first time takes some minutes)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -r requirements.lock
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/gossamer demo

test: $(STAMP)
	@$(BIN)/python -m pytest -q $(PYTEST_ARGS)

check: lint test

lint: $(STAMP)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright
	@$(BIN)/lint-imports --no-cache

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(STAMP)
	@$(BIN)/python -m benchmarks all

tree: $(STAMP)
	@$(BIN)/python -m tests.readme_tree

# An old compiler on purpose: protobuf refuses code that is newer than itself (protocols/proto/generate.py).
proto:
	@.venv-proto/bin/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear .venv-proto
	@.venv-proto/bin/python -m pip install -qq --disable-pip-version-check "grpcio-tools==1.71.*" "setuptools<81"
	@.venv-proto/bin/python -m protocols.proto.generate

clean:
	rm -rf .venv .venv-proto build dist out *.egg-info .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
