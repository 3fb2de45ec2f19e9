# The front door: `make` alone lists the targets. Recipes are thin; what they call can be run by itself.
SHELL := /bin/bash
.DEFAULT_GOAL := help

# .env is compose's file; make reads it by compose's rules: what the environment or the command line says wins; quotes,
# a comment after the value (\x23 is its sign, which make itself would take for a comment) and `export` are no part of it.
define read_env
ifeq ($$(origin $(1)),undefined)
$(1) := $$(shell sed -nE 's/^(export +)?$(1)=(.*)$$$$/\2/p' .env | tail -n 1 \
  | sed -E "s/\r$$$$//; s/^([\"'])(.*)\1([[:space:]]+\x23.*|[[:space:]]*)$$$$/\2/; t; s/[[:space:]]+\x23.*$$$$//; s/[[:space:]]+$$$$//")
export $(1)
endif
endef
$(foreach name,$(shell sed -nE 's/^(export +)?([A-Za-z_][A-Za-z0-9_]*)=.*/\2/p' .env 2>/dev/null),$(eval $(call read_env,$(name))))

VENV ?= .venv
DEMO_DIR ?= data/run
PROMPT ?= def
PYTEST_ARGS ?=
BENCH_ARGS ?=
export VENV
multinode := docker compose --file compose.multinode.yaml
# The demo's files stay in the project: never in a nanochat folder that happens to be set.
in_demo := NANOCHAT_BASE_DIR="$(abspath $(DEMO_DIR))" NANOCHAT_DATA_DIR="$(abspath $(DEMO_DIR))/shards"

.PHONY: help
help:
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: demo
demo: venv ## train a small model with two ranks on this machine, no Docker: shards, tokenizer, 100 steps, table, plot
	@cd app && $(in_demo) PYTHONUNBUFFERED=1 "$(abspath $(VENV))/bin/python" -m scripts.demo

.PHONY: venv
venv: ## make .venv with CPU torch and the locked packages (nothing to do when it is there)
	@tools/venv.sh run

.PHONY: image
image: ## build the trainer's image (offline when `make base-image wheels` has been run)
	@docker/build.sh

.PHONY: up
up: image ## train in containers on this machine: prepare the data, then master and worker
	@docker compose up --detach --no-build
	@echo "running: \`make logs\` follows it, \`make ps\` shows the state, \`make down\` stops it"

.PHONY: up-master
up-master: image ## lead a run over several machines: make up-master [NODES=2] [TRAIN_ARGS="--depth 8"]
	@$(multinode) --profile master up --detach --no-build --force-recreate master
	@echo "running: \`make logs\` shows what to type on the other machines, \`make status\` who is here"

.PHONY: up-worker
up-worker: export HOST := $(value HOST)
up-worker: ## take part in the run of the master at HOST: make up-worker HOST=192.168.1.36
	@tools/up-worker.sh

.PHONY: status
status: ## show the run's state, its nodes and their ranks, on any of the machines
	@tools/in-node.sh status

.PHONY: doctor
doctor: export HOST := $(value HOST)
doctor: ## check this machine, and the way to the master: make doctor [HOST=192.168.1.36]
	@$(multinode) run --rm --no-deps --no-TTY $(if $(strip $(HOST)),worker,master) python -m scripts.doctor

.PHONY: logs
logs: ## follow the logs of all containers (Ctrl-C leaves them running)
	@docker compose logs --follow --tail 100

.PHONY: ps
ps: ## show the containers, their health and exit codes
	@docker compose ps --all

.PHONY: down
down: ## stop and remove the containers, on a master for all machines; shards and checkpoints stay on the volume
	@tools/in-node.sh end
	@docker compose down

.PHONY: sample
sample: export PROMPT := $(value PROMPT)
sample: ## write text with the newest checkpoint: make sample PROMPT="def main("
	@$(in_demo) tools/sample.sh "$$PROMPT"

.PHONY: test
test: ## run all tests (those that need Docker skip, with the reason, where there is none)
	@tools/venv.sh dev
	@"$(VENV)/bin/python" -m pytest $(PYTEST_ARGS)

.PHONY: test-faults
test-faults: ## run every fault test, the long ones too: nodes killed, links cut, machines restarted
	@tools/venv.sh dev
	@"$(VENV)/bin/python" -m pytest tests/faults -m "long or not long" $(PYTEST_ARGS)

.PHONY: test-local-2rank
test-local-2rank: ## run the report's two-rank run in two containers and print the table: 1 rank against 2
	@tools/venv.sh dev
	@"$(VENV)/bin/python" -m pytest tests/containers/test_two_ranks.py $(PYTEST_ARGS)

.PHONY: bench
bench: ## measure everything, one table (ours, the limit, ratio) and JSON in data/bench; some 10 minutes
	@tools/venv.sh dev
	@"$(VENV)/bin/python" benchmarks/bench.py $(BENCH_ARGS)

.PHONY: lint
lint: ## check Python, shell, YAML, the Dockerfile and the compose file
	@tools/venv.sh dev
	@tools/lint.sh

.PHONY: base-image
base-image: ## build the base image from Debian packages, for sites with no registry
	@docker/base-image.sh

.PHONY: wheels
wheels: ## download the locked wheels into wheelhouse/, for builds with no network
	@docker/wheels.sh

.PHONY: clean
clean: ## remove the virtual environment, caches, the demo's files; with containers and volumes if Docker is there
	@tools/clean.sh
