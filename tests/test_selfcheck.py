"""The check of an export from its files alone, in a fresh process: every sabotage is caught by its name."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny_models
import torch
from export_fixtures import a_drafter, edited, its_directory  # noqa: F401
from safetensors.torch import load_file, save_file

from tokenizer.job import Exit, JobError
from trainer import export as module
from trainer import selfcheck
from trainer.export import write_speculators, write_zlab
from trainer.layouts import SPECULATORS, ZLAB, engine_places, read_layout, speculators_config
from trainer.selfcheck import compare, record, self_check


class Written(NamedTuple):
    """An export, its layout, the target that it names, and what the live drafter means."""

    path: Path
    layout: str
    target: str
    reference: Path


@pytest.fixture(scope="module")
def exports(trained, exported, tmp_path_factory):
    """Layout -> its export."""
    folder = tmp_path_factory.mktemp("written")
    target = str(tiny_models.saved(tiny_models.qwen3, folder))
    write_speculators(trained, folder / "out", target)
    found = {}
    for layout, path, verifier in ((ZLAB, exported, ""), (SPECULATORS, folder / "out", target)):
        record(trained, folder / layout, layout, verifier)
        found[layout] = Written(path, layout, verifier, folder / layout)
    return found


@pytest.fixture(params=[ZLAB, SPECULATORS])
def written(request, exports):
    return exports[request.param]


def put(place, value):
    """An edit of config.json at a dotted place."""

    def edit(data):
        *path, last = place.split(".")
        for key in path:
            data = data[int(key)] if isinstance(data, list) else data[key]
        data[last] = value

    return edit


LAYER = {  # in the config of the layers, which is the whole file in z-lab's layout
    "architecture of a layer": ("model_type", "llama"),
    "window": ("sliding_window", 6),
    "window switched off": ("use_sliding_window", False),
    "layers": ("layer_types", ["full_attention", "full_attention"]),
    "layers guessed": ("layer_types", None),
    "base where transformers 4 looks": ("rope_theta", 10000.0),
    "base where transformers 5 looks": ("rope_parameters.rope_theta", 10000.0),
    "scaled rotary": ("rope_parameters.rope_type", "yarn"),
    "partial rotary": ("rope_parameters.partial_rotary_factor", 0.25),
    "norm": ("rms_norm_eps", 0.5),
    "biases": ("attention_bias", True),
    "activation": ("hidden_act", "gelu"),
    "heads": ("num_attention_heads", 2),
    "vocabulary": ("vocab_size", 95),
    "precision": ("dtype", "float16"),
}
OWN = {
    ZLAB: {
        "taps": ("dflash_config.target_layer_ids", [0, 2, 3]),
        "taps counted from 1": ("dflash_config.target_layer_ids", [2, 4, 5]),
        "taps in another order": ("dflash_config.target_layer_ids", [3, 1, 4]),
        "taps left out": ("dflash_config", {"mask_token_id": 95, "block_size": 5}),
        "taps for another engine": ("eagle_aux_hidden_state_layer_ids", [1, 3, 4]),
        "depth of the target": ("num_target_layers", 7),
        "mask": ("dflash_config.mask_token_id", 94),
        "no mask": ("dflash_config.mask_token_id", None),
        "block where z-lab looks": ("dflash_config.block_size", 4),
        "block where SpecForge looks": ("block_size", 4),
        "class": ("architectures", ["Qwen3ForCausalLM"]),
        "causal": ("is_causal", True),
    },
    SPECULATORS: {
        "taps": ("aux_hidden_state_layer_ids", [1, 3, 5]),
        "taps counted from 0": ("aux_hidden_state_layer_ids", [1, 3, 4]),
        "mask": ("mask_token_id", 94),
        "no mask": ("mask_token_id", None),
        "block": ("block_size", 4),
        "block where vLLM looks": ("speculators_config.proposal_methods.0.speculative_tokens", 5),
        "anchor slot": ("sample_from_anchor", True),
        "causal": ("sliding_window_non_causal", True),
        "reduced vocabulary": ("draft_vocab_size", 64),
        "verifier": ("speculators_config.verifier.name_or_path", "another"),
        "class": ("architectures", ["Eagle3DraftModel"]),
        "kind": ("speculators_model_type", "eagle3"),
    },
}


PLACES = [(ZLAB, *change) for change in {**LAYER, **OWN[ZLAB]}.values()]
PLACES += [(SPECULATORS, f"transformer_layer_config.{place}", value) for place, value in LAYER.values()]
PLACES += [(SPECULATORS, *change) for change in OWN[SPECULATORS].values()]


@pytest.mark.parametrize(("layout", "place", "value"), PLACES)
def test_self_check_catches_a_wrong_config(layout, place, value, exports, tmp_path):
    """Every place that an engine reads, in either layout, by its own name."""
    written = exports[layout]
    with pytest.raises(JobError) as caught:
        compare(edited(written.path, tmp_path, put(place, value)), written.reference)
    assert caught.value.code == Exit.SELF_CHECK
    field = "target_layer_ids" if place == "dflash_config" else place.rpartition(".")[2]
    assert field in caught.value.message.split(" is ")[0] and "in the drafter" in caught.value.message


def test_self_check_passes_what_was_written(written):
    compare(written.path, written.reference)
    self_check(tiny_models.drafter(), written.path, written.layout, written.target)


def rewritten(edit):
    """An edit of the tensors."""

    def apply(copy):
        tensors = load_file(copy / "model.safetensors")
        edit(tensors)
        save_file(tensors, copy / "model.safetensors")

    return apply


def swap(one, other):
    def edit(tensors):
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return edit


GATE, UP = (f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
VALUES = "layers.1.self_attn.v_proj.weight"
FILES = {
    "taps in another order": (
        rewritten(lambda t: t.update({"fc.weight": t["fc.weight"].roll(32, dims=1)})),
        r"fc\.weight in the file is not the drafter's",
    ),
    "swapped": (rewritten(swap(GATE, UP)), r"layers\.0\.mlp\.gate_proj\.weight in the file"),
    "swapped layers": (rewritten(swap(GATE, GATE.replace("0", "1"))), r"layers\.0\.mlp\.gate_proj\.weight in the file"),
    "perturbed": (rewritten(lambda t: t[VALUES][3, 5].mul_(1.01)), r"layers\.1\.self_attn\.v_proj\.weight in the file"),
    "a norm of another step": (rewritten(lambda t: t["hidden_norm.weight"].fill_(1.25)), r"hidden_norm\.weight in the"),
    "8 bits": (
        rewritten(lambda t: t.update({n: w.to(torch.float8_e4m3fn).to(w.dtype) for n, w in t.items()})),
        "in the file is not the drafter's in bfloat16",
    ),
    "float32": (rewritten(lambda t: t.update({n: w.float() for n, w in t.items()})), "not the drafter's in bfloat16"),
    "float16": (rewritten(lambda t: t.update({n: w.half() for n, w in t.items()})), "float16"),
    "missing tensor": (rewritten(lambda t: t.pop("norm.weight")), r"missing norm\.weight"),
    "reduced vocabulary": (rewritten(lambda t: t.update(d2t=torch.zeros(64))), "unexpected d2t"),
    "nan": (rewritten(lambda t: t["norm.weight"].fill_(math.nan)), r"norm\.weight holds NaN"),
    "no weights": (lambda copy: (copy / "model.safetensors").unlink(), r"model\.safetensors is missing"),
    "half the weights": (lambda copy: os.truncate(copy / "model.safetensors", 9000), r"model\.safetensors cannot be"),
    "no config": (lambda copy: (copy / "config.json").unlink(), r"no readable config\.json: No such file"),
    "half the config": (lambda copy: os.truncate(copy / "config.json", 90), r"no readable config\.json: not JSON"),
}


@pytest.mark.parametrize("kind", FILES)
def test_self_check_catches_wrong_files(kind, written, tmp_path):
    damage, words = FILES[kind]
    copy = edited(written.path, tmp_path)
    damage(copy)
    with pytest.raises(JobError, match=words) as caught:
        compare(copy, written.reference)
    assert caught.value.code == Exit.SELF_CHECK


def test_self_check_runs_in_a_fresh_process(trained, written, tmp_path):
    """And says there what differs, whatever the exporter believes."""
    copy = edited(written.path, tmp_path, put("block_size", 4))
    with pytest.raises(
        JobError, match=r"self-check of the export: block_size is 4 in config\.json, 5 in the drafter"
    ) as c:
        self_check(trained, copy, written.layout, written.target)
    assert c.value.code == Exit.SELF_CHECK
    root = Path(module.__file__).parent.parent
    command = [sys.executable, "-P", "-m", "trainer", "selfcheck", str(copy), str(written.reference)]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(root)}, cwd=tmp_path)
    assert (done.returncode, done.stderr.startswith("error: block_size is 4")) == (70, True)


def test_self_check_compares_with_the_live_drafter(trained, exported):
    """Not with the tensors that the exporter took for it, nor with another step's."""
    live = tiny_models.drafter()
    with torch.no_grad():
        live.fc.weight[3, 7] *= 1.05
    with pytest.raises(JobError, match=r"fc\.weight in the file is not the drafter's"):
        self_check(live, exported)


def test_self_check_compares_what_is_drafted(written, monkeypatch):
    """Where names and bytes are right and the reading is wrong, the logits tell."""
    read = selfcheck.read_layout
    monkeypatch.setattr(selfcheck, "read_layout", lambda *a: replace(read(*a), rms_norm_eps=0.5))
    monkeypatch.setattr(selfcheck, "_meant", lambda config: {})
    with pytest.raises(JobError, match=r"logits differ by \S+ of their largest"):
        compare(written.path, written.reference)


def test_weights_that_bfloat16_destroys_are_caught(tmp_path):
    """Two halves of an MLP that cancel but for less than bfloat16 can hold."""
    live = tiny_models.drafter(intermediate_size=64)
    with torch.no_grad():
        for layer in live.layers:
            mlp = layer.mlp
            for weight in (mlp.gate_proj.weight, mlp.up_proj.weight):
                weight[32:] = weight[:32]
            mlp.down_proj.weight[:, 32:] = -mlp.down_proj.weight[:, :32] * 1.0005
            mlp.down_proj.weight *= 2000
    with pytest.raises(JobError, match="bfloat16 changes the logits by") as caught:
        write_zlab(live, tmp_path / "out")
    assert caught.value.code == Exit.SELF_CHECK
    assert list(tmp_path.iterdir()) == []


def test_every_place_that_is_checked_is_written(written, trained):
    """A misspelt place would compare nothing with nothing."""
    data = json.loads((written.path / "config.json").read_text())
    absent = []
    for place in engine_places(trained.config, written.layout, written.target):
        found = data
        for key in place.split("."):
            found = found[int(key)] if isinstance(found, list) else (found or {}).get(key)
        absent += [place.rpartition(".")[2]] if found is None else []
    assert set(absent) <= {"partial_rotary_factor", "rope_scaling", "is_causal", "eagle_aux_hidden_state_layer_ids"}


@pytest.mark.parametrize("changes", [{}, {"is_causal": False}, {"layer_types": ("sliding_attention",) * 2}])
def test_our_reading_of_speculators_layout(changes):
    config = tiny_models.drafter(**changes).config
    data = json.loads(json.dumps(speculators_config(config, "t", [])))
    assert read_layout(data, SPECULATORS, 6) == config


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d.pop("transformer_layer_config"), "transformer_layer_config: None"),
        (lambda d: d.update(aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids: None"),
        (lambda d: d.update(aux_hidden_state_layer_ids=["2", 4]), "aux_hidden_state_layer_ids"),
        (lambda d: d.update(aux_hidden_state_layer_ids=[0, 4]), r"target_layer_ids: \[-1, 3\]"),
        (lambda d: d.update(draft_vocab_size=64), "draft_vocab_size: 64"),
        (lambda d: d.update(sample_from_anchor=True), "sample_from_anchor"),
        (lambda d: d.update(speculators_model_type="dspark"), "speculators_model_type"),
        (lambda d: d.update(mask_token_id=None), "mask_token_id: null"),
    ],
)
def test_what_is_no_speculators_drafter_is_named(edit, words, trained):
    data = json.loads(json.dumps(speculators_config(trained.config, "t", [])))
    edit(data)
    with pytest.raises(JobError, match=words):
        read_layout(data, SPECULATORS, 6)
