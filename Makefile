# make test ARGS="-k terminal"
ARGS ?=
ROUNDS ?= 10000

FRAMEWORKS = inspect harbor langchain openai-agents smolagents

.PHONY: $(FRAMEWORKS) setup test test-newest check format bench escapes soak lock page e2b

setup:
	scripts/install

test:
	scripts/test $(ARGS)

# All of it on the newest Python, of which `make test` runs a part.
test-newest:
	scripts/test --newest $(ARGS)

check: setup
	scripts/check

format: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

bench: setup
	.venv/bin/python bench/run.py $(ARGS)

# Try every way out of a box, on every provider that this host has, and print the table: make escapes ARGS="--provider docker"
escapes: setup
	.venv/bin/python -m tests.escape $(ARGS)

# The own suites of frameworks of agents, on real boxes; each framework is installed in an environment of its own.
# `make test` runs a part of this.
$(FRAMEWORKS): setup
	SKERRY_REQUIRE=$${SKERRY_REQUIRE-local,docker,qemu,frameworks} \
		.venv/bin/pytest -m "whole or not whole" tests/adapters/test_$(subst -,_,$@).py $(ARGS)

# Kill managers at every step, again and again, and see that nothing leaks, is lost or doubled.
soak: setup
	.venv/bin/python -m tests.manager.soak --rounds $(ROUNDS)

lock:
	scripts/lock $(ARGS)

# Build the page of the server into the package; only whoever changes page/ needs Node.
page:
	npm --prefix page ci --ignore-scripts
	npm --prefix page run build

# The tests of E2B's own SDK against a server of ours: make e2b E2B_TESTS=.../E2B/packages/python-sdk ARGS="--domain"
e2b: setup
	E2B_TESTS=$(E2B_TESTS) .venv/bin/python -m tests.adapters.e2b $(ARGS)
