# Two commands do all the set-up: `make repro` and `make test`. Each builds the environments that it needs, once per
# lock, in the user's cache folder.
PYTHON3 ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/orchestrator/bin
.DEFAULT_GOAL := help
.NOTPARALLEL:
# Nothing of another Python's gets into the environments.
unexport PYTHONPATH PYTHONHOME
# What pytest leaves of each suite, for the summary at the end of `make test`.
SUITES := .pytest_cache/suites
result = --junitxml=$(SUITES)/$(1).xml --override-ini junit_duration_report=total
# Workers of pytest-xdist, a module's tests on one of them: their fixtures are dear. The contract tests mostly wait, so they may be
# more than the cores; an engine's start and a quantizer's run keep two cores busy between them, where one alone leaves one idle.
# One that dies isn't replaced: the next would run the same test again, nine times in all.
workers = --numprocesses=$(1) --dist=loadfile --max-worker-restart=0
# A PROFILE in the environment is somebody else's: this one rewrites params.yaml, so it must be asked for.
ifneq ($(origin PROFILE),command line)
override PROFILE :=
endif
# A fresh clone finds what ruff and mypy made of the same files elsewhere.
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/quantgate
export RUFF_CACHE_DIR := $(CACHE)/ruff
export MYPY_CACHE_DIR := $(CACHE)/mypy
.PHONY: help profile environments doctor repro test lint unit contract e2e gpu-test card-check ui bench lock clean

help: ## what there is
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

profile: # point params.yaml at PROFILE
	@$(PYTHON3) -m pipeline.environments orchestrator
	@$(BIN)/quantgate use $(PROFILE)

environments: $(if $(PROFILE),profile) ## build what the profile in params.yaml needs (a second when built)
	@$(PYTHON3) -m pipeline.environments

doctor: ## can this machine run the profile? PROFILE=NAME asks for another than params.yaml's
	@$(PYTHON3) -m pipeline.environments orchestrator
	@$(BIN)/quantgate doctor $(if $(PROFILE),profile=$(PROFILE))

repro: environments ## quantize, serve, measure, evaluate, decide; then say where the report is (PROFILE=NAME: of that profile)
	@test -d .dvc || $(BIN)/dvc init --quiet
	@$(BIN)/dvc repro
	@$(BIN)/quantgate show

test: environments ## everything, the end-to-end run on the real engine included; a suite that fails doesn't hide the next
	@rm -rf $(SUITES)
	@$(MAKE) --no-print-directory --keep-going lint unit contract e2e; suites=$$?; \
		$(BIN)/python -m tests.summary unit serve_env contract e2e && exit $$suites

lint: environments
	@$(BIN)/ruff format --check --quiet . && $(BIN)/ruff check --quiet . && $(BIN)/mypy

unit: environments ## pure tests, then those that need PyTorch
	@$(PYTHON3) -m pipeline.environments serve
	@$(BIN)/pytest tests/unit $(call workers,2) $(call result,unit); unit=$$?; \
		.venv/serve/bin/python -m pytest tests/serve_env $(call workers,2) $(call result,serve_env) && exit $$unit

contract: environments ## mock server, recorded logs, real argument parsers; lists what only a card can show
	@$(BIN)/pytest tests/contract tests/gpu $(call workers,3) $(call result,contract)

e2e: environments ## real engine, real quantizer
	@$(BIN)/pytest tests/e2e $(call workers,2) $(call result,e2e)

gpu-test: environments ## what only a card can show; writes runs/gpu-test/ for `quantgate calibrate`
	@$(BIN)/pytest tests/gpu

card-check: environments ## the path of a card where there is none: its environment, its kernels, FlashInfer compiled (10 min, 12 GB)
	@$(BIN)/python -m tests.card_check

ui: environments ## MLflow on 127.0.0.1:5000
	@$(BIN)/quantgate ui

bench: environments ## ratios measured side by side in one run
	@$(BIN)/python -m tests.bench

lock: ## write what the dependency groups ask for into the locks; versions that fit stay (remove a lock for the newest)
	@$(PYTHON3) -m pipeline.environments lock

clean: ## forget results, checkpoints and MLflow runs; environments stay in the cache folder
	rm -rf results artifacts mlruns .venv .dvc/cache .dvc/tmp
	find runs -mindepth 2 ! -name dvc.yaml ! -name params.yaml -delete
