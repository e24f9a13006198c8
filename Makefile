# make demo and make test set everything up by themselves; PYTHON=... names another Python 3.10 or later.
# Where that Python has a torch (a ROCm build, say), it is used and never replaced.

PYTHON ?= python3
# DIFFUSERS=0.37.1 works with that version, in an environment of its own.
DIFFUSERS ?=
VENV := .venv$(if $(DIFFUSERS),-diffusers-$(DIFFUSERS))
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test quality style docs clean

demo: $(READY)
	$(BIN)/diffusers-rocm generate --tp 2 --seed 0 --prompts-file utils/demo_prompts.txt --out demo --contact-sheet demo/contact_sheet.png

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

quality: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python utils/make_tables.py --check
	$(BIN)/python utils/make_model_table.py --check
	$(BIN)/python utils/make_api.py --check

# A site of the pages in docs/, in build/site.
docs: $(READY)
	$(BIN)/python -m pip install --quiet "mkdocs-material==9.*"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

style: $(READY)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

$(READY): setup.py utils/create_venv.sh
	sh utils/create_venv.sh "$(PYTHON)" "$(VENV)" "$(DIFFUSERS)"
	touch $@

clean:
	rm -rf .venv* demo outputs build *.egg-info
