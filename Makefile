# Each target works alone on a fresh machine with Python >= 3.11: the first one installs into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
# What codespell reads, with its own dictionary and the words in docs/words.txt.
SPELLED := README.md CONTRIBUTING.md docs/*.md docs/conf.py datasets balancers loaders native orchdata benchmarks examples scripts \
	tests
# A trial of the site finds dead links in all pages; it reads those that changed since the last one, and forgets what it read
# where one failed: Sphinx warns of a page only when it reads it.
SITE = $(BIN)/sphinx-build -q -W --keep-going -n -a -d .site/read -b $(1) docs .site/$(1) || { rm -rf .site/read; exit 1; }
# Containers often set it: then every process that tests start compiles all modules again, and pytest all tests.
unexport PYTHONDONTWRITEBYTECODE
# Whole files at a time, in the order of tests/conftest.py, and more of them than there are cores: tests wait for processes
# that they start.
PYTEST := $(BIN)/python -m pytest -q --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-slow test-torchvision dist test-wheel test-planted fuzz soak check docs format bench peers clean

demo: $(STAMP)
	$(BIN)/orchdata demo $(ARGS)

test: $(STAMP)
	$(PYTEST) -n 3 $(ARGS)

test-slow: $(STAMP)
	$(PYTEST) -n 3 -m slow $(ARGS)

# Processors that transformers makes with torchvision alone. Its wheels want a torch with CUDA: it lies beside, for these.
test-torchvision: $(VENV)/torchvision
	PYTHONPATH=$< $(BIN)/python -m pytest -q -m "slow or not slow" tests/orchdata/hf/test_video.py $(ARGS)
	PYTHONPATH=$< $(BIN)/python -m pytest -q -m "slow or not slow" tests/orchdata/hf/test_images.py -k torchvision $(ARGS)

# The wheel by plain `pip install` in an environment of its own, with the newest of all that it requires; then the demo.
# Some 6 GB that are removed again; not tried, with a word, where there is no room.
test-wheel:
	$(PYTHON) scripts/try_wheel.py $(ARGS)

# Wheel and source distribution, the wheel made from the latter, and what a package index would say of them.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

# Faults that are planted in copies of the tree, one at a time: for each, a test must fail.
test-planted: $(STAMP)
	PYTHONPATH=tests/support $(BIN)/python tests/faults/plant.py $(ARGS)

fuzz: $(STAMP)
	PYTHONPATH=tests/support $(BIN)/python tests/fuzz/fuzz.py $(ARGS)

soak: $(STAMP)
	PYTHONPATH=tests/support $(BIN)/python tests/soak/soak.py $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell $(SPELLED)
	$(BIN)/mypy -p orchdata -p benchmarks
	$(BIN)/python -m benchmarks.report --check
	$(BIN)/python -m benchmarks.pictures --check
	$(call SITE,dummy)

docs: $(STAMP)
	$(call SITE,html)
	@echo "the site is in .site/html/index.html"

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python -m benchmarks.balance
	$(BIN)/python -m benchmarks.bins --peers
	$(BIN)/python -m benchmarks.clips
	$(BIN)/python -m benchmarks.decode
	$(BIN)/python -m benchmarks.first_hour
	$(BIN)/python -m benchmarks.papers
	$(BIN)/python -m benchmarks.planners --together
	$(BIN)/python -m benchmarks.planned_layouts
	$(BIN)/python -m benchmarks.planned_steps
	$(BIN)/python -m benchmarks.index_text
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.pauses
	$(BIN)/python -m benchmarks.pieces
	$(BIN)/python -m benchmarks.plans
	$(BIN)/python -m benchmarks.post_balance
	$(BIN)/python -m benchmarks.profile_report
	$(BIN)/orchdata bench plan
	$(BIN)/python -m benchmarks.index
	$(BIN)/python -m benchmarks.parquet
	$(BIN)/python -m benchmarks.ray_engine
	$(BIN)/python -m benchmarks.remote
	$(BIN)/python -m benchmarks.resume
	$(BIN)/python -m benchmarks.start
	$(BIN)/python -m benchmarks.teams
	$(BIN)/python -m benchmarks.throughput
	$(BIN)/orchdata bench throughput
	$(BIN)/python -m benchmarks.exchange
	$(BIN)/python -m benchmarks.train

# torch first, so that nothing later pulls another one in. setuptools warns that folders of the current directory come
# before what is installed: importing orchdata refuses what that would mix.
$(STAMP): pyproject.toml constraints.txt scripts/plain_torchaudio.py
	@$(PYTHON) -c 'import sys; sys.exit("orchdata needs Python >= 3.11, this is " + sys.version.split()[0] + "; set PYTHON=") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip setuptools
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	PYTHONWARNINGS="ignore:Editable installation" $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python scripts/plain_torchaudio.py
	touch $@

$(VENV)/torchvision: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ -c constraints.txt torchvision
	touch $@

# Loaders and solvers that benchmarks compare with, one to an environment, because together they have no solution. Each
# environment sees the packages of $(VENV) behind its own, so that none brings another torch. What multi-storage-client, which
# Energon needs, wants of two packages is older than $(VENV) has.
PEERS := energon grain lance litdata megatron ortools ray spdl streaming torchdata
PEER_VENVS := .venv-peers
energon_packages := megatron-energon
grain_packages := grain
lance_packages := pylance
# These two ask for torchvision, which is built for one torch: they come without what they ask for, and what they use.
litdata_packages := --no-deps litdata boto3 botocore certifi charset_normalizer jmespath lightning-utilities obstore requests \
	s3transfer tifffile urllib3 zstd
megatron_packages := --no-deps megatron-core==0.16.1
ortools_packages := ortools
ray_packages := ray[data]
spdl_packages := spdl
streaming_packages := --no-deps mosaicml-streaming boto3 botocore brotli catalogue certifi charset_normalizer cramjam crc32c \
	jmespath python-snappy requests s3transfer urllib3 xxhash zstd
streaming_beside := scripts/stand_ins/for_streaming
torchdata_packages := --no-deps torchdata

peers: $(PEERS:%=$(PEER_VENVS)/%/.installed)

peers-%: $(PEER_VENVS)/%/.installed ;

$(PEER_VENVS)/%/.installed: $(STAMP) Makefile
	$(if $($*_packages),,$(error no peer is called $*: there are $(PEERS)))
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	$(BIN)/python scripts/see_packages.py $(@D) $($*_beside)
	grep -vE '^(filelock|tzdata)==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet -c $(@D)/constraints.txt $($*_packages)
	touch $@

# Trainers of other projects, each in an environment as those of peers. One that cannot be installed is skipped and
# counted. torchtitan has other bounds than $(VENV) for some packages, and imports triton, which torch for CPUs leaves out.
TOOLS := lightning megatron_core torchtitan trl
TOOL_VENVS := .venv-tools
lightning_tool := --no-deps --ignore-installed lightning==2.6.6
megatron_core_tool := megatron-core==0.16.1
torchtitan_tool := torchtitan==0.3.0 triton
trl_tool := trl==1.16.0

.PHONY: test-tools
test-tools: $(STAMP)
	-$(MAKE) --keep-going $(TOOLS:%=$(TOOL_VENVS)/%/.installed)
	$(BIN)/python -m pytest -q -rs -m tools tests/tools $(ARGS)

$(TOOL_VENVS)/%/.installed: $(STAMP) Makefile
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	$(BIN)/python scripts/see_packages.py $(@D)
	grep -vE '^(datasets|dill|fsspec|multiprocess)==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet -c $(@D)/constraints.txt $($*_tool)
	touch $@

clean:
	rm -rf $(VENV) $(PEER_VENVS) $(TOOL_VENVS) .site docs/names docs/repository .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info

# The tests that compare floats, under the instruction sets of older processors; what integers decide is equal under all.
.PHONY: test-cpus
test-cpus: $(STAMP)
	PYTHONPATH=tests/support NUMBA_CACHE_DIR=$(CURDIR)/$(VENV)/numba-cpus $(BIN)/python tests/cpus/cpus.py $(ARGS)

# The tests with the newest and the oldest packages that pyproject.toml allows, each in an environment of its own. pip
# has no resolver for the oldest ones: uv has. What is tested is the newest or oldest release of each direct requirement.
.PHONY: test-newest test-oldest
test-newest: .venv-newest/.installed
test-oldest: .venv-oldest/.installed
test-newest test-oldest: test-%:
	.venv-$*/bin/python scripts/versions.py
	NUMBA_CACHE_DIR=$(CURDIR)/.venv-$*/numba .venv-$*/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

.venv-newest/.installed: RESOLUTION := highest
.venv-oldest/.installed: RESOLUTION := lowest-direct
.venv-newest/.installed .venv-oldest/.installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip uv
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python --resolution $(RESOLUTION) --upgrade -e '.[dev]'
	# One that does not fit this torch breaks transformers, which imports it wherever it is installed.
	$(@D)/bin/python -c 'import torchaudio' || $(@D)/bin/uv pip uninstall --quiet --python $(@D)/bin/python torchaudio
	touch $@
