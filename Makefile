# gemini-hpc: `make demo` shows the main job, `make test` every promise once, `make check` the quick tests; all install
# what they need first.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
# In the order written, also with -j: Debian's packages come before what needs them.
.NOTPARALLEL:

# Each worker, and each process that a test starts, would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
PY := $(VENV)/bin/python
# What makes .venv. On a cluster agents run as the jobs' owners: not a Python below somebody's home.
PYTHON ?= /usr/bin/python3
DEBIAN := slurm-wlm slurm-client slurmctld slurmd munge libmunge2 libslurm-dev iproute2 util-linux procps \
          gcc libc6-dev make python3 python3-venv
# The development cluster's profile `site`; strace, which cuts processes off at a system call; ISA-L, for Reed-Solomon
# parity; and git, for `make tags`: tests and benchmarks need them, the demo does not.
DEBIAN_SITE := slurmdbd mariadb-server-core strace libisal2 git
# What Debian's plugin for `srun --mpi=pmix` loads.
DEBIAN_MPI := libpmix-dev
# HDF5 and h5py that are built with MPI (Debian's Open MPI 4), for Debian's own Python: PyPI has none.
DEBIAN_HDF5 := python3-h5py-mpi python3-mpi4py openmpi-bin
PARALLEL := $(VENV)/parallel
SOURCES := pyproject.toml README.md $(shell find gemini_hpc slurm prolog_epilog examples -type f \
          -not -name '*.pyc' -not -name '*.so' -not -path '*/build/*' 2>/dev/null)

CODE := gemini_hpc tests benchmarks examples

# Other releases of Slurm: the roots are made with debootstrap, kept here, and never changed by a run.
DEBIAN_ROOTS := debootstrap debian-archive-keyring
# A virtual machine with systemd and cgroup v2: its kernel comes with its root.
DEBIAN_VM := qemu-system-x86 qemu-utils e2fsprogs
CACHE ?= /var/cache/gemini-hpc
RELEASE ?=
ON_EACH_RELEASE := spank devcluster controller recovery e2e/test_own_agents.py

.PHONY: help deps deps-site deps-mpi deps-fronts deps-stacks debian-packages venv install demo check sim test test-all test-long test-slurm test-here lint bench deb rpm wheels tags clean

help: ## this text
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

# Debian starts the daemons that it installs, unless policy-rc.d forbids it; the cluster has its own.
define install_debian
	@missing=$$(for p in $(1); do [ "$$(dpkg-query -W -f '$${db:Status-Status}' $$p 2>/dev/null)" = installed ] || echo $$p; done); \
	if [ -n "$$missing" ]; then \
	  echo "installing Debian packages:" $$missing; \
	  export DEBIAN_FRONTEND=noninteractive; \
	  policy=/usr/sbin/policy-rc.d; \
	  if [ ! -e $$policy ]; then \
	    trap "rm -f $$policy" EXIT; trap 'exit 1' INT TERM HUP; \
	    printf '#!/bin/sh\nexit 101\n' >$$policy; chmod 755 $$policy; \
	  fi; \
	  apt-get update -qq; apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	fi
endef

deps: ## install the Debian packages (as root)
	$(call install_debian,$(DEBIAN))

deps-site: deps
	$(call install_debian,$(DEBIAN_SITE))

debian-packages:
	@echo $(DEBIAN) $(DEBIAN_SITE)

# pyproject.toml alone says which Python packages there have to be: its dependencies, and a list for each purpose.
LISTED := 'import sys, tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
           print(*(p | p["optional-dependencies"])[sys.argv[1]], sep="\n")'

# $(call installed,LIST...,COMMAND): a file of .venv that holds what COMMAND has installed from $@.new; nothing where
# that is what is wanted. From PyPI alone: neither root nor a Debian package.
define installed
	@[ -x $(PY) ] || $(PYTHON) -m venv $(VENV)
	@for list in $(1); do $(PY) -c $(LISTED) $$list; done >$@.new
	@cmp -s $@.new $@ || { echo "installing Python packages:" $(1); $(2); }
	@mv $@.new $@
endef
PIP = $(PY) -m pip install -q

$(VENV)/.python: pyproject.toml
	$(call installed,dependencies dev,$(PIP) -r $@.new)

$(VENV)/.fronts: pyproject.toml | $(VENV)/.python
	$(call installed,dev-fronts,$(PIP) -r $@.new -r $(VENV)/.python)

$(VENV)/.stacks: pyproject.toml | $(VENV)/.python
	$(call installed,dev-stacks,$(PIP) --no-deps -r $@.new)

$(VENV)/.triton: pyproject.toml | $(VENV)/.python
	$(call installed,dev-triton,$(PIP) --no-deps --upgrade --target $(VENV)/triton -r $@.new)

$(VENV)/.mpi: pyproject.toml | $(VENV)/.python
	$(call installed,dev-mpi,while read -r mpi; do \
	  $(PIP) --no-deps --ignore-installed --prefix $(VENV)/mpi/$${mpi%%[<>=]*} "$$mpi"; done <$@.new)

$(VENV)/.parallel: pyproject.toml | $(VENV)/.python
	$(call installed,dependencies,/usr/bin/python3 -m venv --system-site-packages $(PARALLEL); \
	  $(PARALLEL)/bin/python -m pip install -q -r $@.new)

deps-mpi: deps $(VENV)/.mpi $(VENV)/.parallel
	$(call install_debian,$(DEBIAN_MPI) $(DEBIAN_HDF5))

deps-fronts: deps $(VENV)/.fronts
deps-stacks: deps $(VENV)/.stacks $(VENV)/.triton

$(VENV)/.installed: $(SOURCES) | deps $(VENV)/.python
	@echo "installing gemini-hpc into $(VENV)"
	@# The package has the plugin's objects along, where there are any: never of older sources.
	@[ ! -d slurm/build ] || $(MAKE) -s -C slurm >/dev/null 2>&1 || rm -rf slurm/build slurm/gemini_spank.so
	@$(PY) -m pip install -q --no-build-isolation --no-deps --force-reinstall .
	@touch $@

venv: deps $(VENV)/.python
install: $(VENV)/.installed ## Python environment with this package in .venv

demo: install ## a node dies in mid-training: watch the job come back (about two minutes)
	@$(VENV)/bin/gemini-hpc demo

lint: $(VENV)/.python ## ruff, mypy and codespell, as any user
	@$(PY) -m ruff check -q $(CODE)
	@$(PY) -m ruff format --check -q $(CODE)
	@$(PY) -m mypy
	@$(PY) -m codespell_lib . .github/*

# The package is taken from this directory: nothing is installed.
check: lint ## in two minutes, as any user: lint, and the tests that need no root, no cluster and little time
	@PYTHONPATH=$(CURDIR) $(PY) -m tests.stages quick
	@[ -z "$(SEEDS)" ] || PYTHONPATH=$(CURDIR) $(PY) -m tests.sim --seeds $(SEEDS)

sim: $(VENV)/.python ## simulated clusters with faults: SEEDS=1000 for so many; SEED=7 repeats one and prints its story, SITE=1 that of a whole site
	@PYTHONPATH=$(CURDIR) $(PY) -m tests.sim $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),200)) $(if $(SITE),--site)
	@[ -n "$(SEED)$(SITE)" ] || PYTHONPATH=$(CURDIR) $(PY) -m tests.sim --site --seeds $(or $(SEEDS),200)

TESTED := install deps-site deps-mpi deps-fronts deps-stacks

test: $(TESTED) ## ten minutes, as root: the quick tests, and every promise once, on real clusters (docs/dev/promises.md)
	@$(MAKE) -s -C slurm all test
	@$(PY) -m tests.stages test

test-all: $(TESTED) ## all tests: PART=k/n for one of n parts of equal time, DIRS="train tier" for some; RECORD=1 notes times (not of a part)
	@$(MAKE) -s -C slurm all test
	@$(PY) -m tests.stages all $(if $(PART),--part $(PART)) $(if $(RECORD),--record) $(if $(SEED),--seed $(SEED)) $(DIRS)

test-long: $(TESTED) ## the long campaigns
	$(call install_debian,$(DEBIAN_ROOTS) $(DEBIAN_VM) lintian rpm rpmlint)
	@$(PY) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m long tests

test-slurm: install ## what depends on Slurm's release, on another: RELEASE=24.11 or 26.05; the first time makes its root below CACHE
	$(call install_debian,$(DEBIAN_ROOTS))
	@[ -n "$(RELEASE)" ] || { echo "make test-slurm: RELEASE= is missing: 24.11 or 26.05"; exit 1; }
	@$(PY) -m tests.releases $(RELEASE) --cache $(CACHE) -- make -s test-here

test-here: install deps-site ## the same on this machine's own release
	@$(MAKE) -s -C slurm all test
	@$(PY) -m tests.stages all $(ON_EACH_RELEASE)
	@$(VENV)/bin/gemini-hpc demo

bench: install deps-site ## speed, as ratios; ONLY=FAMILY for one (save, fig11, fig13, fig16, ...); writes bench.json
	@$(PY) -m benchmarks $(if $(ONLY),--only $(ONLY))

# Their trees are made here, with a compiler and a package index; the hosts that they are for need neither.
PACKAGES := dist/packages

deb: $(VENV)/.python deps ## packages for Debian in dist/packages, the plugin for the Slurm whose headers are here
	@slurm/packaging/stage.sh $(PY) $(PACKAGES)
	@slurm/packaging/deb.sh $(PACKAGES)

wheels: $(VENV)/.python ## wheels for hosts and images without internet in dist/wheels, for the Python of .venv
	@slurm/packaging/wheels.sh $(PY) dist/wheels

rpm: $(VENV)/.python deps ## the same as rpm; PLUGIN_DIR=/usr/lib64/slurm for RHEL's place
	$(call install_debian,rpm)
	@PLUGIN_DIR=$(PLUGIN_DIR) slurm/packaging/stage.sh $(PY) $(PACKAGES)
	@PLUGIN_DIR=$(PLUGIN_DIR) slurm/packaging/rpm.sh $(PACKAGES)

tags: ## a tag for each release in CHANGELOG.md's table; nothing is pushed
	@$(PYTHON) -m tests.docs.tags

clean: ## remove what was built here
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@$(MAKE) -s -C slurm clean
