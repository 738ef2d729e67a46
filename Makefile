# Two commands do all set-up: `make demo` and `make test`.
PY := .venv/bin/python
IMAGES ?= tokenizer trainer
.PHONY: demo test setup images push lint render bench

setup: .venv/ready
.venv/ready: pyproject.toml constraints.txt benchmarks/peers.sh
	python3 -m venv .venv && $(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]' && bash benchmarks/peers.sh $(PY) && touch $@
demo: setup
	$(PY) examples/demo.py
test: setup lint
	$(PY) -m pytest -n logical --dist loadfile
lint: setup
	$(PY) -m ruff check . && $(PY) -m mypy
bench: setup
	$(PY) benchmarks/tokenize.py && $(PY) benchmarks/train_step.py
images:
	sh images/build.sh $(IMAGES)
push: images
	sh images/push.sh $(IMAGES)
render:
	$(PY) -m dflashctl tokenize --dry-run=client $(ARGS)
