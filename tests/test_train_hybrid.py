"""A target as Qwen3.6 is built: GatedDeltaNet layers, a config nested in a vision-language one, 248,320 embedding rows."""

import json

import pytest
import tiny_models
import torch
import transformers as hf
from train_fixtures import random_rows, write_dataset
from train_runs import Forked, args, metrics
from vocab import qwen36_dir

from trainer.target import Target

VOCAB = 248320


def build():
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    text = tiny_models.HYBRID | {"vocab_size": VOCAB, "num_hidden_layers": 6}
    text |= {"bos_token_id": None, "eos_token_id": 248046, "pad_token_id": 248044}
    config = hf.Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return hf.Qwen3_5ForConditionalGeneration(config).float().eval()


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    build().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).symlink_to(qwen36_dir() / name)
    return folder


def test_rows_of_a_batch_do_not_see_each_other(target):
    loaded = Target.load(str(target), (1, 2), dtype=torch.float32)
    ids = torch.randint(0, VOCAB, (3, 40), generator=torch.Generator().manual_seed(1))
    ids[1, 25:] = 0  # shorter, padded on the right
    known = loaded.states(ids)
    ids[0], ids[2] = 7, 9
    changed = loaded.states(ids)
    assert torch.equal(changed[1], known[1])
    torch.testing.assert_close(
        loaded.states(ids[1:2, :25])[0], known[1, :25], rtol=1e-4, atol=1e-4
    )  # other shapes round otherwise
    assert not torch.allclose(changed[0], known[0])


def test_it_trains_from_end_to_end(target, tmp_path):
    data, out = write_dataset(tmp_path / "data", random_rows(30)), tmp_path / "out"
    told = args(data, out, target=str(target), steps=3, accumulate=2, anchors=4, init_from="")
    run = Forked(told, tmp_path / "log")
    assert run.wait() == 0, run.text()
    losses = [m["loss"] for m in metrics(out) if "loss" in m]
    assert len(losses) == 3 and all(11 < loss < 14 for loss in losses)  # ln 248,320 is 12.4
    config = json.loads((out / "export" / "config.json").read_text())
    assert config["dflash_config"]["mask_token_id"] == 248070
    assert config["layer_types"] == ["sliding_attention", "full_attention"]

    again = args(data, tmp_path / "next", target=str(target), steps=1, accumulate=2, init_from=str(out / "export"))
    run = Forked(again, tmp_path / "log2")
    assert run.wait() == 0, run.text()
    assert metrics(tmp_path / "next")[0]["loss"] < max(losses) + 0.1
