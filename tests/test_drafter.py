"""The drafter's shape: derived, shown, refused by name; and its module: names, initial values, context in parts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import vocab

from tokenizer.job import Exit, JobError
from trainer.config import FULL, SLIDING, DrafterConfig, Specials, default_mask_id, default_taps, derive
from trainer.drafter import Drafter, noise_ids

QWEN36: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "vision_config": {"hidden_size": 1152},
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 248044,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
    },
}
SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
QWEN3: dict[str, Any] = SMOLLM2 | {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": [151645, 151643],
    "pad_token_id": None,
}
SPARE = Specials(151669, tuple(range(151643, 151669)), {"eos": frozenset({151645})})
FULL_VOCAB = Specials(49152, tuple(range(17)), {"end of turn": frozenset({0, 2}), "bos": frozenset({1})})


def refusal(what: Any, *args: Any, **kwargs: Any) -> JobError:
    with pytest.raises(JobError) as caught:
        what(*args, **kwargs)
    assert caught.value.code == Exit.CONFIG
    return caught.value


# deriving


def test_qwen36_with_its_real_vocabulary_gives_the_published_drafter() -> None:
    specials = Specials.read(vocab.qwen36_dir())
    choice = derive(QWEN36, specials)
    written = choice.config.to_dict()
    published = {  # the config of the released Qwen3.6-27B drafter
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
        "layer_types": [SLIDING] * 4 + [FULL],
        "sliding_window": 2048,
        "use_sliding_window": True,
        "max_window_layers": 5,
        "num_target_layers": 64,
        "block_size": 16,
        "dflash_config": {"block_size": 16, "mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    }
    assert written == published
    assert not {248070} & set().union(*specials.named.values())
    with torch.device("meta"):
        assert round(sum(p.numel() for p in Drafter(choice.config).parameters()) / 1e9, 3) == 1.730


def test_llama_family_takes_the_targets_heads_and_the_highest_spare_token() -> None:
    choice = derive(SMOLLM2, FULL_VOCAB, {"num_hidden_layers": 2, "block_size": 8})
    c = choice.config
    assert (c.num_attention_heads, c.num_key_value_heads, c.head_dim) == (9, 3, 64)
    assert c.layer_types == (FULL, FULL) and c.sliding_window is None and c.rope_theta == 100000
    assert c.mask_token_id == 16 and c.target_layer_ids == (1, 8, 14, 20, 27)
    assert derive(SMOLLM2, FULL_VOCAB, used={16, 15, 13}).config.mask_token_id == 14


def test_qwen3_takes_the_first_unused_row() -> None:
    choice = derive(QWEN3, SPARE)
    assert choice.config.mask_token_id == 151669
    assert (choice.config.num_attention_heads, choice.config.head_dim) == (32, 128)
    assert "mask_token_id = 151669  (first unused embedding row)" in choice.lines()


def test_every_value_is_shown_and_can_be_given() -> None:
    given: dict[str, Any] = {
        "num_hidden_layers": 2,
        "block_size": 10,
        "target_layer_ids": [0, 5, 34],
        "mask_token_id": 151700,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "sliding_window": 512,
        "rope_theta": 5e5,
        "intermediate_size": 999,
        "dtype": "float32",
        "is_causal": True,
        "input_embedding_scale": 2.0,
    }
    choice = derive(QWEN3, SPARE, given | {"hidden_size": None})
    for name, value in given.items():
        assert getattr(choice.config, name) == (tuple(value) if isinstance(value, list) else value)
        assert choice.origin[name] == "given"
    assert choice.config.layer_types == (SLIDING, FULL)
    shown = {line.split(" = ")[0] for line in choice.lines()}
    assert shown == set(DrafterConfig.__dataclass_fields__)
    assert derive(QWEN36, SPARE, {"sliding_window": 0}).config.layer_types == (FULL,) * 5


@pytest.mark.parametrize("layers", range(2, 70))
def test_default_taps_fit_any_target(layers: int) -> None:
    taps = default_taps(layers)
    assert list(taps) == sorted(set(taps)) and taps[0] >= 0 and taps[-1] < layers - 1
    DrafterConfig(**{**fields_of(tiny.config()), "num_target_layers": layers, "target_layer_ids": taps})


def fields_of(c: DrafterConfig) -> dict[str, Any]:
    return {name: getattr(c, name) for name in DrafterConfig.__dataclass_fields__}


def test_specials_are_read_from_a_tokenizer_directory(tmp_path: Path) -> None:
    added = [{"id": 300, "content": "<pad>"}, {"id": 301, "content": "<|im_end|>"}, {"id": 302, "content": "<x>"}]
    data = {"model": {"vocab": {"a": 0, "b": 7}}, "added_tokens": added}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    assert Specials.read(tmp_path).named == {"end of turn": frozenset({301})}
    told = {"pad_token": {"content": "<pad>"}, "eos_token": "<|im_end|>", "bos_token": "b"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    read = Specials.read(tmp_path)
    assert (read.size, read.added) == (303, (300, 301, 302))
    assert {role: set(ids) for role, ids in read.named.items()} == {
        "end of turn": {301},
        "pad": {300},
        "eos": {301},
        "bos": {7},
    }


def test_a_scaled_target_leaves_its_base_alone() -> None:
    """The draft is never scaled: yarn, llama3 and older spellings give it the base and nothing else."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    plain = derive(QWEN3, SPARE).config
    assert derive(QWEN3 | {"rope_scaling": yarn}, SPARE).config == plain
    for rope in (yarn, {"rope_type": "llama3", "factor": 8.0}):
        target = {k: v for k, v in QWEN3.items() if k != "rope_theta"} | {"rope_parameters": rope | {"rope_theta": 5e5}}
        written = derive(target, SPARE).config.to_dict()
        assert written["rope_theta"] == 5e5
        assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": 5e5}


def test_a_target_of_experts_gets_a_dense_drafter() -> None:
    """Qwen3.5's and 3.6's mixtures name no dense width."""
    text = {k: v for k, v in QWEN36["text_config"].items() if k != "intermediate_size"}
    text |= {"model_type": "qwen3_5_moe_text", "hidden_size": 2048, "moe_intermediate_size": 512}
    choice = derive({"model_type": "qwen3_5_moe", "text_config": text}, SPARE)
    assert (choice.config.intermediate_size, choice.config.num_attention_heads) == (6144, 32)
    assert "experts" in choice.origin["intermediate_size"]


def test_a_targets_own_windows_and_biases_are_not_the_drafts() -> None:
    target = QWEN3 | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True, "attention_bias": True}
    written = derive(target, SPARE).config.to_dict()
    assert written["layer_types"] == [FULL] * 5 and written["sliding_window"] is None
    assert written["attention_bias"] is False


# refusing


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("target_layer_ids", (), "no tap"),
        ("target_layer_ids", (1, 1), "not strictly ascending"),
        ("target_layer_ids", (5, 3), "not strictly ascending"),
        ("target_layer_ids", (-1, 3), "leaves 0..34"),
        ("target_layer_ids", (1, 35), "leaves 0..34"),
        ("mask_token_id", 151645, "eos token"),
        ("mask_token_id", 151643, "is the eos token"),
        ("mask_token_id", 151936, "not one of the target's 151936"),
        ("mask_token_id", -1, "not one of"),
        ("block_size", 1, "at least one drafted token"),
        ("dtype", "float16", "overflow"),
        ("head_dim", 63, "odd"),
        ("num_key_value_heads", 5, "does not divide"),
        ("num_hidden_layers", 0, "positive whole number"),
        ("sliding_window", -3, "-3 keys"),
        ("layer_types", (FULL,), "1 names for 5 layers"),
        ("layer_types", (FULL,) * 4 + ("linear_attention",), "neither"),
        ("rope_theta", 0, "positive number"),
        ("rope_theta", math.inf, "positive number"),
        ("target_layer_ids", "1,2", "not a list of layer numbers"),
        ("target_layer_ids", (1.0, 2), "not a list of layer numbers"),
        ("layer_types", FULL, "not a list of names"),
        ("num_hidden_layers", "2", "positive whole number"),
        ("sliding_window", 2.5, "2.5 keys"),
        ("is_causal", "no", "neither true nor false"),
        ("final_logit_softcapping", 0, "positive number"),
        ("taps", (1,), "not a field"),
    ],
)
def test_what_cannot_work_is_refused_by_its_field(name: str, value: Any, words: str) -> None:
    error = refusal(derive, QWEN3, SPARE, {name: value})
    assert error.message.startswith(f"{name}: ") and words in error.message


def test_a_mask_id_of_null_and_the_end_of_turn_are_refused() -> None:
    written = tiny.config().to_dict()
    written["dflash_config"]["mask_token_id"] = None
    assert "mask_token_id: null" in refusal(DrafterConfig.from_dict, written).message
    assert "end of turn" in refusal(derive, SMOLLM2, FULL_VOCAB, {"mask_token_id": 0}).message
    assert "pad" in refusal(derive, SMOLLM2 | {"pad_token_id": 9}, FULL_VOCAB, {"mask_token_id": 9}).message
    nothing = Specials(10, (1,), {"eos": frozenset({1})})
    assert "mask_token_id" in refusal(default_mask_id, "llama", 10, nothing).message


def test_unknown_families_and_incomplete_targets_are_refused() -> None:
    assert refusal(derive, QWEN3 | {"model_type": "mamba"}, SPARE).message.startswith("model_type: `mamba`")
    short = {k: v for k, v in QWEN3.items() if k != "intermediate_size"}
    assert refusal(derive, short, SPARE).message.startswith("intermediate_size: ")
    assert derive(short, SPARE, {"intermediate_size": 64}).config.intermediate_size == 64
    deep = {k: v for k, v in QWEN3.items() if k != "num_hidden_layers"}
    assert refusal(derive, deep, SPARE).message.startswith("num_target_layers: ")


def test_the_shape_is_checked_without_torch() -> None:
    code = "import sys, trainer.config; sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    root = Path(__file__).resolve().parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


# config.json


@pytest.mark.parametrize("changes", [{}, {"is_causal": True, "output_multiplier": 2.0, "final_logit_softcapping": 1.0}])
def test_config_json_round_trip(changes: dict[str, Any]) -> None:
    c = tiny.config(**changes)
    assert DrafterConfig.from_dict(json.loads(json.dumps(c.to_dict()))) == c


def test_reading_old_and_foreign_config_json() -> None:
    written = tiny.config(layer_types=(FULL,) * 3, sliding_window=None).to_dict()
    old = {k: v for k, v in written.items() if k not in ("layer_types", "rope_theta", "head_dim", "sliding_window")}
    old["rope_parameters"] = {"rope_type": "default", "rope_theta": 77.0}
    read = DrafterConfig.from_dict(old)
    assert (read.layer_types, read.rope_theta, read.head_dim) == ((FULL,) * 3, 77.0, 8)
    for name, value in (
        ("attention_bias", True),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.25}),
        ("rope_parameters", {"rope_type": "yarn"}),
        ("rope_parameters", "default"),
        ("dflash_config", [1]),
        ("hidden_act", "gelu"),
        ("hidden_size", "64"),
        ("dtype", "float16"),
        ("layer_types", [1, 2, 3]),
    ):
        assert refusal(DrafterConfig.from_dict, written | {name: value}).message.startswith(name)
    transformers4 = {k: v for k, v in written.items() if k != "dtype"} | {"torch_dtype": "float16"}
    assert refusal(DrafterConfig.from_dict, transformers4).message.startswith("dtype")
    del old["num_target_layers"]
    assert refusal(DrafterConfig.from_dict, old).message.startswith("num_target_layers")


# the module


def test_tensors_are_those_of_a_checkpoint() -> None:
    state = tiny.drafter().state_dict()
    assert len(state) == 11 * 3 + 3
    assert {"fc.weight", "hidden_norm.weight", "norm.weight"} < state.keys()
    layer = {name.removeprefix("layers.1.") for name in state if name.startswith("layers.1.")}
    assert layer == {
        *(f"self_attn.{p}.weight" for p in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{p}.weight" for p in ("gate_proj", "up_proj", "down_proj")),
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    }


def test_initial_values_depend_on_the_seed_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one = Drafter(tiny.config())
    after_build = torch.get_rng_state()
    one.init(7)
    assert torch.equal(torch.get_rng_state(), after_build) and not torch.equal(before, after_build)
    torch.manual_seed(99)
    two, other = Drafter(tiny.config()).init(7), Drafter(tiny.config()).init(8)
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name])
        if value.ndim == 2:
            assert not torch.equal(value, other.state_dict()[name])
            assert 0.015 < float(value.std()) < 0.025
        else:
            assert (value == 1).all()


def test_context_can_be_made_in_parts_and_tokens_selected() -> None:
    c = tiny.config()
    model, b = tiny.drafter(c, torch.float64), tiny.batch(c, torch.float64)
    whole = model.context(b.taps)
    parts = [model.context(b.taps[:, :25]), model.context(b.taps[:, 25:], start=25)]
    joined = [tuple(torch.cat(pair, 2) for pair in zip(*layer, strict=True)) for layer in zip(*parts, strict=True)]
    noise = model.embed(noise_ids(b.ids.gather(1, b.anchors), c), b.embed)
    full = model(noise, whole, b.anchors)
    torch.testing.assert_close(model(noise, joined, b.anchors), full, rtol=0, atol=1e-12)
    rows = torch.tensor([0, 3, 70, 131])
    torch.testing.assert_close(model(noise, whole, b.anchors, rows), full.flatten(0, 1)[rows], rtol=0, atol=1e-12)


def test_noise_is_the_anchors_token_and_mask_tokens() -> None:
    c = tiny.config(block_size=3)
    assert noise_ids(torch.tensor([[5, 6]]), c).tolist() == [[5, 96, 96, 6, 96, 96]]


def test_norm_gradients_equal_autograd() -> None:
    model = tiny.drafter()
    x = torch.randn(5, 32, requires_grad=True)
    weight = model.norm.weight
    plain = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    g = torch.randn(5, 32)
    expected = torch.autograd.grad(plain, (x, weight), g)
    for one, other in zip(torch.autograd.grad(model.norm(x), (x, weight), g), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
