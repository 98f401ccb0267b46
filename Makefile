# make test ARGS="-k terminal"
ARGS ?=
ROUNDS ?= 10000

.PHONY: setup test check format bench soak lock

setup:
	scripts/install

test:
	scripts/test $(ARGS)

check: setup
	scripts/check

format: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

bench: setup
	.venv/bin/python bench/run.py $(ARGS)

# Kill managers at every step, again and again, and see that nothing leaks, is lost or doubled.
soak: setup
	.venv/bin/python -m tests.manager.soak --rounds $(ROUNDS)

lock:
	scripts/lock $(ARGS)
