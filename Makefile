# Each target sets up .venv when it is missing: only Python >= 3.10 and make are needed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
READY_DEV := .venv/.ready-dev
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all pytest lint docs wheel bench clean

demo: $(READY) ## Train on the bundled emoji on CPU, evaluate, write the report
	$(BIN)/leanclip train --recipe demo --name demo --overwrite
	$(BIN)/leanclip evaluate logs/demo
	@rm -rf logs/demo/search
	$(BIN)/leanclip embed logs/demo emoji logs/demo/search
	$(BIN)/leanclip report logs/demo
	@echo 'search the emoji by a sentence or an image: $(BIN)/leanclip search logs/demo/search'

test: lint docs pytest ## What CI runs

pytest: $(READY_DEV)
	$(BIN)/pytest -q -n 3 --dist loadfile --no-loadscope-reorder

test-all: $(READY_DEV) lint docs ## The same and the long jobs, with coverage
	$(BIN)/pytest --cov --cov-report=term:skip-covered -q -m ""

lint: $(READY_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: $(READY_DEV) ## The documentation as a site in build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel: $(READY_DEV) ## Build the wheel, install it into an empty environment and train with it
	rm -rf dist build/wheel-test
	$(BIN)/python -m build --wheel
	$(PYTHON) -m venv build/wheel-test
	build/wheel-test/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd build && wheel-test/bin/leanclip train --recipe demo --max-steps 10 --name wheel --overwrite

bench: $(READY_DEV) ## The benchmarks that a CPU can run; the results go to benchmarks/results
	$(BIN)/python benchmarks/bench_data.py --skip-index

clean: ## Remove the environment, caches and logs
	rm -rf .venv build dist logs .pytest_cache .ruff_cache .hypothesis .coverage src/*.egg-info

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -e .
	touch $@

$(READY_DEV): $(READY)
	$(PIP) -e '.[dev]'
	touch $@
