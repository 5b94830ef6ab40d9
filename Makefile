# Needs Python 3.11 or newer and make; everything else goes into .venv.
# All paths are relative, so that a clone may live anywhere, also below a folder with spaces.

SHELL := /bin/sh
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# The first interpreter that is new enough and starts; `make PYTHON=/path/to/python …` says another.
CANDIDATES := python3.11 python3.12 python3.13 python3 python
PYTHON ?= $(shell for p in $(CANDIDATES); do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)

# Some environments forbid Python to keep what it compiled: a mesh is many processes, and each would compile all
# of our modules again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv/bin
JOB ?= examples/stdlib-gpt.yaml
ARGS ?=
SCRIPTS ?=
# How the tests are run; `scripts/run_tests.py` gives a test that failed one more chance, alone, and calls it FLAKY.
PYTEST ?= -m pytest
DATA ?= ../shared/data

.PHONY: help
help: ## this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile
	@echo '  ARGS="…" is handed on to the command behind demo, pytest and a single bench-…; JOB=file.yaml to demo'

.PHONY: demo
demo: setup ## an embedded mesh of two clusters trains the example and goes away again
	@$(VENV)/dmsc demo $(JOB) $(ARGS)

.PHONY: demo-chaos
demo-chaos: setup ## the same with instances, a cluster, the orchestrator and the server killed: what does it cost?
	@$(VENV)/dmsc chaos examples/chaos-gpt.yaml --private --every 8s --faults 5 --seed 2 \
		--what instance,freeze,cluster,orchestrator,server --plot runs/chaos.svg $(ARGS)

.PHONY: examples
examples: setup ## each example as one process, 2 × 2 with a kill, resumed: one SHA-256; ARGS="--only unet --replicas 2,4 --kills 10 --set training.precision=bf16", or --plain: beside a plain loop
	@$(VENV)/python -m benchmarks.examples $(ARGS)

.PHONY: large
large: setup ## models that no process may hold, by four instances with room for 0.4 of the state; ARGS="--only llama"
	@$(VENV)/python -m benchmarks.larger_than_a_node $(ARGS)

.PHONY: compare-scripts
compare-scripts: setup ## nanoGPT, run_clm.py, torchvision's classification out of SCRIPTS=DIR, and the same here: 50 losses of each
	@test -n "$(SCRIPTS)" || { echo 'make: SCRIPTS=DIR is missing: the folder of checkouts of nanoGPT, transformers and vision'; exit 2; }
	@$(VENV)/python -m benchmarks.compare_scripts --scripts "$(SCRIPTS)" $(ARGS)

.PHONY: pretrained-llama
pretrained-llama: setup ## a Llama of plain transformers in three shards goes in, is fine-tuned, comes out: are the logits its own?
	@$(VENV)/python -m benchmarks.pretrained_llama $(ARGS)

.PHONY: soak-edges
soak-edges: setup ## frozen server, full disk, garbage values, no room: 20 runs; ARGS="--runs 40 --minutes 9", goes on
	@$(VENV)/python -m benchmarks.soak_edges $(ARGS)

.PHONY: data-build-kills
data-build-kills: setup ## builds of a data set with 1, 2 and 4 replicas, 50 kills in each: one digest; ARGS="--kills 10 --seed 7"
	@$(VENV)/python -m benchmarks.data_build_kills $(ARGS)

.PHONY: soak-upgrade
soak-upgrade: setup ## a state folder that older software, out of git's history, has written: does today's go on with it?
	@$(VENV)/python -m benchmarks.soak_upgrade $(ARGS)

# Collected once beside mypy, tests are compiled for all processes of pytest, each of which would do it again.
.PHONY: test
test: lint layers ## everything that must pass: style and layers, then types and all tests beside each other
	@$(MAKE) types & types=$$!; trap 'kill $$types 2>/dev/null' INT TERM; \
	$(VENV)/python -m pytest --collect-only -qq >/dev/null 2>&1; \
	$(MAKE) pytest; tests=$$?; \
	wait $$types || { echo 'make: mypy found something, above or in `make types`'; exit 2; }; \
	exit $$tests

.PHONY: check
check: lint types layers ## the quick half of `test`

.PHONY: pytest
pytest: setup-dev ## the tests alone, four files at a time, e.g. make pytest ARGS="tests/unit -k ledger"
	@$(VENV)/python $(PYTEST) -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

.PHONY: test-matrix
test-matrix: ## the long matrices, which `make test` leaves out: the same faults in more shapes and places
	@$(MAKE) pytest ARGS="-m matrix tests/integration/mesh $(ARGS)"

.PHONY: test-queue-events
test-queue-events: ## 40,000 random events in virtual time through the queue's decisions, with each of four seeds
	@DMSC_QUEUE_EVENTS=10000 DMSC_QUEUE_SEEDS=1,2,3,4 $(MAKE) pytest ARGS="tests/unit/entities/queue/test_random_events.py $(ARGS)"

.PHONY: test-recut-schedules
test-recut-schedules: ## 2,000 simulated jobs with 0, 1 and 10 re-cuts, and deaths in each phase: one hash; minutes
	@DMSC_RECUT_SCHEDULES=2000 $(MAKE) pytest ARGS="-rP --dist load tests/sim/test_recut.py $(ARGS)"

.PHONY: lint
lint: setup-dev ## ruff: rules and format, changes nothing
	@$(VENV)/ruff check .
	@$(VENV)/ruff format --check .

.PHONY: types
types: setup-dev ## mypy, strict
	@$(VENV)/mypy

.PHONY: layers
layers: setup-dev ## import-linter: who may import whom
	@$(VENV)/lint-imports --no-cache

.PHONY: audit
audit: setup-dev ## bandit, dependencies, their known flaws, who may do what on a live server; ARGS="--offline --no-mutants"
	@$(VENV)/python -c 'import bandit, pip_audit' 2>/dev/null \
		|| $(VENV)/python -m pip install --quiet --retries 0 --editable '.[audit]' 2>/dev/null \
		|| echo 'bandit and pip-audit can not be installed here'
	@$(VENV)/python scripts/audit.py $(ARGS)

.PHONY: format
format: setup-dev ## ruff: mend what can be mended
	@$(VENV)/ruff check --fix .
	@$(VENV)/ruff format .

.PHONY: docs
docs: setup ## rewrite what docs/ derive from the code: the table of subjects, job files and their JSON Schema
	@$(VENV)/python scripts/generate_protocol.py
	@$(VENV)/python scripts/generate_job_file.py

.PHONY: structure
structure: setup ## files, imports, levels and rooms of each package; ARGS="--pairs entities.orchestrator"
	@$(VENV)/python scripts/structure.py $(ARGS)

.PHONY: bench
bench: ## all four below with their defaults (their options differ: ARGS goes to one of them)
	@test -z "$(ARGS)" || { echo 'make bench takes no ARGS: each benchmark has options of its own; make bench-bus, bench-training, bench-readiness or bench-detection ARGS="…"'; exit 2; }
	@for part in bus training readiness detection; do $(MAKE) "bench-$$part" || exit 1; done

.PHONY: bench-bus
bench-bus: setup ## typed messages against raw nats-py
	@$(VENV)/python benchmarks/bus_cost.py $(ARGS)

.PHONY: bench-doors
bench-doors: setup ## connecting and asking through the guarded bus, beside a plain token
	@$(VENV)/python benchmarks/doors.py $(ARGS)

.PHONY: bench-before
bench-before: setup ## what the bus costs beside software of before, out of git's history; ARGS="--from COMMIT"
	@$(VENV)/python -m benchmarks.side_by_side $(ARGS)

.PHONY: bench-training
bench-training: setup ## steps against torch's pipeline and DDP
	@$(VENV)/python benchmarks/training.py $(ARGS)

.PHONY: bench-registry-models
bench-registry-models: setup ## ms until a moved alias is seen with 10,000 versions of a model; whether history and lineage are right
	@$(VENV)/python benchmarks/registry_models.py $(ARGS)

.PHONY: bench-data
bench-data: setup ## samples/s and memory from file to tensor, beside DataLoader, StatefulDataLoader, MosaicML Streaming
	@$(VENV)/python -m benchmarks.data $(ARGS)

.PHONY: bench-build
bench-build: setup ## MB/s from JSON lines to packed windows: units of a build, beside datasets.map
	@$(VENV)/python -m benchmarks.data_build $(ARGS)

.PHONY: bench-sums
bench-sums: setup ## nanoseconds per parameter of exact sums: by the kernel, by torch, beside float sums
	@$(VENV)/python -m benchmarks.exact_sums $(ARGS)

.PHONY: bench-serving
bench-serving: setup ## model services under kills, gaps, what door and mesh add, from zero, beside transformers; ARGS="--only gap"
	@$(VENV)/python -c 'import litserve' 2>/dev/null \
		|| $(VENV)/python -m pip install --quiet --retries 0 --editable '.[bench-serving]' 2>/dev/null \
		|| echo 'LitServe can not be installed here: the comparison with it is skipped'
	@$(VENV)/python -m benchmarks.serving $(ARGS)

.PHONY: bench-step-cost
bench-step-cost: setup ## CPU milliseconds, page faults and wake-ups per training step, by process
	@$(VENV)/python benchmarks/step_cost.py $(ARGS)

.PHONY: bench-readiness
bench-readiness: setup ## waiting times of a mesh and of a job, memory of the control plane
	@$(VENV)/python benchmarks/readiness.py $(ARGS)

.PHONY: bench-detection
bench-detection: setup ## from a death to the verdict on it
	@$(VENV)/python benchmarks/detection.py $(ARGS)

.PHONY: bench-faults
bench-faults: setup ## stalls, goodput, waste and hashes under faults, beside their bars, torchrun and torchft
	@$(VENV)/python -c 'import torchft' 2>/dev/null \
		|| $(VENV)/python -m pip install --quiet --retries 0 --editable '.[bench-peers]' 2>/dev/null \
		|| echo 'torchft can not be installed here: the comparison with it is skipped'
	@$(VENV)/python benchmarks/faults.py $(ARGS)

.PHONY: bench-machines
bench-machines: setup ## machines that come for jobs and go: how soon, ordered twice under kills, two gangs at once; ARGS="--only cycle"
	@$(VENV)/python -m benchmarks.machines $(ARGS)

.PHONY: bench-notices
bench-notices: setup ## steps computed again when 100 node agents leave by SIGTERM, half of them with sole replicas; ARGS="--notices 8"
	@$(VENV)/python -m benchmarks.notices $(ARGS)

.PHONY: bench-accounts
bench-accounts: setup ## whether accounts of mixed jobs close under kills, and what counting costs
	@$(VENV)/python benchmarks/accounts.py $(ARGS)

.PHONY: bench-registry
bench-registry: setup ## the registry with 10,000 instances, beside raw nats-py
	@$(VENV)/python benchmarks/registry.py $(ARGS)

.PHONY: bench-answers
bench-answers: setup ## for how long an answer of somebody else's making keeps the loop of who asked
	@$(VENV)/python benchmarks/answer_lag.py $(ARGS)

.PHONY: bench-gateway
bench-gateway: setup ## a gateway on one core: event streams and requests at once, overload, clients that do not read
	@$(VENV)/python benchmarks/gateway.py $(ARGS)

.PHONY: bench-routing
bench-routing: setup ## routing by load on unequal and changing devices, beside its bound and the static split
	@$(VENV)/python benchmarks/routing.py $(ARGS)

.PHONY: bench-policy-cost
bench-policy-cost: setup ## a policy at 10,000 instances, and the way from a suggestion to the routes
	@$(VENV)/python benchmarks/policy_cost.py $(ARGS)

.PHONY: bench-mind
bench-mind: setup ## modules and the orchestrator's own loop, on against off, while devices, links and nodes are disturbed by scripts
	@$(VENV)/python -m benchmarks.mind $(ARGS)

.PHONY: bench-backflow
bench-backflow: setup ## 10,000 requests: what is kept that one side did not agree to; what the redaction leaves of planted data
	@$(VENV)/python -c 'import faker' 2>/dev/null || $(VENV)/python -m pip install --quiet --editable '.[bench-backflow]'
	@$(VENV)/python -m benchmarks.backflow $(ARGS)

.PHONY: bench-canary-judge
bench-canary-judge: setup ## a bad version of a served model: how soon it is found; one that is no worse: how often it is condemned
	@$(VENV)/python -m benchmarks.canary_judge $(ARGS)

.PHONY: bench-rebalancing
bench-rebalancing: setup ## an instance that changes its stage: throughput before and after, beside bound and forecast
	@$(VENV)/python benchmarks/rebalancing.py $(ARGS)

.PHONY: bench-recut
bench-recut: setup ## other layers for the stages of a running job: how long it rests, what the copy costs
	@$(VENV)/python benchmarks/recut.py $(ARGS)

.PHONY: bench-replay
bench-replay: setup ## how much faster than real time a recorded run is replayed
	@$(VENV)/python benchmarks/replay.py $(ARGS)

.PHONY: bench-shadow
bench-shadow: setup ## what modules in shadow cost training
	@$(VENV)/python benchmarks/shadow_cost.py $(ARGS)

.PHONY: bench-observation
bench-observation: setup ## what telemetry, metrics, scrapes, logs and a dashboard cost training
	@$(VENV)/python benchmarks/observation_cost.py $(ARGS)

.PHONY: gpu
gpu: setup ## whatever needs a card, in under eight minutes; without one, a line that says so
	@$(VENV)/python -m benchmarks.gpu $(ARGS)

.PHONY: compiled
compiled: setup-dev ## layers that torch's compiler compiles: one SHA-256 in two processes and wherever the model is cut; minutes
	@COMPILE=1 $(VENV)/pytest -q tests/unit/workers/tasks/test_compiled.py $(ARGS)

.PHONY: fuzz
fuzz: setup ## a hundred thousand messages that nobody should send, over every subject of a mesh
	@$(VENV)/python -m benchmarks.fuzz_bus $(ARGS)

.PHONY: bench-dashboard
bench-dashboard: setup-dev ## frame times of the dashboard with 1,000 instances, in a headless Chromium
	@$(VENV)/python benchmarks/dashboard.py $(ARGS)

.PHONY: bench-planner
bench-planner: setup ## the planner on recorded models (DATA=folder), beside solvers' bounds, all assignments and its former rule
	@$(VENV)/python -m benchmarks.planner --data "$(DATA)" $(ARGS)

.PHONY: bench-forecast
bench-forecast: setup ## the planner's forecast of a step beside real padded jobs, on equal and unequal slots
	@$(VENV)/python -m benchmarks.forecast $(ARGS)

.PHONY: bench-unequal
bench-unequal: setup ## a plan for slots of speeds 1, 1, 2, 2, 4 beside the plan of equal ones, real padded jobs in turn
	@$(VENV)/python -m benchmarks.unequal_slots $(ARGS)

.PHONY: bench-queue
bench-queue: setup ## the queue's orders on recorded traces (DATA=folder), and how long a decision over 10,000 jobs takes
	@$(VENV)/python -m benchmarks.job_queue --data "$(DATA)" $(ARGS)

.PHONY: bench-parking
bench-parking: setup ## how soon a job has slots that another one parks for, and whether that one goes on to the same bits
	@$(VENV)/python -m benchmarks.parking $(ARGS)

.PHONY: bench-policies
bench-policies: setup ## the built-in policies' models on recorded data (DATA=folder), beside their baselines and bars
	@$(VENV)/python -m benchmarks.built_in_policies --data "$(DATA)" $(ARGS)

.PHONY: lock
lock: setup ## write the image's hash-locked dependencies anew (deploy/*.lock)
	@$(VENV)/python -c 'import piptools' 2>/dev/null || $(VENV)/python -m pip install --quiet --editable '.[lock]'
	@$(VENV)/python scripts/lock.py $(ARGS)

.PHONY: compose-up
compose-up: ## the same mesh in containers, every entity its own service
	docker compose up --build --detach --wait

.PHONY: compose-train
compose-train: ## train the example in the containers
	docker compose exec gateway-a dmsc train examples/stdlib-gpt.yaml

.PHONY: compose-down
compose-down: ## stop the containers, keep their volumes
	docker compose down

.PHONY: setup
setup: python ## .venv with what runs the mesh
	@"$(PYTHON)" scripts/bootstrap.py

.PHONY: setup-dev
setup-dev: python
	@"$(PYTHON)" scripts/bootstrap.py --dev

.PHONY: python
python:
	@test -n "$(PYTHON)" || { echo 'make: no Python 3.11 or newer found (looked for $(CANDIDATES)); make PYTHON=/path/to/python3.11 says where'; exit 1; }

.PHONY: clean
clean: ## remove .venv and all caches; keeps .dmsc (a mesh's state)
	@rm -rf .venv .venv.lock build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
