"""An export is read by everyone who matters, without a missing key, and cannot differ from the drafter it came from."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import tiny_models
import torch
from export_fixtures import a_drafter, edited, its_directory  # noqa: F401
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tokenizer.job import Exit, JobError
from trainer import export as module
from trainer.__main__ import main
from trainer.config import DrafterConfig, Specials
from trainer.export import load_drafter, read_drafter_config, serving_tensors, write_speculators, write_zlab
from trainer.job import ExportArgs, TrainArgs
from trainer.layouts import SPECULATORS, ZLAB, speculators_config, tensor_shapes
from trainer.prepare import choose

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
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "wrote `copy`\n")
    again = call(*ExportArgs(checkpoint=str(exported), out="copy").to_argv())
    assert (again.returncode, again.stderr) == (0, "replaced the export in `copy`\n")
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
