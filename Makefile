# Two commands for a newcomer: make train, make test. The README shows them as plain commands too.
PYTHON ?= python3
BIN := .venv/bin
CONFIG ?= config/train_shakespeare_cpu.py
CONSTRAINTS ?= constraints.txt
# On Linux without an NVIDIA driver: PyTorch's build for CPUs, gigabytes smaller than the one with CUDA, which
# TORCH_INDEX= (empty) takes. A mirror without this index is no failure.
TORCH_INDEX ?= $(shell [ "$$(uname)" != Linux ] || command -v nvidia-smi >/dev/null \
	|| [ -e /proc/driver/nvidia ] || echo https://download.pytorch.org/whl/cpu)
torch_for = $(if $(TORCH_INDEX),$(1)/pip install -q -c $(CONSTRAINTS) --no-deps --timeout 15 --retries 1 \
	--index-url $(TORCH_INDEX) torch || echo "note: $(TORCH_INDEX) has no torch for us; taking PyPI's")
# The oldest release that the bridge supports: tests try it next to the newest.
OLD_TRANSFORMERS := out/transformers-4.53.3
FRESH := out/wheel/venv/bin

.PHONY: setup train test test-all wheel sample explain bench site lint clean

setup: .venv/installed
.venv/installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv .venv
	$(call torch_for,$(BIN))
	$(BIN)/pip install -c $(CONSTRAINTS) -e ".[train]"
	@touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install -c $(CONSTRAINTS) -e ".[dev]"
	@touch $@

train: setup
	$(BIN)/python -m data shakespeare_char
	$(BIN)/python train.py $(CONFIG)

test: .venv/installed-dev
	$(BIN)/python -m pytest -n 2 --dist=worksteal -m "not slow"

test-all: .venv/installed-dev $(OLD_TRANSFORMERS)
	NANOATTN_OLD_TRANSFORMERS=$(CURDIR)/$(OLD_TRANSFORMERS) $(BIN)/python -m pytest -n 3 --dist=worksteal
	$(MAKE) wheel

$(OLD_TRANSFORMERS): .venv/installed-dev
	$(BIN)/pip install -q --no-deps --target $@ transformers==4.53.3 "tokenizers<0.22" "huggingface_hub<1.0"

# What pip installs, in an environment of its own: alone, then with transformers.
wheel: .venv/installed-dev
	rm -rf out/wheel
	$(BIN)/python -m build --outdir out/wheel
	$(BIN)/python -m twine check --strict out/wheel/*
	$(PYTHON) -m venv out/wheel/venv
	$(call torch_for,$(FRESH))
	$(FRESH)/pip install -q -c $(CONSTRAINTS) out/wheel/*.whl
	FRESH_PYTHON=$(FRESH)/python $(BIN)/python -m pytest tests/test_wheel.py -k "not transformers"
	$(FRESH)/pip install -q -c $(CONSTRAINTS) "$$(echo out/wheel/*.whl)[hf]"
	FRESH_PYTHON=$(FRESH)/python $(BIN)/python -m pytest tests/test_wheel.py -k transformers

sample: setup
	$(BIN)/python sample.py --out_dir=out/shakespeare_cpu --start="ROMEO:"

explain: setup
	$(BIN)/python explain.py --out_dir=out/shakespeare_cpu

bench: setup
	$(BIN)/python bench_mfu.py

.venv/installed-site: .venv/installed
	$(BIN)/pip install -c $(CONSTRAINTS) -e ".[site]"
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
