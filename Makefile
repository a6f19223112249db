# make demo   trains, exports and evaluates a model on the embedded data, and states its privacy
# make test   runs the tests
# make lint   checks style and the types of the privacy package
#
# PYTHON names the Python 3.11 that makes .venv on first use.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint clean
.DEFAULT_GOAL := demo

demo: $(INSTALLED)
	$(BIN)/python -m tff_dpfedemb.run_federated --output_dir=runs --experiment_name=demo

test: $(INSTALLED)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(INSTALLED): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || \
	  { echo "error: $(PYTHON) is not Python 3.11, the only version that TensorFlow Federated 0.87 runs on here; install it, or name it: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "Making $(VENV): 3 GB, a few minutes, once."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.txt
	@touch $@

clean:
	rm -rf $(VENV)
