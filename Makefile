# make setup | demo | demo DATA=FOLDER | test | test-full | test-slow | test-oldest | test-times | fuzz | mutate | lint.
# Each creates .venv if it is missing; nothing need be set up before. CUDA=12 make setup takes PyTorch for CUDA 12.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := $(CURDIR)/.venv/bin
# The demo trains in one process per GPU; without GPUs two share the processor. On a single core it is one plain process,
# without DeepSpeed's launcher: ENGINE=local does that anywhere, ENGINE=deepspeed never.
GPUS = $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
RANKS ?= $(if $(filter 0,$(GPUS)),2,$(GPUS))
ENGINE ?= $(if $(filter 0:1,$(GPUS):$(shell nproc)),local,deepspeed)
TRAIN = $(if $(filter local,$(ENGINE)),python launch/train.py --set run.engine=local,deepspeed --num_gpus $(RANKS) launch/train.py)
# Of each target; FUZZ="tar ledger" names some of them.
FUZZ_CASES ?= 2000
FUZZ ?=
# Of the groups in tests/mutation/cosmic-ray.toml; MUTATE="draw" names one of them, "--go-on" what was interrupted.
MUTATE ?=
READY := .venv/.ready

# A folder of class folders in the place of the drawn pictures; then the demo is a small classifier.
DATA ?=
DEMO := $(if $(DATA),demo_data/pictures/pictures,ds_configs/demo)
RUN := runs/$(notdir $(DEMO))
# What the model of the demo writes below pictures that it has not seen.
CAPTIONS := $(RUN)/captions

.PHONY: setup demo test test-core test-rest test-full test-slow test-oldest test-times fuzz mutate lint
setup: $(READY)

$(READY): pyproject.toml constraints.txt constraints-cu12.txt
	@sh launch/setup.sh "$(PYTHON)"
	@touch $@

demo: $(READY)
	@$(BIN)/python launch/prepare.py demo $(if $(DATA),--data "$(DATA)")
	@run_dir=$(RUN); . launch/resume_me.sh; code=0; \
	    PATH="$(BIN):$$PATH" $(BIN)/$(TRAIN) --config $(DEMO).json || code=$$?; exit $$(ended $$code)
	@$(BIN)/python launch/account.py verify $(RUN)
	@test -n "$(DATA)" -o -e $(CAPTIONS)/result.json || $(BIN)/python launch/evaluate.py caption runs/demo --out $(CAPTIONS) \
	    --config ds_configs/demo.json --data demo_data/held_out --public --records 48

lint: $(READY) build/types-checked
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check -q . || { echo "run: .venv/bin/ruff format ."; exit 1; }
	@$(BIN)/lint-imports --no-cache

# Nearly all of lint's time. A folder is younger than the stamp when a file in it came or went.
build/types-checked: $(READY) $(shell find -L murmuration \( -name '*.py' -o -type d ! -name __pycache__ \) -print 2>/dev/null)
	@NODE_OPTIONS=--max-semi-space-size=64 $(BIN)/basedpyright --level error
	@mkdir -p $(@D) && touch $@

# Each process has one thread: more would wait for each other. Tests start Python many times: its compiled files are kept
# even where the environment forbids it. One call for all folders, since each call imports everything in every process
# and ends with one core at its last file; runs of several ranks, which wait for each other, leave their core to others.
BY_FILE := loadfile --no-loadscope-reorder
define run_tests
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 PATH="$(BIN):$$PATH" $(BIN)/python -m pytest -m $(1) -q \
	    -n auto --maxprocesses 8 --dist $(2)
endef

# What the privacy claim rests on, in minutes: tests/conftest.py names it.
test: lint test-core

test-core: $(READY)
	$(call run_tests,"core and not slow",worksteal)

# Everything but the slow tests: the core, then the rest.
test-full: test test-rest

test-rest: $(READY)
	$(call run_tests,"not core and not slow",$(BY_FILE))

# Which kernels PyTorch, oneDNN, MKL, OpenBLAS and NumPy take depends on the processor, and they add and round in other
# orders. With the oldest of each, which every x86-64 has, a test that holds on one processor alone shows itself; with the
# lowest versions that pyproject.toml allows, one that holds with new packages alone. They are installed apart (5.6 GB),
# and what is imported of them is compiled as it is: a quarter of what setup would compile.
# NumPy's build says which it can leave out.
OLDEST := $(CURDIR)/build/oldest/bin
OLDEST_KERNELS := ATEN_CPU_CAPABILITY=default DNNL_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE OPENBLAS_CORETYPE=Nehalem \
    NPY_DISABLE_CPU_FEATURES="$$($(OLDEST)/python -c 'from numpy._core import _multiarray_umath as built; \
    print(*built.__cpu_dispatch__)')"

build/oldest/.ready: pyproject.toml $(READY)
	@$(BIN)/uv venv -q --clear --python $(BIN)/python build/oldest
	@$(BIN)/uv pip install -q --python $(OLDEST)/python -r pyproject.toml --extra dev \
	    --resolution lowest-direct
	@touch $@

test-oldest: build/oldest/.ready
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 PATH="$(OLDEST):$$PATH" $(OLDEST_KERNELS) $(OLDEST)/python \
	    -m pytest -m "(core or arithmetic) and not slow" -q -n auto --maxprocesses 8 --dist worksteal \
	    --ignore tests/end_to_end

# Thirty dearest tests by processor seconds, and the sum of each group; WRITE=--write makes tests/times.json anew, but
# for the slow tests, which WRITE="--slow --write" runs and writes.
WRITE ?=
test-times: $(READY)
	@$(BIN)/python -m tests.times $(WRITE)

# One after the other: several start three ranks, build a container or measure memory.
test-slow: $(READY)
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 PATH="$(BIN):$$PATH" $(BIN)/python -m pytest -m slow -q

# A finding is written to tests/fuzz/corpus, which make test-full runs again.
fuzz: $(READY)
	@test -n "$(FUZZ)" || OMP_NUM_THREADS=1 PATH="$(BIN):$$PATH" $(BIN)/python -m pytest -q -n auto --maxprocesses 8 \
	    -m "hypothesis and not slow" --hypothesis-profile search
	@OMP_NUM_THREADS=1 PATH="$(BIN):$$PATH" $(BIN)/python -m tests.fuzz --cases $(FUZZ_CASES) $(FUZZ)

# Hours. Mutates a copy in build/mutation; what survives is a fault that no test sees.
mutate: $(READY)
	@$(BIN)/uv pip install -q --python $(BIN)/python -r pyproject.toml --extra mutation -c constraints.txt
	@nice -n 19 $(BIN)/python -m tests.mutation $(MUTATE)
