# Two commands matter: `make run` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# dvc and the stages find each other, and `python` in dvc.yaml is the environment's.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: run test ui setup check base lock params clean

run: setup ## fine-tune: sample pictures if there are none, then the pipeline
	python -m stages.cli sample-data --if-missing
	dvc repro
	-python -m stages.cli tracking sync
	@echo "look at data/evaluate/sheets/before_after.png, then at the run: make ui"

test: setup ## all tests, the fast ones first
	python -m pytest tests -m "not slow" -n auto
	python -m pytest tests -m "slow" -n auto --dist loadfile

ui: setup ## MLflow's page on the local records
	python -m stages.cli tracking ui

check: setup ## lint, format, types
	ruff check .
	ruff format --check .
	pyright

setup: $(VENV)/.ready

# torch first and alone, so that people can choose their build (README); then all the rest, each file by its hash.
$(VENV)/.ready: requirements-torch.txt requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit("Darkroom needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -r requirements-torch.txt
	$(BIN)/pip install --no-deps --require-hashes -r requirements.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable . # the command `darkroom`
	touch $@

params: setup ## make params PRESET=micro: rewrite params.yaml by params/micro.yaml
	python -m stages.cli params $(PRESET)

base: setup ## make data/embedded again: hours; .dvcignore hides its pipeline at other times
	sed -i '/embedded.dvc.yaml/d' .dvcignore
	dvc repro data/embedded/dvc.yaml; code=$$?; git checkout --quiet .dvcignore; exit $$code

lock: setup ## rewrite requirements.lock from pyproject.toml; torch is left out, it is installed on its own
	$(BIN)/pip install uv
	echo "torch; sys_platform == 'never'" | uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
		--no-header --no-annotate --no-emit-index-url --no-emit-package torch --override - --extra dev \
		--output-file requirements.lock pyproject.toml

clean: ## remove the environment; data, store and records stay
	rm -rf $(VENV)
