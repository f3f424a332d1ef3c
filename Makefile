# Everything runs in .venv, which `make setup` makes; the other targets depend on it.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# Pages are opened in a browser; Debian's is taken where there is none and packages may be installed.
BROWSER = $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)

.PHONY: setup demo test browser lint unit faults fuzz matrix bench lock figures clean

setup: $(READY)

$(READY): requirements/dev.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/dev.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $(READY)

# The main job: search the demo's space on two ranks of this machine, then show what was found.
demo: $(READY)
	$(BIN)/zerotune search examples/demo.yaml
	$(BIN)/zerotune results --top 5

# Side by side: type checking takes a minute of one core, and some tests wait.
test: $(READY)
	$(MAKE) --no-print-directory -j2 lint unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Two workers: one for the tests that train on ranks, one for all others (tests/conftest.py).
unit: $(READY) browser
	$(BIN)/python -m pytest -n 2 --dist loadgroup

browser:
ifeq ($(BROWSER),)
	-@[ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && apt-get update -qq \
	  && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core > /dev/null \
	  || echo "no chromium: the tests that open a page are skipped"
endif

# Kills at 50 random moments during saves; `make test` has three of them.
faults: $(READY)
	$(BIN)/python -m pytest -m faults

# Every three knobs crossed, held against the plain process; `make test` has every two.
matrix: $(READY)
	$(BIN)/python -m pytest -s -m matrix tests/cases tests/zero tests/peers

# Random modules under random knobs; `make test` has a fixed set of them, this takes FUZZ_EXAMPLES new ones (500).
fuzz: $(READY)
	$(BIN)/python -m pytest -m fuzz

# What the engine itself costs, on a quiet machine: one rank against plain PyTorch, a unit event, compiling a schedule.
bench: $(READY)
	$(BIN)/python -m tests.bench.n1
	$(BIN)/python -m tests.bench.events
	$(BIN)/python -m tests.bench.compile

# Resolve the newest versions that pyproject.toml allows are kept as they are installed now.
lock: $(READY)
	$(BIN)/python scripts/lock.py

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis results/runs

# The pictures of docs/, from a step recorded anew on two ranks.
figures: $(READY)
	$(BIN)/python scripts/figures.py
