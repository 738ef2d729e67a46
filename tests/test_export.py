"""An export is read by everyone who matters, without a missing key, and cannot differ from the drafter it came from."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny
import tiny_models
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tokenizer.job import Exit, JobError
from trainer import export as module
from trainer import selfcheck
from trainer.__main__ import main
from trainer.config import DrafterConfig, Specials
from trainer.export import load_drafter, read_drafter_config, serving_tensors, write_speculators, write_zlab
from trainer.job import ExportArgs, TrainArgs
from trainer.layouts import SPECULATORS, ZLAB, engine_places, read_layout, speculators_config, tensor_shapes
from trainer.prepare import choose
from trainer.selfcheck import compare, record, self_check

QWEN36 = DrafterConfig(
    hidden_size=5120,
    intermediate_size=17408,
    num_hidden_layers=5,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=248320,
    num_target_layers=64,
    target_layer_ids=(1, 16, 31, 46, 61),
    mask_token_id=248070,
    block_size=16,
    layer_types=("sliding_attention",) * 4 + ("full_attention",),
    sliding_window=2048,
    rope_theta=10000000,
    max_position_embeddings=262144,
)


@pytest.fixture(scope="module")
def trained():
    return tiny_models.drafter()


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    out = tmp_path_factory.mktemp("export") / "export"
    write_zlab(trained, out)
    return out


def clean(info):
    return not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"])


def block_inputs(count=9, seed=1):
    """Tap states [1, S, K * H], block embeddings [1, B, H], positions [1, S + B] of one block behind `count` tokens."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(1, count, 96, generator=generator)
    noise = torch.randn(1, 5, 32, generator=generator)
    return states, noise, torch.arange(count + 5)[None]


def rounded(drafter):
    """What serving computes with: the drafter's weights in bfloat16, here as float32."""
    from trainer.drafter import Drafter

    copy = Drafter(drafter.config)
    copy.load_state_dict({name: tensor.float() for name, tensor in serving_tensors(drafter).items()})
    return copy


def ours(drafter, states, noise):
    with torch.no_grad():
        return drafter(noise, drafter.context(states), torch.tensor([[states.shape[1]]]))


def test_config_is_the_superset_that_every_reader_needs():
    written = json.loads(json.dumps(QWEN36.to_dict()))
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-06,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rope_theta": 10000000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
        "tie_word_embeddings": False,
        "use_cache": True,
        "initializer_range": 0.02,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "sliding_window": 2048,
        "use_sliding_window": True,
        "max_window_layers": 5,
        "num_target_layers": 64,
        "block_size": 16,
        "dflash_config": {"block_size": 16, "mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    }
    assert written == expected  # and so no eagle_aux_hidden_state_layer_ids, which vLLM would read unshifted
    assert DrafterConfig.from_dict(written) == QWEN36
    assert len(tensor_shapes(QWEN36)) == 11 * 5 + 3
    assert sum(torch.Size(shape).numel() for shape in tensor_shapes(QWEN36).values()) == pytest.approx(
        1.730e9, rel=1e-3
    )


def test_zlab_reads_it_and_computes_the_same(trained, exported):
    zlab = tiny.peer("dflash.model")
    model, info = zlab.DFlashDraftModel.from_pretrained(exported, output_loading_info=True, dtype=torch.float32)
    assert clean(info)
    assert (model.target_layer_ids, model.mask_token_id, model.block_size) == ([1, 3, 4], 95, 5)
    states, noise, positions = block_inputs()
    with torch.no_grad():
        theirs = model.eval()(position_ids=positions, noise_embedding=noise, target_hidden=states)
    torch.testing.assert_close(theirs, ours(rounded(trained), states, noise), rtol=1e-5, atol=1e-5)
    assert load_file(exported / "model.safetensors")["fc.weight"].dtype == torch.bfloat16


def test_specforge_reads_it(exported):
    specforge = tiny.peer("specforge.modeling.draft.dflash")
    model, info = specforge.DFlashDraftModel.from_pretrained(exported, output_loading_info=True, dtype=torch.float32)
    assert clean(info)
    assert (model.target_layer_ids, model.mask_token_id, model.block_size) == ([1, 3, 4], 95, 5)
    assert (model.layer_types, model.sliding_window) == (("sliding_attention", "full_attention"), 7)


def speculators_load(path, **kwargs):
    theirs = tiny.peer("speculators.models.dflash")
    return theirs.DFlashDraftModel.from_pretrained(path, dtype=torch.float32, **kwargs)


def assert_speculators_has(path, trained, target):
    """Every tensor is ours, embedding and head are the target's, taps are counted as vLLM counts them."""
    assert clean(speculators_load(path, output_loading_info=True)[1])
    model = speculators_load(path)
    found, tensors = model.state_dict(), serving_tensors(trained)
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in tensors.items())
    verifier = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    assert set(found) - set(tensors) == verifier
    assert torch.equal(found["embed_tokens.weight"], target.get_input_embeddings().weight)
    assert torch.equal(found["lm_head.weight"], target.get_output_embeddings().weight)
    assert model.target_layer_ids == [2, 4, 5]
    assert (model.mask_token_id, model.block_size, model.sliding_window) == (95, 5, 7)


@pytest.mark.parametrize("family", [tiny_models.qwen3, tiny_models.nested_qwen35], ids=["flat", "nested"])
def test_speculators_reads_our_own_layout(family, trained, tmp_path):
    target = tiny_models.saved(family, tmp_path)
    write_speculators(trained, tmp_path / "out", str(target))
    assert_speculators_has(tmp_path / "out", trained, family())


def test_speculators_computes_the_same(tmp_path):
    """Its own model, read from our directory, drafts what ours drafts; the window is wide, since it counts it otherwise."""
    from torch.nn.attention.flex_attention import create_mask

    from trainer.drafter import noise_ids

    drafter, target = tiny_models.drafter(sliding_window=40), tiny_models.qwen3()
    write_speculators(drafter, tmp_path / "out", str(tiny_models.saved(lambda: target, tmp_path)))
    theirs = speculators_load(tmp_path / "out").eval()
    theirs.config.transformer_layer_config._attn_implementation = "sdpa"  # its default has no CPU kernel
    theirs._create_mask_fn = create_mask
    states, (ids, learnt, document) = block_inputs(20)[0], torch.zeros(3, 1, 20, dtype=torch.long)
    ids[0, 9], learnt[0, 9] = 33, 1  # the one anchor
    with torch.no_grad():
        logits = theirs._backbone_forward(states, ids, learnt, torch.zeros(1, 20, 32), document, max_anchors=1)[1]
        live = rounded(drafter)
        noise = live.embed(noise_ids(ids[:, 9:10], live.config), target.get_input_embeddings().weight)
        mine = live.logits(ours(live, states[:, :9], noise), target.lm_head.weight)
    torch.testing.assert_close(logits, mine, rtol=1e-4, atol=1e-4)


def test_speculators_own_converter_reads_the_zlab_layout(trained, exported, tmp_path):
    """And what it writes says the same as ours, beside defaults and the versions of libraries."""
    convert = tiny.peer("speculators.convert.dflash")
    target = tiny_models.saved(tiny_models.qwen3, tmp_path)
    convert.DFlashConverter().convert(exported, tmp_path / "theirs", str(target))
    assert_speculators_has(tmp_path / "theirs", trained, tiny_models.qwen3())
    theirs = json.loads((tmp_path / "theirs/config.json").read_text())
    mine = json.loads(json.dumps(speculators_config(trained.config, str(target), ["Qwen3ForCausalLM"])))
    assert mine["transformer_layer_config"].pop("rope_theta") == 500000.0
    layer = theirs.pop("transformer_layer_config")
    assert {key: layer[key] for key in mine["transformer_layer_config"]} == mine.pop("transformer_layer_config")
    assert {key: theirs[key] for key in mine} == mine


def test_what_speculators_cannot_say_is_refused(trained):
    for wrong in ({"is_causal": True}, {"input_embedding_scale": 2.0}):
        with pytest.raises(JobError, match=next(iter(wrong))):
            speculators_config(tiny_models.drafter(**wrong).config, "t", [])
    assert speculators_config(tiny_models.drafter(is_causal=False).config, "t", [])["sliding_window_non_causal"]


def test_wrong_target_for_speculators_is_refused(trained, tmp_path):
    def deeper():
        return tiny_models.hf.LlamaForCausalLM(
            tiny_models.hf.LlamaConfig(**tiny_models.SHAPE | {"num_hidden_layers": 8})
        )

    with pytest.raises(JobError, match="has 8 layers, the drafter was trained on 6"):
        write_speculators(trained, tmp_path / "out", str(tiny_models.saved(deeper, tmp_path)))
    assert not (tmp_path / "out").exists()


def test_round_trip_for_init_from(trained, exported):
    again = load_drafter(exported)
    assert all(parameter.requires_grad for parameter in again.parameters())
    assert again.config == trained.config
    states, noise, _ = block_inputs()
    assert torch.equal(ours(again, states, noise), ours(rounded(trained), states, noise))


def test_a_drafter_to_start_from_is_checked_like_a_new_one(exported):
    target = tiny_models.qwen3().config
    args = TrainArgs("data", "out", "target", init_from=str(exported))
    assert choose(args, target, Specials(96), [])[0] == tiny_models.drafter().config
    target.eos_token_id = [2, 95]
    with pytest.raises(JobError, match="mask_token_id: 95 is the eos token"):
        choose(args, target, Specials(96), [])


def test_a_published_checkpoint_in_several_files_loads(trained, exported, tmp_path):
    tensors = load_file(exported / "model.safetensors")
    halves = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    for number, half in enumerate(halves):
        save_file(half, tmp_path / f"model-{number}.safetensors")
    index = {"weight_map": {name: f"model-{n}.safetensors" for n, half in enumerate(halves) for name in half}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_bytes((exported / "config.json").read_bytes())
    assert all(torch.equal(t, tensors[name].float()) for name, t in load_drafter(tmp_path).state_dict().items())


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


def edited(path, tmp_path, edit=lambda config: None):
    """A copy of an export with its config changed."""
    copy = tmp_path / "copy"
    copy.mkdir()
    data = json.loads((path / "config.json").read_text())
    edit(data)
    (copy / "config.json").write_text(json.dumps(data))
    (copy / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    return copy


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


def test_a_failed_export_leaves_nothing(trained, tmp_path, monkeypatch):
    """The exporter itself writes another tap list: the check stops it before the directory appears."""
    written = DrafterConfig.to_dict
    nested = {"block_size": 5, "mask_token_id": 95, "target_layer_ids": [0, 2, 3]}
    monkeypatch.setattr(DrafterConfig, "to_dict", lambda self: written(self) | {"dflash_config": nested})
    with pytest.raises(JobError, match="target_layer_ids is"):
        write_zlab(trained, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_export_of_either_layout_ends_with_70(exported, tmp_path, monkeypatch, capsys):
    """The verb, with an exporter that forgets the shift of the taps, or writes another precision."""
    target = tiny_models.saved(tiny_models.qwen3, tmp_path)

    def unshifted(config, *more):
        return speculators_config(config, *more) | {"aux_hidden_state_layer_ids": list(config.target_layer_ids)}

    def coarse(drafter):
        return {n: w.to(torch.float8_e4m3fn).to(w.dtype) for n, w in serving_tensors(drafter).items()}

    def call(layout, out):
        code = main(["export", *ExportArgs(str(exported), str(tmp_path / out), layout, str(target)).to_argv()])
        return code, capsys.readouterr().err

    monkeypatch.setattr(module, "speculators_config", unshifted)
    code, words = call(SPECULATORS, "one")
    assert code == 70 and "aux_hidden_state_layer_ids is [1, 3, 4] in config.json, [2, 4, 5] in the drafter" in words
    monkeypatch.setattr(module, "speculators_config", speculators_config)
    monkeypatch.setattr(module, "serving_tensors", coarse)
    for layout in (ZLAB, SPECULATORS):
        code, words = call(layout, layout)
        assert code == 70 and "in the file is not the drafter's in bfloat16" in words
    assert [entry.name for entry in tmp_path.iterdir()] == ["target"]


def test_an_earlier_export_is_replaced_and_nothing_else(trained, tmp_path):
    out = tmp_path / "out"
    write_zlab(trained, out)
    write_zlab(tiny_models.drafter(rope_theta=7.0), out, {"step": 2})
    assert read_drafter_config(out).rope_theta == 7.0
    assert json.loads((out / "provenance.json").read_text()) == {"step": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    (out / "notes.txt").write_text("mine")
    with pytest.raises(JobError, match="holds other files"):
        write_zlab(trained, out)
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_a_full_disk_is_named(error, trained, tmp_path, monkeypatch):
    """By the system, or by safetensors, whose error is no OSError."""

    def full(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(JobError, match="No space left on device") as caught:
        write_zlab(trained, tmp_path / "out")
    assert caught.value.code == Exit.DISK_FULL
    assert list(tmp_path.iterdir()) == []


TENSORS = {
    "missing": (lambda t: t.pop("norm.weight"), r"missing norm\.weight"),
    "prefixed": (lambda t: t.update({"model.fc.weight": t.pop("fc.weight")}), r"missing fc\.weight; unexpected model"),
    "shape": (lambda t: t.update({"norm.weight": torch.ones(31)}), r"norm\.weight is \(31,\), not \(32,\)"),
    "float16": (lambda t: t.update({"norm.weight": torch.ones(32).half()}), "float16"),
    "nan": (lambda t: t["norm.weight"].fill_(float("nan")), "NaN"),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_do_not_fit_are_named(kind, exported, tmp_path):
    edit, words = TENSORS[kind]
    copy = edited(exported, tmp_path)
    tensors = load_file(copy / "model.safetensors")
    edit(tensors)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(JobError, match=words):
        load_drafter(copy)


def test_a_compiled_drafter_loses_its_prefix(trained, exported):
    """`torch.compile` renames every tensor; engines would take none of them and serve random weights."""
    compiled = torch.compile(trained)
    assert all(name.startswith("_orig_mod.") for name in compiled.state_dict())
    assert set(serving_tensors(compiled)) == set(tensor_shapes(trained.config))


@pytest.mark.parametrize("taps", [[], [3, 1], [1, 1, 3], [-1, 2, 3], [1, 3, 5], [1, 3, 6]])
def test_the_exporter_has_no_way_to_write_wrong_taps(taps):
    with pytest.raises(JobError, match="target_layer_ids"):
        tiny_models.drafter(target_layer_ids=tuple(taps))


def test_the_verb(exported, tmp_path):
    def call(*argv):
        root = Path(module.__file__).parent.parent
        command = [sys.executable, "-P", "-m", "trainer", "export", *argv]
        return subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(root)}, cwd=tmp_path)

    done = call(*ExportArgs(checkpoint=str(exported), out="copy").to_argv())
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert (tmp_path / "copy/model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()
    refused = call(*ExportArgs(checkpoint=str(exported), out="other", format="speculators").to_argv())
    assert refused.returncode == Exit.USAGE
    assert refused.stderr == "error: the speculators layout stores its target\nhint: give --target\n"
    assert call(*ExportArgs(checkpoint="nowhere", out="o").to_argv()).returncode == Exit.CONFIG
    assert call("--contract=2", "--checkpoint=c", "--out=o").returncode == Exit.CONFIG


def test_what_the_verb_cannot_read_or_write_is_one_line(exported, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    half = edited(exported, tmp_path)
    (half / "provenance.json").write_text('{"step": 2')
    for source, out, words in (
        (exported, tmp_path / "file/out", "cannot be made in"),
        (exported, tmp_path / "file", "holds other files than an export"),
        (half, tmp_path / "out", "provenance.json` cannot be read"),
    ):
        assert main(["export", *ExportArgs(str(source), str(out)).to_argv()]) == Exit.CONFIG
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 2  # the error and its hint


def test_speculators_layout_needs_a_target_that_its_reader_can_open(exported, tmp_path, monkeypatch, capsys):
    """It takes embedding and head from there, and knows no GGUF."""
    monkeypatch.setattr(module, "read_config", lambda name: tiny_models.qwen3().config)
    (tmp_path / "t.gguf").write_bytes(b"GGUF")
    argv = ExportArgs(str(exported), str(tmp_path / "out"), SPECULATORS, str(tmp_path / "t.gguf")).to_argv()
    assert main(["export", *argv]) == Exit.CONFIG
    assert "is a GGUF file" in capsys.readouterr().err and not (tmp_path / "out").exists()
