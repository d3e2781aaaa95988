# make demo   set up, start real servers, judge the sample catalog, show the result
# make test   set up, lint, test against the same kind of servers
# make lint   ruff and mypy alone
# make slow   the tests that take minutes or gigabytes
# make chaos  kills, freezes and slows every part while 20,000 pairs go through: ten minutes of an idle machine
# make bench  the speed of every part, and what each precision costs, into docs/benchmarks: half an hour of an idle machine
# make soak   half an hour at full load, and whether anything grows, into docs/benchmarks; MINUTES=5 for less
# make clean  stop the local servers; delete them, their data and the virtual environment
#
# PYTHON=python3.12 make ...   chooses the Python that .venv is made with (3.11 or newer)
# KEEP=1 make demo             leaves the servers running; `.venv/bin/concord local down` stops them

PYTHON ?= python3
MINUTES ?= 30
BIN := .venv/bin

.PHONY: demo test lint slow chaos bench soak clean venv

demo: venv
	@$(BIN)/python -m infra.demo

test: lint
	@$(BIN)/python -m pytest

lint: venv
	@$(BIN)/ruff check .
	@$(BIN)/mypy worker tasks db infra celeryconfig.py

slow: venv
	@$(BIN)/python -m pytest -m slow

chaos: venv
	@$(BIN)/concord chaos --pairs 20000 --seed 22

bench: venv
	@$(BIN)/python -m infra.bench.precision --out docs/benchmarks
	@$(BIN)/concord bench all --out docs/benchmarks

soak: venv
	@$(BIN)/python -m infra.bench.soak --minutes $(MINUTES) --out docs/benchmarks

# Takes no time when .venv is there and was made for pyproject.toml and constraints.txt as they are.
venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null || { \
		echo "Concord needs Python 3.11 or newer, and $(PYTHON) is not: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) infra/environment.py

clean:
	@if [ -x $(BIN)/concord ] && [ -d .concord ]; then $(BIN)/concord local down; fi
	@rm -rf .venv .concord build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
