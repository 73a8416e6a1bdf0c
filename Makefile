# sparkops.inference: `make demo` and `make test` are all a newcomer needs; the rest is for daily work on the collection.
SHELL := /bin/bash
.DEFAULT_GOAL := help

CACHE ?= $(or $(SPARKOPS_CACHE),$(HOME)/.cache/sparkops-inference)
export SPARKOPS_CACHE := $(CACHE)
export ANSIBLE_COLLECTIONS_PATH := $(CURDIR)/.collections
# Where the plays' reports lie, so that `make clean` takes them away too.
export XDG_STATE_HOME := $(CACHE)/state
export MOLECULE_GLOB := molecule/*/molecule.yml
export PATH := $(CACHE)/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

LAB := tests/lab/lab

.PHONY: help
help: ## Show what there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

.PHONY: demo
demo: setup ## Set up all that is needed, start the lab, bring it up, and ask a question
	tests/demo

.PHONY: test
test: setup ## All tests but those of the virtual machines (at most 45 minutes on two cores)
	tests/run build lint units sanity docs pages lab

.PHONY: test-vm test-vm-faults
test-vm: setup-vm ## What only real kernels show, on two virtual machines: RoCE, netplan, RDMA (20 to 35 minutes, the first time 10 more)
	tests/run vm
test-vm-faults: setup-vm ## Loss of power, NFS, ZFS, and a newcomer's walk on the virtual machines (two hours)
	tests/run vm-faults

.PHONY: setup setup-vm
setup: .collections/ansible_collections/sparkops/inference ## Install packages and Python environments (says what)
	tests/setup.sh
setup-vm: .collections/ansible_collections/sparkops/inference ## The same, and what the virtual machines need
	tests/setup.sh vm

# Modules can only be imported below ansible_collections; the link makes a checkout runnable without an installation.
.collections/ansible_collections/sparkops/inference:
	mkdir -p $(@D)
	ln -sfn ../../.. $@

.PHONY: lint units sanity docs pages lab-test
lint: ## yamllint, ansible-lint (production, strict), shellcheck, changelog
	tests/run lint
units: ## Unit and property tests on both lines of ansible-core
	tests/run units
sanity: ## ansible-test sanity on both lines of ansible-core
	tests/run sanity
docs: ## Module and role docs, generated pages, the built archive
	tests/run docs
pages: ## Benchmark and report pages in a browser, alert rules in promtool
	tests/run pages
lab-test: ## Molecule scenarios and fault tests on the container lab
	tests/run lab

.PHONY: test-ways
test-ways: setup ## Taking over from a launch script, and what a start would change, on the lab (not part of make test)
	tests/run ways

.PHONY: test-returns
test-returns: setup ## Failed upgrades, rollback, switch, drain, bundles, uninstall on the lab (not part of make test)
	tests/run returns

.PHONY: test-awx test-staging
test-staging: setup ## Weights and images on their way: faults of the hub, kills, cuts (not part of make test)
	tests/run staging
test-awx: setup ## Each AWX job template against the lab, run by ansible-runner (not part of make test)
	tests/run awx

.PHONY: test-owner
test-owner: setup ## Requests of the API guide, a benchmark, reports, metrics, a newcomer's walk on the container lab (not part of make test)
	tests/run owner

.PHONY: test-faults
test-faults: setup ## Memory guard, reboots and watch on the container lab (15 minutes, not part of make test)
	tests/run faults

.PHONY: lab-up lab-down
lab-up: ## Start the container lab, or check and repair it
	$(LAB) up
lab-down: ## End the container lab
	$(LAB) down

.PHONY: bench
bench: ## Speed as ratios beside the recipes' own commands, in one run
	tests/run bench

SEED ?= 1
ROUNDS ?= 20
ENGINE ?= stub
.PHONY: soak
soak: setup ## Random kills against the lab (SEED=n ROUNDS=20 ENGINE=stub|vllm); not part of make test
	$(LAB) up
	tests/soak --seed $(SEED) --rounds $(ROUNDS) --engine $(ENGINE)

.PHONY: clean
clean: ## Remove what demo and test made: the lab, its cache, the environments (Debian packages stay)
	tests/clean
