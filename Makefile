# Two commands: `make demo` shows the whole tutorial on a tiny model, `make test` proves the kernels.
# Inside the Docker container everything is installed: run them as `make demo PY=python SETUP=`.
PYTHON ?= python3
PY ?= .venv/bin/python
SETUP ?= .venv/installed
TINY = --model tiny --batch-size 2 --seq-len 64

# Many containers set this variable.  Then each of the tests' processes compiles every file anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-all test-gpu compile-check lint clean

setup: $(SETUP)

.venv/installed: requirements.txt constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet -r requirements.txt -c constraints.txt
	touch $@

demo: $(SETUP)
	$(PY) check_toolchain.py
	$(PY) profile_baseline.py $(TINY) --json demo/before.json
	$(PY) profile_baseline.py $(TINY) --use-custom-rmsnorm --use-custom-ce --json demo/after.json
	$(PY) profile_baseline.py --compare demo/before.json demo/after.json --plot demo/roofline.png
	$(PY) profile_baseline.py $(TINY) --memory --plot demo/memory.png
	$(PY) finetune_baseline.py $(TINY) --json demo/baseline.json
	$(PY) finetune_optimized.py $(TINY) --json demo/optimized.json
	$(PY) compare_runs.py demo/baseline.json demo/optimized.json --plot demo/comparison.png

test: $(SETUP)
	$(PY) -m tools.compile_check --targets sm_103
	$(PY) -m tools.run_tests

# What is run once for a change, and takes 25 minutes on two cores.
test-all: $(SETUP) compile-check
	$(PY) -m tools.run_tests --all

# Every test, spread over the GPUs of this machine.
test-gpu: $(SETUP)
	$(PY) -m tools.run_tests --gpu

compile-check: $(SETUP)
	$(PY) -m tools.compile_check

lint:
	ruff check .
	ruff format --check .

# Not runs/: the pages' commands put models and checkpoints there, which nothing makes again.
clean:
	rm -rf .venv demo traces .pytest_cache .ruff_cache
