# make quickstart   set everything up, build the shipped images, choose one for this machine and run it
# make test         set everything up and run every test
# make gpu-check    set everything up and check this machine's NVIDIA GPU; fails without one
# make bench        set everything up and measure against the bars of docs/benchmarks.md
# make clean        undo what quickstart did

VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test packages lint unit engine gpu gpu-check coverage bench clean

quickstart:
	@ci/quickstart

test: packages lint unit gpu engine coverage

packages:
	ci/engine packages

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# One line of results for each kind of test; what they covered is added up at the end.
unit: $(VENV)/.dev
	rm -f .coverage .coverage.*
	$(BIN)/coverage run -m pytest tests/unit

engine: packages $(VENV)/.dev
	$(BIN)/coverage run -m pytest tests/engine

gpu: $(VENV)/.dev
	$(BIN)/coverage run -m pytest tests/gpu

gpu-check:
	ci/gpu-check

coverage: $(VENV)/.dev
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --fail-under=95
	$(BIN)/coverage report --fail-under=100 --include='imagematrix/select/*'

bench: $(VENV)/.dev
	$(BIN)/python -m pip install -q --group bench
	$(BIN)/python ci/bench

$(VENV)/.dev: pyproject.toml
	ci/venv dev
	touch $@

clean:
	ci/clean
