# `make demo` and `make test` are all a new clone needs: python3 and make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test test-all lint format figures bench bench-gpu bench-memory bench-dimension bench-density bench-hard bench-coverage bench-estimate bench-first bench-tables bench-small bench-conditional bench-noise bench-sampling bench-series bench-growth bench-rough bench-devices docs test-browser clean

install: .venv/installed

.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/roughflow demo --out figures

test: install
	$(BIN)/python -m pytest

test-all: install
	$(BIN)/python -m pytest -m ''

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

figures: install
	$(BIN)/python examples/convergence.py
	$(BIN)/python examples/spiral.py
	$(BIN)/python examples/bundles.py
	$(BIN)/python examples/rough.py

.venv/benchmarks: .venv/installed
	$(BIN)/python -m pip install --quiet --editable '.[benchmarks]'
	touch $@

bench: .venv/benchmarks
	$(BIN)/python -m benchmarks.speed

bench-gpu: .venv/benchmarks
	$(BIN)/python -m benchmarks.gpu

bench-memory: install
	$(BIN)/python -m benchmarks.memory

bench-dimension: install
	$(BIN)/python -m benchmarks.dimension

bench-density: install
	$(BIN)/python -m benchmarks.density

bench-hard: install
	$(BIN)/python -m benchmarks.hard

bench-coverage: install
	$(BIN)/python -m benchmarks.coverage

bench-estimate: install
	$(BIN)/python -m benchmarks.estimate_speed

bench-first: install
	$(BIN)/python -m benchmarks.first_calls

.venv/peers: .venv/installed
	$(BIN)/python -m pip install --quiet --editable '.[peers]'
	touch $@

bench-tables: .venv/peers
	$(BIN)/python -m benchmarks.tables

bench-small: install
	$(BIN)/python -m benchmarks.small_tables

bench-conditional: .venv/peers
	$(BIN)/python -m benchmarks.conditional

bench-noise: install
	$(BIN)/python -m benchmarks.noise

bench-sampling: install
	$(BIN)/python -m benchmarks.sampling
	$(BIN)/python -m benchmarks.sampling_speed

bench-series: install
	$(BIN)/python -m benchmarks.series
	$(BIN)/python -m benchmarks.transition_reference

bench-devices: install
	$(BIN)/python -m benchmarks.devices

bench-growth: install
	$(BIN)/python -m benchmarks.growth

bench-rough: .venv/benchmarks
	$(BIN)/python -m benchmarks.rough

# Pages that need no network to be read: open site/index.html.
.venv/docs: .venv/installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

.venv/browser: .venv/docs
	$(BIN)/python -m pip install --quiet --editable '.[browser]'
	touch $@

test-browser: docs .venv/browser
	$(BIN)/python -m pytest -n 0 tests/test_browser.py

clean:
	rm -rf .venv .pytest_cache .ruff_cache build dist figures site
