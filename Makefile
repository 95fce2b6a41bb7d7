# `make train` and `make test` need nothing but Python 3.12: the first call sets everything up.

PYTHON ?= $(shell command -v python3.12 || command -v python3)
RUN := .venv/bin/python
READY := .venv/.ready
# Apart from the environment: where jax finds libtpu, it looks for a TPU.
AOT := .venv/aot

.PHONY: train test test-full lint clean

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.12 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 12) else 0)'
	$(PYTHON) -m venv --clear .venv
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

train: $(READY)
	$(RUN) -m experiments.train --config=nano --workdir=runs/nano

lint: $(READY)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports
	.venv/bin/mypy

test: lint
	$(RUN) -m pytest -n 2 --dist loadfile -m "not full"

$(AOT)/libtpu: $(READY)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --target $(AOT) libtpu==0.0.52

test-full: $(AOT)/libtpu
	JAX_PLATFORMS=cpu PYTHONPATH=$(AOT) $(RUN) -m pytest -n 2 --dist loadfile -m full

clean:
	rm -rf .venv build runs *.egg-info
