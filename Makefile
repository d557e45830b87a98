# Each target sets up what it needs in .venv. PYTHON chooses the interpreter, 3.10 or later.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
# Tests at a time. Each process costs some seconds of its own: it collects all tests, and has a server.
WORKERS ?= 4
# A process that has done its part takes over tests of another one's.
AT_ONCE = -n $(WORKERS) --dist worksteal
DEMO_ARGS ?=
BENCH_ARGS ?=
CHAOS_ARGS ?=
NIGHT_ARGS ?=

# For `make test-postgres`: a major version, 14 to 18.
VERSION ?= 18
# For `make bench`: how often each operation of the hot path is measured.
ROUNDS ?= 2000
# For `make test`: how many times longer a test may take, on a machine that stops again and again.
SLOW ?=
# For `make mutations`: areas or names, or a share (`--share 0.1`).
MUTATIONS ?= --jobs 2
# For `make simulate`: the share of all pairs of faults.
PAIRS ?= 0.1
# For `make fidelity`: --help shows them.
FIDELITY_ARGS ?=
# For `make test-postgres`, `test-pgbouncer` and `test-lowest`: all tests in place of those whose subject
# they are. `make nightly` sets it.
FULL ?=
# For `make test-lowest`: the interpreter, if not the one that tests/support/lowest-python finds.
LOWEST_PYTHON ?=

# Else each of the processes that run tests compiles all of them anew, and so does each Python that a
# test starts with the library's modules.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-processes test-nightly test-postgres test-pgbouncer test-lowest test-foreign \
	nightly chaos chaos-store chaos-ha night simulate fidelity mutations lint types docs reference pictures counts bench bench-results dist \
	released release-notes clean

help: ## Show the targets
	@awk 'BEGIN { FS = ":.*## " } \
		/^##@ / { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

##@ To see it
demo: $(VENV)/.demo ## Watch three replicas share their jobs, for about 30 seconds (DEMO_ARGS)
	@$(BIN)/apscheduler-tasklock demo $(DEMO_ARGS)

##@ Tests, on a real PostgreSQL (PYTEST_ARGS, WORKERS)
test: $(VENV)/.dev ## Run the tests; SLOW=10 on a machine that is slow on purpose
	$(if $(SLOW),$(BIN)/python -m tests.support.slow_machine --slow $(SLOW) --) \
		$(BIN)/pytest $(AT_ONCE) -m "not nightly and not simulate" $(PYTEST_ARGS)

# What a kill, a stop, a crash, a standby, a pool of processes and a server of each framework do: those
# of the nightly tests that each change has to pass.
PROCESSES := $(addprefix tests/acceptance/, \
	test_failover.py::test_one_other_replica_runs_the_window_of_a_killed_holder_again \
	test_failover.py::test_a_pools_worker_keeps_its_lock_and_is_taken_over_when_it_dies \
	test_graceful_stop.py::test_another_replica_runs_the_window_of_a_job_that_a_stop_cut_with_failover \
	test_jobstore.py::test_a_one_off_job_whose_replica_is_killed_is_run_again_with_failover \
	test_jobstore.py::test_three_processes_that_start_at_once_declare_one_job_each_and_keep_a_pause \
	test_leader.py::test_the_run_times_of_a_killed_leader_are_run_by_the_others \
	test_retries.py::test_a_replica_that_is_killed_between_the_attempts \
	test_server_crash.py::test_a_claim_that_a_crash_followed_gives_its_token_to_nobody_else \
	test_standby.py::test_a_scheduler_goes_on_through_a_failover \
	test_worker_processes.py::test_workers_of_a_killed_parent_end_and_their_windows_are_run_once_more) \
	$(addprefix tests/frameworks/, \
	test_django_scheduler.py::test_two_share_a_job \
	test_flask_servers.py::test_sigterm_lets_a_job_end_and_each_window_is_run_once \
	test_starlette_servers.py::test_sigterm_lets_threads_end_and_cancels_coroutines)
test-processes: $(VENV)/.dev ## Run the dozen of the nightly tests that each change has to pass
	$(BIN)/pytest $(AT_ONCE) $(PROCESSES) $(PYTEST_ARGS)

test-nightly: $(VENV)/.dev ## Run the tests that `make test` leaves out: real time, many processes, whole matrices
	$(BIN)/pytest $(AT_ONCE) -m nightly $(PYTEST_ARGS)

# What only a server can show: the statements of the contract, and what libpq, a role or a setting does.
# FULL=yes adds all other tests that send statements, but for those that are about Python's side of them.
# What the dashboard reads is tested in operators/.
OF_THE_SERVER := tests/contract $(addprefix tests/integration/, \
	configuration hold/test_locks.py outages/test_rights.py outages/test_stalls.py \
	operators/test_operations.py operators/test_operate_doctor.py store/test_jobstores.py \
	windows/test_first_claims.py) tests/migration/test_migrations.py
OF_PYTHON := $(addprefix --ignore=tests/integration/, \
	dashboard bursts/test_bursts.py configuration/test_configuration.py hold/test_hold_async.py \
	leases/test_forking.py operators/test_checkins.py operators/test_log_handlers.py \
	operators/test_telemetry.py outages/test_database_thread.py outages/test_health.py \
	pools/test_asyncio.py pools/test_process_pool.py shutdown/test_closing.py \
	shutdown/test_database_processes.py windows/test_functions.py)
ON_A_VERSION := $(if $(FULL),-m "not own_server" tests/contract tests/integration tests/migration $(OF_PYTHON),\
	-m "not own_server and not nightly" $(OF_THE_SERVER))
test-postgres: $(VENV)/.dev ## Run the tests of statements on PostgreSQL 14 to 18 (VERSION, FULL)
	$(BIN)/pytest $(AT_ONCE) --postgres-version $(VERSION) $(ON_A_VERSION) $(PYTEST_ARGS)

# PGBOUNCER names one that knows prepared statements, 1.21 or later; else one is built. What that
# changes is how the statements of claims, leases and stored jobs are sent. A pooler of any kind
# changes sessions, too: their settings, who logs in, LISTEN, and what is told of connections.
# Those of the first list are run by each change; FULL=yes runs the others as well.
SENT := $(addprefix tests/integration/, \
	bursts/test_together.py leases/test_releases.py outages/test_lost_statements.py \
	windows/test_first_claims.py)
PREPARING := $(SENT) $(addprefix tests/integration/, \
	failover/test_failover.py hold/test_hold.py leases/test_leases.py operators/test_operations.py \
	outages/test_faults.py outages/test_faults_answers.py outages/test_faults_server.py \
	store/test_jobstore.py)
SESSIONS := $(addprefix tests/integration/, \
	configuration/test_login.py configuration/test_search_path.py configuration/test_settings.py \
	outages/test_listening.py outages/test_rights.py)
POOLED := $(SESSIONS) $(addprefix tests/integration/, \
	configuration/test_bad_input.py hold/test_locks.py leases/test_sharing.py \
	operators/test_manual_runs.py operators/test_operate_check.py operators/test_operate_cli.py \
	operators/test_operate_connections.py operators/test_operate_doctor.py \
	outages/test_database_thread.py outages/test_faults_outages.py outages/test_stalls.py \
	shutdown/test_closing.py store/test_jobstores.py)
# The statements that no test above sends.
CONTRACT_ALONE := $(addprefix tests/contract/, test_leaders.py test_misses.py test_pauses_of_all.py)
WITHOUT_PREPARING := $(if $(FULL),$(PREPARING) $(POOLED) $(CONTRACT_ALONE),-m "not nightly" $(SENT) $(SESSIONS))
WITH_PREPARING := $(if $(FULL),$(PREPARING) tests/acceptance/test_pgbouncer.py,-m "not nightly" $(SENT))
test-pgbouncer: $(VENV)/.dev ## Run what a pooler changes through an installed pgbouncer (FULL)
	$(BIN)/pytest $(AT_ONCE) --pgbouncer off $(WITHOUT_PREPARING) $(PYTEST_ARGS)
	PGBOUNCER=$${PGBOUNCER:-$$(tests/support/build-pgbouncer)} && export PGBOUNCER \
		&& $(BIN)/pytest $(AT_ONCE) --pgbouncer on $(WITH_PREPARING) $(PYTEST_ARGS)

# An environment that another Python has made is made anew. What other versions of Python, APScheduler,
# SQLAlchemy and frameworks can change is how jobs are run, and what imports them; FULL=yes leaves out
# only what is the same under any version: the contract, the simulation but for what jobs are promised
# in it, the documentation and the tests' own tools.
JOBS_IN_SIMULATION := $(addprefix tests/simulation/test_, lock_times.py missed_runs.py one_offs.py \
	set_run_times.py unnamed_jobs.py windows.py)
ON_LOWEST := $(if $(FULL),$(addprefix --ignore=,tests/contract tests/docs tests/tools \
	$(filter-out $(JOBS_IN_SIMULATION),$(wildcard tests/simulation/test_*.py))),\
	tests/executors tests/frameworks tests/unit tests/integration/configuration tests/integration/pools \
	tests/integration/shutdown tests/integration/windows $(JOBS_IN_SIMULATION))
test-lowest: ## Run the tests on the lowest versions that pyproject.toml allows (LOWEST_PYTHON, FULL)
	@python=$(or $(LOWEST_PYTHON),$$(tests/support/lowest-python)) && version=$$($$python -V) \
		&& echo "$$version ($$python), with the versions of tests/lowest.txt" \
		&& { [ "$$(.venv-lowest/bin/python -V 2>/dev/null)" = "$$version" ] || rm -rf .venv-lowest; } \
		&& $(MAKE) test VENV=.venv-lowest PYTHON=$$python CONSTRAINTS=tests/lowest.txt \
			PYTEST_ARGS="$(ON_LOWEST)" \
		$(if $(FULL),&& $(MAKE) test-nightly PYTEST_ARGS="tests/frameworks tests/integration/pools" \
			VENV=.venv-lowest PYTHON=$$python CONSTRAINTS=tests/lowest.txt)

test-foreign: .venv-foreign/.done ## Run APScheduler's and django-apscheduler's own tests with the library's executor and job store
	.venv-foreign/bin/python -m tests.foreign $(PYTEST_ARGS)

# The seed of each part is printed, and repeats it.
nightly: ## Run everything in full, for some hours, with random seeds
	$(MAKE) lint types docs dist
	$(MAKE) test test-nightly PYTEST_ARGS="--seed random"
	$(MAKE) test-lowest FULL=yes
	$(MAKE) test-foreign
	for version in 14 15 16 17 18; do $(MAKE) test-postgres FULL=yes VERSION=$$version PYTEST_ARGS="--seed random" || exit 1; done
	$(MAKE) test-pgbouncer FULL=yes PYTEST_ARGS="--seed random"
	$(MAKE) simulate PYTEST_ARGS="--seed random"
	$(MAKE) test SLOW=10
	$(MAKE) mutations counts
	$(MAKE) chaos chaos-store chaos-ha night
	$(MAKE) fidelity
	$(MAKE) bench
	$(MAKE) demo
	$(MAKE) demo DEMO_ARGS=--shared-store
	$(MAKE) demo DEMO_ARGS=--leader

##@ Replicas under faults, and long times
chaos: $(VENV)/.dev ## Put real replicas under random faults for three minutes, and check what they did (CHAOS_ARGS)
	$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

chaos-store: $(VENV)/.dev ## The same for the job store that all replicas share, for two minutes (CHAOS_ARGS)
	$(BIN)/python -m tests.chaos_store $(CHAOS_ARGS)

chaos-ha: $(VENV)/.dev ## The same for a database that fails over, for five minutes (CHAOS_ARGS)
	$(BIN)/python -m tests.chaos_ha $(CHAOS_ARGS)

night: $(VENV)/.dev ## Live through a scripted night of six minutes, and compare all that is told with a ledger (NIGHT_ARGS)
	$(BIN)/python -m tests.night $(NIGHT_ARGS)

simulate: $(VENV)/.dev ## Put simulated replicas under a share of all pairs of faults (PAIRS, by default 0.1)
	$(BIN)/pytest $(AT_ONCE) -m simulate tests/simulation --pairs $(PAIRS) $(PYTEST_ARGS)

fidelity: $(VENV)/.bench ## Live through thousands of windows under each rule, and count what goes wrong (FIDELITY_ARGS)
	$(BIN)/python -m benchmarks.fidelity $(FIDELITY_ARGS)

mutations: $(VENV)/.dev ## Make each known mistake in a copy, and look whether a test finds it (MUTATIONS)
	$(BIN)/python -m tests.mutations $(MUTATIONS)

##@ Checks of the code
lint: $(VENV)/.dev ## Check the code's style, which module may import which, and what tests may do
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m tests.layers
	$(BIN)/python -m tests.waist
	$(BIN)/python -m tests.gate

types: $(VENV)/.dev ## Check the types
	$(BIN)/mypy

##@ Documentation
docs: $(VENV)/.docs ## Build the documentation into build/docs; a warning is an error
	$(BIN)/sphinx-build -W --keep-going -n -q docs build/docs
	@echo "The documentation is in build/docs/index.html"

reference: $(VENV)/.dev ## Write anew what the documentation has from the code
	$(BIN)/python -m docs.numbers
	$(BIN)/python -m docs.commands
	$(BIN)/python -m docs.options

pictures: $(VENV)/.dev ## Draw the pictures of the documentation
	$(BIN)/python -m docs.pictures

##@ Measurements
counts: $(VENV)/.dev ## Count calls, lines, mutations and scenarios, and compare them with their limits
	$(BIN)/python -m tests.counts

bench: $(VENV)/.dev ## Measure in short form what a claim and a release cost, and print it (ROUNDS, BENCH_ARGS)
	$(BIN)/python -m benchmarks.speed --quick --rounds $(ROUNDS) $(BENCH_ARGS)

bench-results: .venv-bench/.demo ## Measure all of it, into benchmarks/RESULTS.md
	.venv-bench/bin/python -m benchmarks.speed --results benchmarks/RESULTS.md $(BENCH_ARGS)

##@ Releases
dist: $(VENV)/.dist ## Build the wheel and the sdist into dist/, check them, and try the wheel
	$(BIN)/python -m tests.distribution

released: $(VENV)/.dev ## Write what later versions keep of this one into tests/released
	$(BIN)/python -m tests.released

release-notes: ## Print the notes of a tag, if it is the version and CHANGELOG.md knows it (TAG)
	@$(PYTHON) -m tests.distribution.release $(TAG)

##@ Cleaning up
clean: ## Remove the environments and what tools left
	find . -name __pycache__ -not -path "./.*" -prune -exec rm -rf {} +
	rm -rf $(VENV) .venv-lowest .venv-foreign .venv-bench .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist

# The other libraries, beside this one.
.venv-bench/.demo: benchmarks/requirements.txt pyproject.toml
	@$(PYTHON) -m venv .venv-bench
	@.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check \
		--editable '.[dashboard,demo]' --requirement $<
	@touch $@

# The versions that the foreign suites are made for, and their own plugins of pytest.
.venv-foreign/.done: tests/foreign/requirements.txt pyproject.toml
	@$(PYTHON) -m venv .venv-foreign
	@.venv-foreign/bin/python -m pip install --quiet --disable-pip-version-check \
		--editable '.[demo]' --requirement $<
	@touch $@

$(VENV)/.%: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	@echo "Installing into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]' \
		$(CONSTRAINTS:%=--constraint %)
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "Python 3.10 or later is needed: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
