# `make demo` and `make test` do everything on a fresh Debian or Ubuntu machine; the rest is for development.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
JOBS   ?= 3
unexport PYTHONDONTWRITEBYTECODE # the tests start thousands of interpreters: with compiled modules each takes half the time

.DEFAULT_GOAL := help
.PHONY: help setup demo cluster-demo stack pictures generate lock docs test test-long test-packages test-fast lint data torchtitan release bench bench-gpu clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv with everything for development

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "opsd needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip uninstall -qq --yes opsd # the distribution's name before opsd-cluster
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dashboards,web,dev]'
	@touch $@

demo: $(STAMP) ## Train a tiny model, break it six ways, watch it recover
	$(BIN)/opsd demo

stack: $(STAMP) ## Prometheus, Alertmanager and an agent on this machine; a GPU overheats, the alert arrives
	$(BIN)/opsd stack

pictures: $(STAMP) ## Make the pictures of the documentation: pages, boards, the terminal (an hour; needs npm)
	$(BIN)/python -m tests.pictures docs/pictures
	$(BIN)/opsd demo --picture docs/pictures/demo.svg

cluster-demo: $(STAMP) test-packages ## A real Slurm cluster here trains a model, loses its leading node, and goes on
	$(BIN)/python -m tests.integration.slurm.cluster_demo

generate: $(STAMP) ## Write all that is made from the code: reference pages, example configuration; put boards in order
	$(BIN)/python -m tests.generate

lock: $(STAMP) ## Pin what is installed on nodes and what builds it, with hashes, under deploy/requirements; UPGRADE=1: the newest
	@set -e; pin() { file=deploy/requirements/$$1.txt; shift; \
		$(BIN)/uv pip compile --no-config --quiet --universal --python-version 3.11 --generate-hashes --system-certs \
			$(if $(UPGRADE),--upgrade) --custom-compile-command "make lock" "$$@" --output-file "$$file"; }; \
	pin agent --extra web --extra notify pyproject.toml; \
	pin train --extra web --extra notify --extra train --constraint deploy/requirements/agent.txt pyproject.toml; \
	pin build --group build; \
	pin release --group release

docs: $(STAMP) ## The documentation as a site with search, below site/
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(STAMP) ## ruff, mypy --strict, import rules, links of the documentation, names of tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q tests/unit/test_docs.py

test: $(STAMP) test-packages lint ## Linters and the tests, but for a few long ones; what cannot run is listed by name
	$(BIN)/python -m pytest -n $(JOBS) --dist=loadgroup --durations=10 -m 'not long and not waiting'

test-long: $(STAMP) test-packages ## What takes longest: stories on a Slurm cluster, alerts, peers, every fault on every launcher, fuzzing
	$(BIN)/python -m pytest --durations=10 -m long --ignore=tests/fuzz
	$(BIN)/python -m pytest -n $(JOBS) --durations=3 -m long tests/fuzz
	$(BIN)/python -m pytest --durations=3 -n 4 -m waiting
	$(BIN)/python -m pytest -n $(JOBS) --hypothesis-profile=explore -m 'hypothesis and not long'

# As root on Debian or Ubuntu the real programs that some tests drive are installed; elsewhere those tests are skipped by name.
test-packages:
	@missing=$$(sed 's/[ \t]*#.*//' tests/debian-packages.txt | while read -r name; do \
		[ -z "$$name" ] || dpkg-query -W -f '$${Status}' "$$name" 2>/dev/null | grep -q 'ok installed' || echo "$$name"; done); \
	if [ -z "$$missing" ]; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing" $$missing; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $$missing >/dev/null || \
			echo "some packages could not be installed; their tests are skipped by name"; \
	else echo "not root or no apt-get: tests that need these are skipped by name:" $$missing; fi

test-fast: $(STAMP) ## Only the tests that take seconds
	$(BIN)/python -m pytest -n $(JOBS) --dist=loadgroup --durations=10 -m 'not slow and not long and not waiting'

data: ## A venv of its own for datatrove's extra "processing", which needs an older xxhash, with opsd in it
	$(PYTHON) -m venv .venv-data
	.venv-data/bin/python -m pip install --quiet --disable-pip-version-check -e '.[data]' 'datatrove[processing]' 'spacy>=3.8,<4'

torchtitan: ## A venv of its own for torchtitan, which needs a newer torch; its adapter is tested where it is there
	$(PYTHON) -m venv .venv-torchtitan
	.venv-torchtitan/bin/python -m pip install --quiet --disable-pip-version-check 'torchtitan==0.3.*'

release: $(STAMP) ## Everything of a release but the upload: checks, sdist, wheel, deb, rpm, bill of materials, checksums under dist/; OFFLINE=1: does not ask the index
	@deploy/release

bench: $(STAMP) ## Every benchmark, beside its peers; results under bench-results/
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]' || \
		echo "not all peers could be installed; those that are missing are missing from the results"
	@mkdir -p bench-results
	@for name in $$($(BIN)/opsd bench --names); do $(BIN)/opsd bench $$name --json bench-results/$$name.json || exit 1; done

bench-gpu: $(STAMP) ## What the trainer reaches on the GPU here, in nine minutes; one JSON under tests/gpu/results
	$(BIN)/python tests/gpu/measure.py

clean: ## Remove what make created
	rm -rf $(VENV) .venv-torchtitan .venv-data .npm-boards .mypy_cache .ruff_cache .pytest_cache bench-results site .demo dist
