# make demo | test | lint | docs | bench | venv.  Each first makes .venv when it is missing or older
# than pyproject.toml or constraints.txt.
#
#   PYTHON=python3.12      which interpreter .venv is made from (3.11 or newer)
#   PIP_ARGS=...           further arguments of pip install (an index that offers torch for CPU)
#   TORCH=2.15.0           another torch than the pinned one, in .venv-torch-2.15.0
#   NEWEST=1               the newest transformers and timm instead of the pinned ones, in .venv…-newest
#   ARGS=...               further arguments of pytest, the demo or the benchmarks
#   SLOW=1                 make test runs the slow tests too, and those of benchmarks/published
#   WORKERS=3              processes that share the tests (some wait for ranks that they start);
#                          0: all in one, for a debugger

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
TORCH ?=
NEWEST ?=
VENV := .venv$(TORCH:%=-torch-%)$(if $(NEWEST),-newest)
BIN := $(VENV)/bin
READY := $(VENV)/.ready

WORKERS ?= 3
# What is not pinned in such an environment: torch wants a setuptools of its own, transformers others.
LOOSE := $(if $(TORCH),torch setuptools) $(if $(NEWEST),transformers timm huggingface_hub tokenizers)
PINS := $(if $(TORCH)$(NEWEST),$(VENV)/constraints.txt,constraints.txt)
SELECTION := $(if $(SLOW),-o "testpaths=tests benchmarks/published/tests",-m "not slow")

.PHONY: help venv demo test lint format docs bench clean
help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -11

venv: $(READY)

# timm needs torchvision, whose wheel is made for CUDA and breaks transformers beside a CPU torch:
# it goes into a folder of its own, without the file that breaks, and only what uses timm's models
# looks into it: PYTHONPATH=.venv/torchvision-apart python examples/vision.py
PIP = $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_ARGS) \
  -c $(PINS)

# --no-compile: bytecode is written when a module is first imported, which halves the set-up; where
# that is switched off, torch's is written now, or every process would compile all of it again.
# The constraints pin torch, so that no newer one (gigabytes of CUDA packages) is ever considered.
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || \
	  { echo "make: there is no '$(PYTHON)'; install Python 3.11 or newer, or: make $(MAKECMDGOALS) PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $$($(PYTHON) --version) is too old, 3.11 or newer is needed; try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "make: $(PYTHON) cannot make virtual environments; on Debian: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(if $(TORCH)$(NEWEST),@sed $(LOOSE:%=-e '/^%==/d') constraints.txt > $(PINS))
	$(PIP) -e '.[test,lint,docs,bench]' $(TORCH:%=torch==%)
	@$(PIP) --no-deps timm && $(PIP) --no-deps --target $(VENV)/torchvision-apart torchvision && \
	  : > $(VENV)/torchvision-apart/torchvision/_meta_registrations.py || \
	  echo "make: timm or torchvision cannot be installed; tests of timm's models are left out"
	@test -z "$$PYTHONDONTWRITEBYTECODE" || PYTHONDONTWRITEBYTECODE= $(BIN)/python -m compileall -qq \
	  -j 0 $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch || \
	  true # some of its files are for newer Pythons
	@touch $@
	@echo "ready: $(BIN)/pdcompile $(BIN)/torchrun"

demo: $(READY)
	$(BIN)/python examples/demo.py $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(SELECTION) $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	$(BIN)/python docs/build.py
	$(BIN)/python docs/sources.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "written: out/site/index.html"

# All but a module, what needs arguments, and what memory.py starts.
BENCHMARKS = $(filter-out $(patsubst %,benchmarks/%.py,against compatibility graphs models whole_ranks), \
  $(wildcard benchmarks/[a-z]*.py))

bench: $(READY)
	@set -e; for file in $(BENCHMARKS); do echo "== $$file"; $(BIN)/python $$file $(ARGS); done

clean:
	rm -rf .venv .venv-* build dist *.egg-info out .pytest_cache .mypy_cache .ruff_cache .hypothesis
