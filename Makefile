# Every target does all set-up first. Needed on a fresh machine: Python 3.11+, git, make.
PYTHON := .venv/bin/python
WORKERS ?= 6  # of the tests: most of them wait, and six keep two cores busy

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-aws demo-nightly test test-all coverage test-localstack check bench bench-checkpoint bench-gpu bench-train clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' Makefile | expand -t 24

setup:  ## uv, the packages of the lock file, the Pulumi engine, .mgpu/env; again: under a second
	@sh scripts/setup.sh

demo: setup  ## the main job on real data on this machine: no account, no Docker, no GPU
	@$(PYTHON) demo.py

demo-nightly: setup  ## two nights of a schedule on this machine; one loses its machine while nobody is awake
	@$(PYTHON) demo_nightly.py

demo-aws: setup  ## the same on a fake AWS with Linux machines behind it, one taken with a notice; as root
	@$(PYTHON) demo_aws.py

test: setup  ## all tests; of kill points, seeds and stores x faults a share that the commit draws (tests/draw.py)
	@sh scripts/setup-go-tools.sh versitygw >/dev/null || echo "versitygw could not be built: its tests are skipped" >&2
	@MGPU_DRAW=$${MGPU_DRAW:-commit} $(PYTHON) -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

test-all:  ## all tests with every point; writes anew which points are known
	@MGPU_DRAW=all $(MAKE) --no-print-directory test

coverage: setup  ## the lines and branches that the tests pass, in all processes; ONLY=tests/unit for some of them
	@$(PYTHON) scripts/measure_coverage.py --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ONLY)

test-localstack: setup  ## AWS resources on LocalStack, which it installs first (600 MB); `make test` has them then, too
	@sh scripts/setup-localstack.sh >/dev/null
	@MGPU_REQUIRE=localstack $(PYTHON) -m pytest tests/localstack

check: setup  ## lint, format, types, layers: all four run, whatever the first ones say
	@failed=; \
	for tool in "ruff check" "ruff format --check" "pyright" "lint-imports --no-logo"; do \
	    echo "== $$tool"; \
	    .venv/bin/$$tool || failed="$$failed, $$tool"; \
	done; \
	if [ -n "$$failed" ]; then echo "check: FAILED:$${failed#,}"; exit 1; fi; \
	echo "check: all passed"

bench: setup  ## side by side with named peers; prints ratios
	@$(PYTHON) -m bench

bench-checkpoint: setup  ## checkpoints to S3 and back beside s5cmd and boto3; 15 min, 6 GiB of disk, Go once
	@$(PYTHON) -m bench checkpoint

bench-train: setup  ## the bundled trainer beside a loop by hand, Accelerate and Lightning Fabric; 15 min
	@$(PYTHON) -m bench train

bench-gpu: setup  ## all that has to be seen on a GPU: speed, memory, saves, tests/gpu; 9 min; without one it says so
	@$(PYTHON) -m bench gpu

clean:  ## .venv and what builds and tools leave behind; runs, stacks and the engine's cache stay
	rm -rf .venv dist .coverage.d .pytest_cache .ruff_cache .import_linter_cache
	find mgpu train infra tests bench -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
