# make test ARGS="-k terminal"
ARGS ?=

.PHONY: setup test check format bench lock

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

lock:
	scripts/lock $(ARGS)
