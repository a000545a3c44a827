# make quickstart   set everything up, build the shipped images, and run the image that fits this machine
#                   PLATFORM=linux/arm64 cross-compiles an image for arm64 instead, without an emulator
# make test         set everything up and run every test
# make gpu-check    check imagematrix on this machine's NVIDIA GPU; fails without one
# make gpu-bundle   write dist/gpu-bundle.tar.gz, which runs these checks on a machine with only Python
# make docs         build the documentation as a site, docs/_build/index.html
# make pages        write the generated tables and titles of the documentation's pages anew
# make program      build an image that contains imagematrix, for clusters; NAME=REFERENCE names it
# make zipapp       write the commands for a node as one file, dist/imagematrix.pyz
# make bench        set everything up and measure against the limits in docs/benchmarks.md
# make counts       write tests/growth/counts.json anew: how much each operation does, which a test compares
# make bench-smoke  run each group of the benchmark once, with as little as possible, and judge no time
# make fuzz         run the readers of images and `trim` on many damaged files, and property tests on new examples
# make test-long    run the tests that are too long for make test
# make test-engines run the engine tests with other releases of Docker and Podman; NAMES=docker-forky for only one
# make test-apptainer run the tests without a daemon with Apptainer
# make test-cluster run the tests with several machines: swarms of real Docker engines, one with Spark
# make test-kubernetes build the newest and the oldest Kubernetes, and run the tests on a cluster of each
# make test-slurm   run jobs in containers on a real Slurm with two nodes; RELEASE=forky for that of Debian testing
# make test-chart   build Helm 3 and 4, and compare the chart with the manifests of `render install`
# make test-hooks   start images with NVIDIA's container runtime, which is to leave them alone
# make test-page    look at the page of a fleet in Chromium, at phone and desk width, light, dark and printed
# make test-ray     install Ray, and run its tests on local nodes
# make test-zun     install OpenStack Zun, and let its driver pull through the resolver
# make test-cpu-wheels run official wheels on CPUs of QEMU, and compare them with what adopt says
# make test-arm    build for arm64, and run code, images and imagematrix itself on CPUs of arm64 of QEMU
# make test-recipes build the recipes that take gigabytes, such as PyTorch, and train with them
# make clean        undo quickstart

VENV := .venv
BIN := $(VENV)/bin
NAMES := docker-forky docker-29 podman-forky
RELEASE := trixie

# Tests start the program more than a thousand times; without bytecode, each start takes 0.6 s longer.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart counts bench-smoke fuzz test beside python packages bases slurm lint unit unit-lowest engine gpu gpu-check gpu-bundle wheel coverage docs pages bench program zipapp test-long test-engines test-apptainer test-cluster test-kubernetes test-slurm test-chart test-hooks test-page test-ray test-zun test-cpu-wheels test-arm test-recipes clean

quickstart:
	@ci/quickstart

# The engine tests take longest. The other targets run at the same time, with lower priority.
test:
	$(MAKE) --jobs=2 --output-sync=target engine beside
	$(MAKE) coverage

beside: $(VENV)/.dev
	nice $(MAKE) lint docs wheel gpu unit

# apt-get cannot run twice at a time, so this target comes before `packages`, which runs beside the setup of .venv.
python:
	ci/venv python

packages: python
	ci/engine packages

bases: packages
	ci/bases archives

# Beside `bases`, of which it waits for one. Without it, only the test that needs it fails.
slurm: packages
	-ci/slurm

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=ci $(BIN)/mypy docs/conf.py docs/_ext ci/*.py ci/facts
	for folder in ci/bench ci/gpu_bundle ci/gpu_bundle/checks ci/page; do \
	    MYPYPATH=$$folder $(BIN)/mypy $$folder/*.py || exit; done
	$(BIN)/deptry imagematrix
	$(BIN)/lint-imports
	$(BIN)/python ci/lint_names.py
	$(BIN)/typos
	$(BIN)/zizmor --offline --quiet .github ci/pipelines
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.readthedocs .readthedocs.yaml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml

unit: $(VENV)/.dev
	rm -f .coverage .coverage.*
	$(BIN)/coverage run -m pytest -n auto --durations=20 -m "not long" tests/unit

# The unit tests with the oldest releases of the dependencies that pyproject.toml allows.
unit-lowest: $(VENV)/.dev
	$(BIN)/uv pip compile -q --resolution lowest-direct --all-extras pyproject.toml -o .cache/lowest.txt
	$(BIN)/uv venv -q --clear --python $(BIN)/python .cache/lowest
	$(BIN)/uv pip install -q --python .cache/lowest --group dev -r .cache/lowest.txt -e '.[all]'
	.cache/lowest/bin/python -m pytest -q -n auto -m "not long" tests/unit

# The counts hold for Python 3.11 only.
counts: $(VENV)/.dev
	PYTHONHASHSEED=0 $(BIN)/python tests/growth/counts.py --write

fuzz: $(VENV)/.dev
	IMAGEMATRIX_FUZZ=1000000 $(BIN)/python -m pytest -n auto -m fuzz tests/unit/audit
	IMAGEMATRIX_FUZZ=100000 $(BIN)/python -m pytest -m fuzz tests/unit/build/trim tests/unit/images/warm
	IMAGEMATRIX_FUZZ=1 $(BIN)/python -m pytest -n auto -m "hypothesis and not fuzz" tests/unit

# Two groups of files at a time, each with its own engines, in the order of tests/engine/conftest.py. A job of continuous
# integration that its host ends shows nothing of what make keeps back until a target is done, so pytest ends before,
# and has named the test that did not end.
engine: bases slurm $(VENV)/.dev
	$(if $(CI),timeout --signal=INT --kill-after=2m 75m) $(BIN)/python -m pytest $(if $(CI),-v) -n 2 --dist loadfile --no-loadscope-reorder --durations=20 -m "not long" tests/engine

# Not part of `make test`.
test-long: bases $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --durations=20 -m long tests/unit
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=20 -m long tests/engine

gpu: $(VENV)/.dev
	ci/gpu-check if-any

# The declared dependencies must suffice for every command, and the extras for those that need one.
wheel: $(VENV)/.dev
	$(BIN)/python ci/wheel.py

gpu-check:
	ci/gpu-check

gpu-bundle: $(VENV)/.dev
	$(BIN)/python ci/gpu_bundle dist/gpu-bundle.tar.gz

# A warning, such as a dead link, fails the build. It needs no network.
docs: $(VENV)/.dev
	$(BIN)/sphinx-build -q -W -n --keep-going -b html -d .cache/docs docs docs/_build

pages: $(VENV)/.dev
	$(BIN)/python docs/_ext/generated.py

# Coverage of the unit tests.
coverage: $(VENV)/.dev
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --fail-under=95
	$(BIN)/coverage report --fail-under=100 --include='imagematrix/selection/*.py,imagematrix/selection/rules/*,imagematrix/hardware/gpu_request/*'

bench: packages $(VENV)/.dev
	$(BIN)/python -m pip install -q --group bench
	$(BIN)/python ci/bench $(if $(GROUP),--only $(GROUP))

# Needs the Python Package Index, npm, Go and tens of gigabytes of disk for the images of frameworks.
bench-smoke: packages $(VENV)/.dev
	$(BIN)/python ci/bench --smallest --large

# The engine tests with the newest releases of Docker, and those of Podman. Not part of `make test`, which runs
# test_engines.py with the oldest and the newest Docker of Debian.
test-engines: bases $(VENV)/.dev
	ci/engines $(NAMES)
	for name in $(NAMES); do \
	    case $$name in podman-*) tests=tests/engine/test_podman.py ;; *) tests=tests/engine ;; esac; \
	    IMAGEMATRIX_TEST_ENGINE=$$name \
	    $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $$tests || exit; done

# Debian's stable releases have no Apptainer, so that of sid is unpacked. Not part of `make test`, which has the other
# runtimes.
test-apptainer: bases $(VENV)/.dev
	ci/engines apptainer-sid
	.cache/engines/apptainer-sid/within $(BIN)/python -m pytest tests/engine/test_daemonless*.py -m "not long"

# Real swarms, in namespaces. Not part of `make test`.
test-cluster: packages $(VENV)/.dev
	$(BIN)/python -m pytest tests/cluster --ignore=tests/cluster/kubernetes --ignore=tests/cluster/slurm

# A real Slurm of a release of Debian, in namespaces. Not part of `make test`, which has a node of one.
test-slurm: packages $(VENV)/.dev
	IMAGEMATRIX_SLURM=$(RELEASE) $(BIN)/python -m pytest -n 0 tests/cluster/slurm

# A real Kubernetes, in namespaces. Not part of `make test`.
test-kubernetes: packages $(VENV)/.dev
	for release in 1.37.2 1.20.2; do \
	    ci/kubernetes $$release || exit; \
	    IMAGEMATRIX_KUBERNETES=$$release $(BIN)/python -m pytest tests/cluster/kubernetes || exit; done

# Needs Go and its published modules. Not part of `make test`.
test-chart: $(VENV)/.dev .cache/modules/helm3 .cache/modules/helm4
	$(BIN)/python -m pytest tests/chart

# Needs Go and its published modules, and for one test a checkout of NVIDIA's enroot, in .cache/enroot.
test-hooks: packages $(VENV)/.dev .cache/modules/nvidia
	$(BIN)/python -m pytest tests/hooks

.cache/modules/%: ci/modules/%/go.mod ci/modules/%/go.sum ci/modules/build
	rm -rf $@.new $@
	ci/modules/build $* $(CURDIR)/$@.new
	mv $@.new $@
	touch $@

# Needs Chromium, Node.js and the npm registry. Not part of `make test`. Pictures are in dist/page.
test-page: $(VENV)/.dev
	mkdir -p .cache/page
	cp ci/page/package.json ci/page/check.mjs .cache/page
	npm install --prefix .cache/page --no-audit --no-fund --no-package-lock --silent
	rm -rf dist/page
	$(BIN)/python ci/page/pages.py dist/page
	node .cache/page/check.mjs dist/page

# Needs the Python Package Index. Not part of `make test`.
test-ray: $(VENV)/.dev
	$(BIN)/uv venv -q --clear --python $(BIN)/python .cache/ray
	$(BIN)/uv pip install -q --python .cache/ray --group dev -e . ray==2.60.0
	.cache/ray/bin/python -m pytest tests/ray

# Needs root and the Python Package Index. Not part of `make test`.
test-zun: packages $(VENV)/.dev
	$(BIN)/uv venv -q --clear --python $(BIN)/python .cache/zun
	$(BIN)/uv pip install -q --python .cache/zun zun==18.0.0
	$(BIN)/python -m pytest tests/zun

# Needs Python 3.12 and the Python Package Index; WHEELS='polars duckdb' or '--machine aarch64' for only some. Not part
# of `make test`.
test-cpu-wheels: packages $(VENV)/.dev
	$(BIN)/python ci/cpu_wheels.py $(WHEELS)

# Needs root and packages of Debian 13, which ci/arm64 unpacks. Some register an emulator with the kernel while they
# run. The tests belong to `make test-long`, too.
test-arm: bases $(VENV)/.dev
	$(BIN)/python -m pytest tests/engine/test_arm64.py tests/engine/test_arm_*.py tests/engine/test_mixed_fleet.py

# Needs an engine, the Python Package Index and 20 GB of disk. Not part of `make test`.
test-recipes: $(VENV)/.dev
	$(BIN)/python ci/recipes.py

program: $(VENV)/.dev
	ci/program/build $(or $(NAME),imagematrix:latest)

zipapp: $(VENV)/.dev
	$(BIN)/python ci/make_zipapp.py dist/imagematrix.pyz

$(VENV)/.dev: pyproject.toml | python
	ci/venv dev
	touch $@

clean:
	ci/clean
