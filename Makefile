# Two commands for a newcomer: make train, make test. The README shows them as plain commands too.
PYTHON ?= python3
BIN := .venv/bin
CONFIG ?= config/train_shakespeare_cpu.py

.PHONY: setup train test test-all sample explain bench site lint clean

setup: .venv/installed
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -c constraints.txt -e ".[train]"
	@touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install -c constraints.txt -e ".[dev]"
	@touch $@

train: setup
	$(BIN)/python -m data shakespeare_char
	$(BIN)/python train.py $(CONFIG)

test: .venv/installed-dev
	$(BIN)/python -m pytest -n 2 --dist=worksteal -m "not slow"

test-all: .venv/installed-dev  # -n 3: some tests wait for processes of their own
	$(BIN)/python -m pytest -n 3 --dist=worksteal

sample: setup
	$(BIN)/python sample.py --out_dir=out/shakespeare_cpu --start="ROMEO:"

explain: setup
	$(BIN)/python explain.py --out_dir=out/shakespeare_cpu

bench: setup
	$(BIN)/python bench_mfu.py

.venv/installed-site: .venv/installed
	$(BIN)/pip install -c constraints.txt -e ".[site]"
	@touch $@

out/shakespeare_cpu:
	$(MAKE) train

site: .venv/installed-site out/shakespeare_cpu
	$(BIN)/python -m course.site

lint: .venv/installed-dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv out build
