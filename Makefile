# gemini-hpc: `make demo` shows the main job, `make test` every promise once, `make check` the quick tests; all install
# what they need first.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# Each worker, and each process that a test starts, would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
PY := $(VENV)/bin/python
TORCH := torch==2.13.0
# Optimizer states that are made of other tensors, for the tests.
TORCHAO := torchao==0.18.0
DEBIAN := slurm-wlm slurm-client slurmctld slurmd munge libmunge2 libslurm-dev iproute2 util-linux procps \
          gcc libc6-dev make python3 python3-venv
# The development cluster's profile `site`; strace, which cuts processes off at a system call; and ISA-L, for
# Reed-Solomon parity: tests and benchmarks need them, the demo does not.
DEBIAN_SITE := slurmdbd mariadb-server-core strace libisal2
# What Debian's plugin for `srun --mpi=pmix` loads.
DEBIAN_MPI := libpmix-dev
# HDF5 and h5py that are built with MPI (Debian's Open MPI 4), for Debian's own Python: PyPI has none.
DEBIAN_HDF5 := python3-h5py-mpi python3-mpi4py openmpi-bin
PARALLEL := $(VENV)/parallel
# Two MPIs for the tests of the transport, each in a place of its own: both have a bin/mpiexec and a lib/libmpi.so.
MPIS := openmpi mpich
# Other training stacks, for gemini_hpc.integrations. They take the torch that is there.
FRONTS := transformers==5.24.0 accelerate==1.15.0 peft==0.21.2 lightning==2.6.6
SOURCES := pyproject.toml README.md $(shell find gemini_hpc slurm prolog_epilog examples -type f \
          -not -name '*.pyc' -not -name '*.so' -not -path '*/build/*' 2>/dev/null)

CODE := gemini_hpc tests benchmarks examples

# Other releases of Slurm: the roots are made with debootstrap, kept here, and never changed by a run.
DEBIAN_ROOTS := debootstrap debian-archive-keyring
CACHE ?= /var/cache/gemini-hpc
RELEASE ?=
ON_EACH_RELEASE := spank devcluster controller recovery

.PHONY: help deps deps-site deps-mpi deps-fronts deps-stacks debian-packages venv install demo check sim test test-all test-long test-slurm test-here lint bench clean

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

# From PyPI alone: neither root nor a Debian package.
define install_python
	@[ -x $(PY) ] || /usr/bin/python3 -m venv $(VENV)
	@$(PY) -c 'import torch' 2>/dev/null || { echo "installing torch (CPU build)"; $(PY) -m pip install -q $(TORCH); }
	@$(PY) -c 'import hatchling, numpy, pytest, hypothesis, ruff, mypy, pytest_timeout, xdist, greenlet, msgspec, xxhash, matplotlib, h5py, safetensors, mpi4py' 2>/dev/null \
	  || { echo "installing Python packages"; $(PY) -m pip install -q hatchling numpy msgspec xxhash \
	       pytest pytest-timeout pytest-xdist greenlet hypothesis ruff mypy "matplotlib>=3.7" "h5py>=3.10" safetensors "mpi4py>=4"; }
	@$(PY) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torchao") is None)' \
	  || { echo "installing torchao"; $(PY) -m pip install -q --no-deps $(TORCHAO); }
	@touch $(VENV)/.python
endef

$(VENV)/.python: Makefile
	$(install_python)

$(VENV)/.made: deps
	$(install_python)
	@touch $@

deps-mpi: $(VENV)/.made
	$(call install_debian,$(DEBIAN_MPI) $(DEBIAN_HDF5))
	@for mpi in $(MPIS); do [ -x $(VENV)/mpi/$$mpi/bin/mpiexec ] || { echo "installing $$mpi into $(VENV)/mpi"; \
	  $(PY) -m pip install -q --no-deps --ignore-installed --prefix $(VENV)/mpi/$$mpi $$mpi; }; done
	@$(PARALLEL)/bin/python -c 'import msgspec, xxhash' 2>/dev/null || { echo "installing into $(PARALLEL)"; \
	  /usr/bin/python3 -m venv --system-site-packages $(PARALLEL); $(PARALLEL)/bin/python -m pip install -q msgspec xxhash; }

deps-fronts: $(VENV)/.made
	@$(PY) -c 'import sys; from importlib.metadata import version; sys.exit(any(version(name) != pin for name, pin in (p.split("==") for p in sys.argv[1:])))' \
	  $(FRONTS) 2>/dev/null || { echo "installing" $(FRONTS); $(PY) -m pip install -q $(FRONTS) $(TORCH); }

# Other training stacks, without what they ask for: that would replace the CPU build of torch, or draw CUDA in.
STACKS := megatron-core==0.16.1 torchtitan==0.3.0
STACKS_IMPORT := docstring_parser==0.18.0 typeguard==4.6.1 tyro==1.0.17 spmd_types==0.2.3 torchdata==0.11.0 packaging

deps-stacks: $(VENV)/.made
	@$(PY) -W ignore -c 'import megatron.core.optimizer, torchtitan.components.checkpointer, torchtitan.components.dataloader' 2>/dev/null \
	  || { echo "installing Megatron-Core and torchtitan"; $(PY) -m pip install -q --no-deps $(STACKS) $(STACKS_IMPORT); }

$(VENV)/.installed: $(SOURCES) | $(VENV)/.made
	@echo "installing gemini-hpc into $(VENV)"
	@$(PY) -m pip install -q --no-build-isolation --no-deps --force-reinstall .
	@touch $@

venv: $(VENV)/.made
install: $(VENV)/.installed ## Python environment with this package in .venv

demo: install ## a node dies in mid-training: watch the job come back (about two minutes)
	@$(VENV)/bin/gemini-hpc demo

lint: install deps-mpi ## ruff and mypy
	@$(VENV)/bin/ruff check $(CODE)
	@$(VENV)/bin/mypy

# The package is taken from this directory: nothing is installed.
check: $(VENV)/.python ## within 90 s, as any user: ruff, mypy, and the tests that need no root, no cluster and little time
	@$(PY) -m ruff check $(CODE)
	@$(PY) -m ruff format --check -q $(CODE)
	@$(PY) -m mypy
	@PYTHONPATH=$(CURDIR) $(PY) -m tests.stages quick
	@[ -z "$(SEEDS)" ] || PYTHONPATH=$(CURDIR) $(PY) -m tests.sim --seeds $(SEEDS)

sim: $(VENV)/.python ## simulated clusters with faults: SEEDS=1000 for so many; SEED=7 repeats one and prints its story, SITE=1 that of a whole site
	@PYTHONPATH=$(CURDIR) $(PY) -m tests.sim $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),200)) $(if $(SITE),--site)
	@[ -n "$(SEED)$(SITE)" ] || PYTHONPATH=$(CURDIR) $(PY) -m tests.sim --site --seeds $(or $(SEEDS),200)

TESTED := install deps-site deps-mpi deps-fronts deps-stacks

test: $(TESTED) ## ten minutes, as root: the quick tests, and every promise once, on real clusters (docs/promises.md)
	@$(MAKE) -s -C slurm all test
	@$(PY) -m tests.stages test

test-all: $(TESTED) ## all tests: PART=k/n for one of n parts of equal time, DIRS="train tier" for some; RECORD=1 notes times
	@$(MAKE) -s -C slurm all test
	@$(PY) -m tests.stages all $(if $(PART),--part $(PART)) $(if $(RECORD),--record) $(if $(SEED),--seed $(SEED)) $(DIRS)

test-long: $(TESTED) ## the long campaigns
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

clean: ## remove what was built here
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@$(MAKE) -s -C slurm clean
