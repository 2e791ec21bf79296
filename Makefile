# Every task of the project, for a person and for CI alike. `make` or `make help` lists them.
# Needs Python 3.11 or newer and make; the environment in .venv is built on first use from the hash-locked files in
# locks/. Stamp files inside .venv remember what is installed: a second call is instant, a changed lock installs again.

VENV := .venv
PY := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
NODE_DIR := tests/clients/node
CODE := $(wildcard dmq retry broker_adapter spark_audit bench examples tests tools)
TYPED := $(filter-out examples,$(CODE))  # the official client has no types
CLIENT_TESTS := tests/system/clients
# extra words for the tool behind a target: make test ARGS="-k store", make demo ARGS="--seconds 10"
ARGS ?=
# Tests wait for processes and disks much of their time: three workers for each processor, at most 16.
WORKERS ?= $(shell n=$$(( $$(getconf _NPROCESSORS_ONLN) * 3 )); echo $$(( n < 16 ? n : 16 )))

# The first of these that runs and is new enough; `make PYTHON=/path/to/python ...` decides otherwise.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)

PIP := $(PY) -m pip --disable-pip-version-check --no-input --quiet
# Nothing is compiled that nobody imports: of what is installed here that is most, and half of the processor's time.
INSTALL := DIST_EXTRA_CONFIG='$(CURDIR)/tools/wheels.cfg' $(PIP) install --progress-bar off --require-hashes --no-build-isolation --no-compile

# Settings that send an installation elsewhere than into .venv, or let foreign code into it. Where packages come from
# (PIP_INDEX_URL, PIP_CERT, ...) stays the machine's affair.
unexport PIP_USER PIP_TARGET PIP_PREFIX PIP_ROOT PIP_REQUIRE_VIRTUALENV PYTHONPATH PYTHONHOME
# Tests start hundreds of processes of ours: each of them would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

# An environment that was moved with its folder, or whose interpreter is gone, is built anew.
$(shell [ -x $(PY) ] && [ "$$(cat $(STAMPS)/here 2>/dev/null)" = "$(CURDIR)" ] || rm -rf $(STAMPS))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
ifndef BESIDE_EACH_OTHER
.NOTPARALLEL:
endif
.PHONY: help env demo demo-failover demo-rocketmq test readme where clients-matrix disturb coverage lint fmt docs pictures release bench fuzz mutants lock clean distclean \
	clients client-programs collected node-client go-client java-client rust-client versitygw-client otelcol-client chromium prometheus

help: ## list the targets
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/  make \1 - \2/p' $(firstword $(MAKEFILE_LIST))

demo: $(STAMPS)/run ## kill the daemon half-way through a run and see that nothing is lost
	@$(PY) -m dmq demo $(ARGS)

demo-failover: $(STAMPS)/run versitygw-client ## delete the data of the killed daemon as well: a standby takes over (on an S3 server if Go builds one)
	@PATH="$(CURDIR)/tests/clients/versitygw/.cache:$$PATH" $(PY) -m dmq demo --failover $(ARGS)

demo-rocketmq: $(STAMPS)/run ## the same in front of a real Apache RocketMQ, killed as well (needs Java and Maven)
	@$(PY) -m bench.demo $(ARGS)

test: clients ## run all tests (ARGS="-k store" to choose, ARGS="-n 0" in one process)
	@$(PY) -m pytest -n $(WORKERS) $(ARGS)

readme: $(STAMPS)/dev ## do what the README begins with, in an empty folder with each Python here, and time it
	@DMQ_TEST_EFFORT=2 $(PY) -m pytest -q -n 0 tests/system/test_first_screen.py $(ARGS)

where: $(STAMPS)/dev ## list the tests that import a module (MODULE=dmq/broker/groups/lease_timers.py)
	@$(PY) tools/where.py $(MODULE)

clients-matrix: clients ## test every published version of the clients
	@DMQ_TEST_CLIENTS=all $(PY) -m pytest -n $(WORKERS) $(CLIENT_TESTS) $(ARGS)

disturb: clients ## run all tests while processes are stopped at random for a moment
	@$(PY) tools/disturb.py $(PY) -m pytest -n $(WORKERS) $(ARGS)

env: $(STAMPS)/dev $(STAMPS)/compiled ## install what development and tests need into .venv

lint: $(STAMPS)/dev ## format, lint, types, arrows, tidy
	@echo "lint: format" && $(PY) -m ruff format --check --quiet --output-format=concise $(CODE) \
		|| { echo "lint: run 'make fmt'" >&2; exit 1; }
	@echo "lint: ruff" && $(PY) -m ruff check --quiet $(CODE)
	@echo "lint: types" && $(PY) -m mypy $(TYPED)
	@echo "lint: arrows" && $(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()' \
		--no-logo
	@echo "lint: tidy" && $(PY) -m pytest --quiet tests/tidy

fmt: $(STAMPS)/dev ## format the code and apply the fixes ruff is sure of
	@$(PY) -m ruff check --quiet --fix-only $(CODE)
	@$(PY) -m ruff format $(CODE)

bench: $(STAMPS)/dev $(STAMPS)/compiled ## measure, and write docs/reference/performance.md (ARGS="--quick" to try, "--peer" beside RocketMQ)
	@$(PY) -m bench $(ARGS)

fuzz: $(STAMPS)/fuzz ## look for input that costs too much (ARGS="-max_total_time=3600" for an hour)
	@mkdir -p build/fuzz
	@DMQ_COMPILED=0 PYTHONPATH=tests $(PY) tools/fuzz.py -artifact_prefix=build/fuzz/ $(or $(ARGS),-max_total_time=300)

mutants: $(STAMPS)/mutants ## change modules that decide and see whether tests notice (ARGS="--per-module 20 --seed 1")
	@$(PY) tools/mutants.py $(ARGS)

coverage: clients ## run all tests and show which lines they reach (build/coverage/html)
	@mkdir -p build/coverage && rm -f build/coverage/data*
	@DMQ_TEST_COMPILED=0 $(PY) -m coverage run -m pytest -n $(WORKERS) $(ARGS)
	@$(PY) -m coverage combine --quiet && $(PY) -m coverage html --quiet && $(PY) -m coverage report

docs: $(STAMPS)/docs ## build the site of the documentation (build/docs)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs --quiet build --strict
	@echo "build/docs/index.html"

pictures: $(STAMPS)/dev chromium ## take the pictures of the console for its page in the documentation (ARGS=FOLDER: whole pages too)
	@PYTHONPATH=tests:. $(PY) tools/pictures.py $(ARGS)

release: $(STAMPS)/release $(STAMPS)/compiled ## build and check what is published, into dist (nothing is uploaded)
	@rm -rf dist && mkdir dist
	@$(PY) -m hatchling build -d dist
	@DMQ_COMPILED=1 $(PY) -m hatchling build -t wheel -d dist  # of this Python, on this kind of machine
	@$(PY) -m twine check --strict dist/*
	@$(PY) -W ignore -m cyclonedx_py requirements locks/run.txt --pyproject pyproject.toml --mc-type application \
		--output-reproducible --validate -o dist/sbom.cdx.json
	@! grep -q '^home = "https://rock-dmq.example' pyproject.toml || \
		echo "release: the package's URLs lead nowhere yet: set home in pyproject.toml" >&2
	@ls -l dist

clean: ## remove caches and build products
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	@rm -rf dmq/http2/_compiled $(STAMPS)/compiled
	@find $(CODE) -name node_modules -prune -o -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## remove the environment and the official clients as well
	@rm -rf $(VENV) $(NODE_DIR)/node_modules tests/clients/*/.cache tests/clients/rust/Cargo.lock

# --- the environment --------------------------------------------------------------------------------------------------

$(STAMPS)/here:
	@[ -n "$(PYTHON)" ] && "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: Python 3.11 or newer is needed and" \
		     "$(if $(PYTHON),'$(PYTHON)' is not it,none was found);" \
		     "name one with: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "creating $(VENV) with $$("$(PYTHON)" --version)"
	@rm -rf $(VENV)  # of a symbolic link, the link alone
	@"$(PYTHON)" -m venv $(VENV) || { \
		echo "make: this Python cannot create environments; on Debian install the package python3-venv" >&2; exit 1; }
	@mkdir -p $(STAMPS) && echo "$(CURDIR)" > $@

$(STAMPS)/build: locks/build.txt $(STAMPS)/here
	@echo "installing the build tools (locks/build.txt)"
	@$(INSTALL) -r locks/build.txt
	@touch $@

$(STAMPS)/project: pyproject.toml $(STAMPS)/build
	@$(PIP) install --no-index --no-deps --no-build-isolation -e .
	@touch $@

$(STAMPS)/run: locks/run.txt $(STAMPS)/project
	@echo "installing what the daemon and the demo need (locks/run.txt)"
	@$(INSTALL) -r locks/run.txt
	@touch $@

# The development lock contains the running one, version by version.
$(STAMPS)/dev: locks/dev.txt $(STAMPS)/project
	@echo "installing what development and tests need (locks/dev.txt)"
	@$(INSTALL) -r locks/dev.txt
	@touch $@ $(STAMPS)/run

$(STAMPS)/fuzz: locks/fuzz.txt $(STAMPS)/dev
	@echo "installing the fuzzer (locks/fuzz.txt)"
	@$(INSTALL) -r locks/fuzz.txt
	@touch $@

# Of other sources than these it would not be used: see dmq/runtime/compiled.py.
$(STAMPS)/compiled: tools/compile_http2.py dmq/runtime/compiled.py $(wildcard dmq/http2/*.py dmq/http2/*/*.py) $(STAMPS)/dev
	@$(PY) tools/compile_http2.py
	@touch $@

# What the tests use beside our own packages needs none of them, so both are made beside each other.
CLIENT_PROGRAMS := node-client go-client java-client rust-client versitygw-client chromium prometheus

client-programs:
	@$(MAKE) --silent --no-print-directory -j BESIDE_EACH_OTHER=1 $(CLIENT_PROGRAMS)

clients:
	@$(MAKE) --silent --no-print-directory -j BESIDE_EACH_OTHER=1 $(CLIENT_PROGRAMS) $(STAMPS)/collected $(STAMPS)/compiled

# The tests once compiled: each worker of the first run would compile all of them for itself.
collected: $(STAMPS)/collected

$(STAMPS)/collected: $(STAMPS)/dev
	@$(PY) -m pytest --collect-only --quiet >/dev/null 2>&1 || true  # the run itself says what is wrong
	@touch $@

# The tools of one target each; their packages fit beside those of development.
$(STAMPS)/docs $(STAMPS)/mutants $(STAMPS)/release: $(STAMPS)/%: locks/%.txt $(STAMPS)/dev
	@echo "installing what 'make $*' needs (locks/$*.txt)"
	@$(INSTALL) -r locks/$*.txt
	@touch $@

# The official Node client, for the tests that drive the daemon with it. Required in CI, a named skip elsewhere.
node-client:
	@if command -v npm >/dev/null 2>&1; then \
		$(MAKE) --silent --no-print-directory $(NODE_DIR)/node_modules/.stamp; \
	elif [ -n "$$CI" ]; then \
		echo "make: npm (Node 18 or newer) is required in CI, for the tests with the official Node client" >&2; exit 1; \
	else \
		echo "npm is not here: the tests with the official Node client will be skipped"; \
	fi

$(NODE_DIR)/node_modules/.stamp: $(NODE_DIR)/package.json $(NODE_DIR)/package-lock.json
	@echo "installing the official Node client ($(NODE_DIR)/package-lock.json)"
	@cd $(NODE_DIR) && npm ci --ignore-scripts --no-audit --no-fund --no-update-notifier --loglevel=error
	@touch $@

# The programs around the official Go, Java and Rust clients, a server of objects and a collector of spans; their first use in a test
# builds them as well.
go-client java-client rust-client versitygw-client otelcol-client:
	@[ -n "$(PYTHON)" ] || { echo "make: Python 3.11 or newer is needed" >&2; exit 1; }
	@PYTHONPATH=tests "$(PYTHON)" -m support.clients.official.builds $(@:-client=)

# A browser, for the tests that look at the audit's report. Required in CI (root gets it installed), a named skip elsewhere.
chromium:
	@sh tools/chromium.sh

# Prometheus, for the tests of the alert rules and of the Grafana board. Required in CI (fetched, not installed), a named skip elsewhere.
prometheus:
	@sh tools/prometheus.sh

# --- locks ------------------------------------------------------------------------------------------------------------

# Keeps the pins that still fit; UPGRADE=1 takes the newest of everything. uv lives in a throw-away environment.
# The development and build locks are held to the running one, so that all three can be installed together.
UV_COMPILE = "$$tmp/bin/uv" pip compile --quiet --python-version 3.11 --universal --generate-hashes \
	--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" $(if $(UPGRADE),--upgrade)

lock: ## write locks/*.txt anew from pyproject.toml (UPGRADE=1: newest versions)
	@[ -n "$(PYTHON)" ] || { echo "make: Python 3.11 or newer is needed" >&2; exit 1; }
	@tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT && "$(PYTHON)" -m venv "$$tmp" && \
	"$$tmp/bin/python" -m pip --disable-pip-version-check --no-input --quiet install uv && \
	echo "locking locks/run.txt" && \
	$(UV_COMPILE) pyproject.toml --extra server --extra http --extra console --extra otel --extra classic --extra replica --extra demo -o locks/run.txt && \
	echo "locking locks/dev.txt" && \
	$(UV_COMPILE) pyproject.toml --extra server --extra http --extra console --extra otel --extra classic --extra replica --extra demo --extra audit-local --extra audit --group dev -c locks/run.txt -o locks/dev.txt && \
	echo "locking locks/build.txt" && \
	$(UV_COMPILE) locks/build.in -c locks/dev.txt -o locks/build.txt && \
	echo "locking locks/compile.txt" && \
	$(UV_COMPILE) locks/compile.in -c locks/dev.txt -c locks/build.txt -o locks/compile.txt && \
	echo "locking locks/fuzz.txt" && \
	$(UV_COMPILE) locks/fuzz.in -c locks/dev.txt -o locks/fuzz.txt && \
	echo "locking locks/docs.txt" && \
	$(UV_COMPILE) --group docs -c locks/dev.txt -o locks/docs.txt && \
	echo "locking locks/mutants.txt" && \
	$(UV_COMPILE) --group mutants -c locks/dev.txt -o locks/mutants.txt && \
	echo "locking locks/release.txt" && \
	$(UV_COMPILE) --group release -c locks/dev.txt -o locks/release.txt
