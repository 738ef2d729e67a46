"""A tiny drafter and its z-lab directory, made once a module, for the tests of exports and of their self-check."""

import json

import pytest
import tiny_models

from trainer.export import write_zlab


@pytest.fixture(scope="module", name="trained")
def a_drafter():
    return tiny_models.drafter()


@pytest.fixture(scope="module", name="exported")
def its_directory(trained, tmp_path_factory):
    out = tmp_path_factory.mktemp("export") / "export"
    write_zlab(trained, out)
    return out


def edited(path, tmp_path, edit=lambda config: None):
    """A copy of an export with its config changed."""
    copy = tmp_path / "copy"
    copy.mkdir()
    data = json.loads((path / "config.json").read_text())
    edit(data)
    (copy / "config.json").write_text(json.dumps(data))
    (copy / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    return copy
