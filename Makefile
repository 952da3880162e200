# A new clone needs only python3 and make: `make demo`, `make test`.
PYTHON ?= python3
BIN := .venv/bin
# Benchmarks that compare with other libraries need them installed.
EXTRAS := $(if $(filter speed gpu rough,$(NAME)),.venv/benchmarks) $(if $(filter tables conditional,$(NAME)),.venv/peers)

.PHONY: install demo test test-all lint format figures pages bench docs test-browser wheel clean

install: .venv/installed

.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

.venv/%: .venv/installed
	$(BIN)/python -m pip install --quiet --editable '.[$*]'
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
	for name in pitchfork convergence spiral bundles rough; do $(BIN)/python examples/$$name.py || exit 1; done

# Without NAME, list the benchmarks.
bench: install $(EXTRAS)
	$(BIN)/python -m benchmarks $(NAME) $(OPTIONS)

# Run the code of the tutorials and the gallery, and write its output and figures into docs/.
pages: install
	$(BIN)/python docs/_execute.py docs/index.md docs/tutorials/*.md docs/gallery.md docs/series.md docs/densities.md docs/rough.md

# The site works without a network: open site/index.html.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test-browser: docs .venv/browser
	$(BIN)/python -m pytest -n 0 tests/test_browser.py

# Build the distribution, install the wheel into a clean environment, and run the README's example and the demo there.
wheel: .venv/release
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/python .ci/check_wheel.py dist/*.whl

clean:
	rm -rf .venv .pytest_cache .ruff_cache build dist figures site
