# make test ARGS="-k terminal"
ARGS ?=
ROUNDS ?= 10000

.PHONY: setup test test-newest check format bench escapes soak lock

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

# Kill managers at every step, again and again, and see that nothing leaks, is lost or doubled.
soak: setup
	.venv/bin/python -m tests.manager.soak --rounds $(ROUNDS)

lock:
	scripts/lock $(ARGS)
