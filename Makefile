# `make demo` shows the whole tutorial on a tiny model, `make test` proves the kernels.
# Inside the Docker container everything is installed: run them as `make demo PY=python SETUP=`.
PYTHON ?= python3
PY ?= .venv/bin/python
SETUP ?= .venv/installed
TINY = --model tiny --batch-size 2 --seq-len 64

# Many containers set this variable.  Then each of the tests' processes compiles every file anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-all test-gpu gb300 my-gpu compile-check lint clean

setup: $(SETUP)

.venv/installed: requirements.txt constraints.txt
	@test "$$(uname)" = Linux || { echo "make setup: Triton has releases for Linux alone." \
		"On Windows use WSL, on a Mac the container (README.md, lesson 1)."; exit 1; }
	@echo "make setup: about 2 GB are downloaded, PyTorch with CUDA. pip is silent for minutes."
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet -r requirements.txt -c constraints.txt
	touch $@

demo: $(SETUP)
	@echo "make demo: some 3 minutes without a GPU. Results go to demo/."
	@echo "1 of 9: both kernels are compared with PyTorch, and every kernel with itself (seconds)."
	$(PY) check_toolchain.py
	@echo "2 of 9: 20 steps of training as PyTorch runs them (seconds)."
	$(PY) finetune_baseline.py $(TINY) --json demo/baseline.json
	@echo "3 of 9: the same 20 steps with two kernels (without a GPU two minutes)."
	$(PY) finetune_optimized.py $(TINY) --json demo/optimized.json
	@echo "4 of 9: both runs side by side: do they train the same?"
	$(PY) compare_runs.py demo/baseline.json demo/optimized.json --plot demo/comparison.png
	@echo "5 of 9: what fills the memory of a step (seconds)."
	$(PY) -m next_steps.memory.profile $(TINY) --plot demo/memory.png
	@echo "6 of 9: the same with the two kernels (seconds)."
	$(PY) -m next_steps.memory.profile $(TINY) --kernels rmsnorm,cross_entropy --plot demo/memory_two.png
	@echo "7 of 9: a step is profiled as PyTorch runs it (seconds)."
	$(PY) profile_baseline.py $(TINY) --json demo/before.json
	@echo "8 of 9: the same step with two kernels (without a GPU half a minute, silent at first)."
	$(PY) profile_baseline.py $(TINY) --use-custom-rmsnorm --use-custom-ce --json demo/after.json
	@echo "9 of 9: the two profiles side by side."
	$(PY) -m next_steps.comparisons.compare_profiles demo/before.json demo/after.json --plot demo/roofline.png
	@echo "Seen: both runs train the same, what fills the memory, and what a step moves."
	@echo "Pictures: demo/*.png. Next: make test proves the kernels; README.md tells the same in"
	@echo "twelve lessons."

test: $(SETUP)
	@echo "make test: 4 to 10 minutes on two cores."
	@echo "1 of 2: every kernel is compiled for a GB300, without a GPU (a minute, silent)."
	$(PY) -m tools.compile_check --targets sm_103
	@echo "2 of 2: the tests, several at a time (3 to 9 minutes; a dot is a test that passed)."
	@echo "The last line counts them. Next: README.md, lesson 1."
	$(PY) -m tools.run_tests

# What is run once for a change, and takes half an hour on two cores.  sm_89 has sm_120's limits, and
# sm_100 gets sm_103's code: make compile-check compiles for them too.
test-all: $(SETUP)
	$(PY) -m tools.compile_check --targets sm_90,sm_103,sm_120,gfx942
	$(PY) -m tools.run_tests --all

# Every test, spread over the GPUs of this machine.
test-gpu: $(SETUP)
	$(PY) -m tools.run_tests --gpu

# Everything that is measured on one GPU, beside predictions, in one file to send: docs/gb300.md.
gb300 my-gpu: $(SETUP)
	$(PY) -m tools.my_gpu

compile-check: $(SETUP)
	$(PY) -m tools.compile_check

lint:
	ruff check .
	ruff format --check .

# Not runs/: the pages' commands put models and checkpoints there, which nothing makes again.
clean:
	rm -rf .venv demo traces .pytest_cache .ruff_cache
