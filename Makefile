# `make help` says what there is. The work is done by scripts/.

# A Python that has torch. Without one, torch is installed into .venv.
PYTHON ?=
TORCH ?= 2.13.0
RANKS ?=
ARGS ?=
MINUTES ?= 10
SEED ?=
PREFIX ?= /usr/local
export PYTHON TORCH

.PHONY: help setup build python train test soak fuzz bench clients asan tsan format check install package clean

help: ## this text
	@scripts/help.sh

setup: ## install what is missing: system packages (as root) and torch (in .venv)
	@scripts/setup.sh

build: setup ## the library, the tests and the examples, in build/
	@scripts/build.sh release

python: setup ## the Python package, into .venv or PYTHON's environment
	@scripts/python.sh

train: setup ## train a small GPT on this machine: RANKS=4 make train, ARGS="--help"
	@scripts/build.sh release train_gpt
	@scripts/launch $(if $(RANKS),--ranks $(RANKS)) build/bin/train_gpt $(ARGS)

test: build ## all tests; FSDP_ALL_COMBINATIONS=1 make test: no combination of options is left out
	@scripts/test.sh release

soak: build ## random trials with fresh seeds: MINUTES=30 make soak, SEED=17 for the same ones again
	@scripts/soak.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

bench: setup ## measure libfsdp beside PyTorch, in about 15 minutes: ONLY=name for some rows
	@bench/run

clients: setup ## other libraries' training with libfsdp beside PyTorch: PYTHON=/path/to/python that has them, ONLY=name
	@tests/clients/run

asan: setup ## all tests with the address and undefined-behaviour sanitizers, in build-asan/
	@scripts/build.sh asan
	@scripts/test.sh asan

tsan: setup ## all tests with the thread sanitizer, in build-tsan/
	@scripts/build.sh tsan
	@scripts/test.sh tsan

fuzz: setup ## bytes that nobody would write, for what reads checkpoints: MINUTES=60 make fuzz
	@scripts/setup.sh --fuzzer
	@scripts/fuzz.sh $$(( $(MINUTES) * 60 ))

format: ## format the sources in place
	@scripts/setup.sh --tools clang-format
	@scripts/format.sh

check: setup ## layers, format, clang-tidy, leftovers
	@scripts/setup.sh --tools clang-format clang-tidy
	@scripts/check.sh

install: setup ## the library, its CMake package and programs: make install PREFIX=/opt/fsdp [DESTDIR=...]
	@scripts/build.sh release fsdp fsdp-report
	@cmake --install build --prefix "$(PREFIX)"

package: setup ## the same as a .deb and a .tar.gz, in build/
	@scripts/build.sh release fsdp fsdp-report
	@cd build && cpack

clean: ## remove all builds; .venv stays
	@rm -rf build build-asan build-tsan build-tidy build-fuzz
