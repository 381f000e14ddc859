# `make run` and `make test` need Python >= 3.11 and nothing else: the environment in .venv is made on first use and
# made again when pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FLOWER := .venv-flower
unexport PYTHONDONTWRITEBYTECODE # or every process that a test starts compiles the library again

.PHONY: run test lint unit room soak flower browser postgres docs format clean

run: $(READY)
	$(BIN)/dovetail run

# Programs that XLA compiled for tests are kept for the next run: a change compiles what it changes. After a week they
# are compiled again.
test unit room soak: export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.programs

test: $(READY)
	@mkdir -p .programs && find .programs -type f -mtime +7 -delete
	@$(MAKE) --no-print-directory -j 2 lint unit

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Three workers on two cores: many tests wait, for a disk or for another process.
unit: $(READY)
	$(BIN)/pytest -m "not soak and not flower and not torch and not browser and not postgres" -n 3 --dist worksteal

# The tests of one folder, in under a minute: make room ROOM=accounting; ROOM=core is the files at the top of tests.
room: $(READY)
	@test -n "$(ROOM)" || { echo "expected make room ROOM=<a folder of tests, or core>, got none"; exit 2; }
	$(BIN)/pytest -m "$(ROOM) and not soak and not flower and not torch and not browser and not postgres" -n 2 --dist worksteal

# The long ones, two at a time: 35 minutes on two cores.
soak: $(READY)
	$(BIN)/pytest -n 2 --dist worksteal -m "soak and not flower and not torch and not browser and not postgres"

# Flower pins versions of its own and brings Ray: an environment of its own, with PyTorch, Flax and Equinox, whose tests
# run there, too. Needs `unshare` and `ip` (util-linux,
# iproute2), for Ray listens on all addresses; with nginx it also tries the example's proxy.
flower: $(FLOWER)/.ready
	$(FLOWER)/bin/pytest -m "flower or torch"

# The site, in docs/_build/html. Warnings are errors: a broken link or a page that fetches something from elsewhere.
docs: $(VENV)/.docs
	$(BIN)/sphinx-build -W --keep-going -n -E -q -b html docs docs/_build/html

# Chromium is Debian's; as another user than root, install it first.
browser: $(READY)
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && apt-get update && apt-get install -y --no-install-recommends chromium; } || { echo "expected chromium, or root to install it (apt-get install chromium), got neither"; exit 2; }
	$(BIN)/pytest -m browser

# PostgreSQL is Debian's; the tests start a server of their own in a folder of their own, as an unprivileged user, on
# loopback alone, and end it. The one that cuts off a replica needs `unshare` and `ip` (util-linux, iproute2).
postgres: export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.programs
postgres: $(READY)
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null || { test "$$(id -u)" = 0 && apt-get update && apt-get install -y --no-install-recommends postgresql; } || { echo "expected PostgreSQL, or root to install it (apt-get install postgresql), got neither"; exit 2; }
	$(BIN)/pytest -m postgres

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(FLOWER) .programs docs/_build docs/reference/generated .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "expected Python >= 3.11, got $$($(PYTHON) --version)"; exit 2; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

$(FLOWER)/.ready: pyproject.toml
	$(PYTHON) -m venv --clear $(FLOWER)
	$(FLOWER)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(FLOWER)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,flower]' pandas torch==2.13.0 flax equinox
	@touch $@

$(VENV)/.docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@
