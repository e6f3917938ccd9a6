# `make demo` and `make test` are all that a fresh clone needs: the first one to run fills .venv
# with the packages of requirements.lock. ARGS goes to pytest, PYTHON chooses the interpreter.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
ENGINES := .venv-engines
# Where torch for the CPU comes from, about a tenth of what PyPI's has with it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: demo test test-engines check docs fix

demo: $(READY)
	$(BIN)/quantize demo

# A process for each CPU, so each computes with one thread.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

# Not part of `make test`: fills .venv-engines with SGLang and vLLM, without what they need for GPUs.
test-engines: $(ENGINES)/sglang/ready $(ENGINES)/vllm/ready
	OMP_NUM_THREADS=1 $(ENGINES)/sglang/bin/python -m pytest tests/engines $(ARGS)
	OMP_NUM_THREADS=1 $(ENGINES)/vllm/bin/python -m pytest tests/engines $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py
	$(BIN)/python tools/generate_docs.py --check

docs: $(READY)
	$(BIN)/python tools/generate_docs.py

fix: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit( \
	    "halfbyte needs Python 3.11 to 3.13, $(PYTHON) is %d.%d; name another: make PYTHON=python3.12" % v)'
	@echo "Installing the packages of requirements.lock into .venv; takes a few minutes, once."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(ENGINES)/%/ready: tests/engines/%.txt pyproject.toml
	$(PYTHON) -m venv $(ENGINES)/$*
	$(ENGINES)/$*/bin/python -m pip install --quiet --no-deps --extra-index-url $(TORCH_INDEX) \
	    --requirement tests/engines/$*.txt
	$(ENGINES)/$*/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
