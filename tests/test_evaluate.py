"""What `eval` measures is what serving gives: block by block z-lab's figures, and the held-out walk's."""

import json
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import tiny
import tiny_models
import torch
import transformers as hf
from vocab import tiny_dir

from tokenizer import chat
from tokenizer.encode import Encoder
from tokenizer.job import Exit, JobError, Reject
from trainer import evaluate as module
from trainer.blocks import Proposer, decode, verifier_for, walk
from trainer.drafter import Drafter
from trainer.evaluate import Evaluation, check_pair, evaluate, prompt_pieces, read_prompts, stop_tokens
from trainer.export import load_drafter, write_zlab
from trainer.job import EVAL_KEYS, EvalArgs
from trainer.target import Target

TAPS, BLOCK, TOKENS = (1, 3, 4), 5, 38
FAMILIES = {"qwen3": tiny_models.qwen3, "llama": tiny_models.llama, "qwen3_5": tiny_models.qwen35}


def prompts(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 90, (count, 9), generator=generator).tolist()


class Pair:
    """A target, and a drafter that knows some of its replies, exported and loaded again."""

    def __init__(self, family, folder):
        self.model = FAMILIES[family]()
        self.target = Target.wrap(self.model, TAPS)
        self.prompts = prompts(3, 1) + prompts(2, 2)  # the first three are known
        self.path = folder / "export"
        write_zlab(tiny_models.taught(self.target, self.prompts[:3], TOKENS), self.path)
        self.drafter = load_drafter(self.path).eval()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Family -> its pair, trained when first asked for."""
    return cache(lambda family: Pair(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(params=FAMILIES)
def pair(request, pairs):
    return pairs(request.param)


@pytest.fixture
def qwen3(pairs):
    return pairs("qwen3")


def served(pair, prompt, tokens=TOKENS, stops=(), drafter=None):
    return decode(
        prompt,
        verifier_for(pair.target),
        Proposer(drafter or pair.drafter, pair.target),
        block_size=BLOCK,
        max_new_tokens=tokens,
        stops=stops,
    )


def test_lossless_and_worth_something(pair):
    found = evaluate(pair.drafter, pair.target, pair.prompts, TOKENS, frozenset())
    known = [count for prompt in found.accepted[:3] for count in prompt]
    report = found.report()
    assert tuple(report) == EVAL_KEYS
    assert report["lossless"] is True
    assert sum(known) / len(known) > 3
    assert report["tokens"] == 5 * (TOKENS - 1)
    assert report["blocks"] == report["target_passes"] == sum(len(blocks) for blocks in found.accepted)
    assert report["acceptance_length"] == report["tokens_per_pass"] == report["tokens"] / report["blocks"]
    assert 1 + sum(report["per_position"]) == pytest.approx(report["acceptance_length"])
    assert len(report["per_position"]) == BLOCK - 1
    assert report["prompts"] == 5


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tokens", [TOKENS, 2, 1])
def test_blocks_are_zlabs(family, tokens, pairs, monkeypatch):
    """The same export under z-lab's own loop and model, with its caches: same text, same yield of every block."""
    zlab = tiny.peer("dflash.model")
    monkeypatch.setattr(zlab, "_cuda_time", time.perf_counter)  # it synchronises a GPU otherwise
    pair = pairs(family)
    draft = zlab.DFlashDraftModel.from_pretrained(pair.path, dtype=torch.float32).eval()
    kinds = set()
    for prompt in pair.prompts:
        plain = served(pair, prompt, tokens)
        for stops in ((), tuple(plain.tokens[len(plain.tokens) // 2 :][:1])):
            ids = torch.tensor([prompt])
            theirs = zlab.dflash_generate(
                draft, pair.model, ids, tokens, list(stops) or None, temperature=0.0, return_stats=True
            )
            found = served(pair, prompt, tokens, stops)
            assert found.accepted == theirs.acceptance_lengths
            assert found.tokens == theirs.output_ids[0, len(prompt) :].tolist()
            kinds.update(found.accepted)
    if tokens == TOKENS:
        assert {1, BLOCK} <= kinds  # both ends were met


SHAPE = tiny_models.SHAPE
UNUSUAL = {
    "tied embeddings, biases, one tap, blocks of two": (
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE | {"tie_word_embeddings": True}, attention_bias=True)),
        {"block_size": 2, "target_layer_ids": (3,)},
    ),
    "a sliding target, a window shorter than a block": (
        lambda: hf.MistralForCausalLM(hf.MistralConfig(**SHAPE, sliding_window=6)),
        {"sliding_window": 2},
    ),
    "scaled rotary, heads of another width": (
        lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SHAPE | {"head_dim": 12}, rope_parameters=YARN)),
        {"head_dim": 12},
    ),
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_pairs_are_lossless_and_zlabs(kind, tmp_path, monkeypatch):
    zlab = tiny.peer("dflash.model")
    monkeypatch.setattr(zlab, "_cuda_time", time.perf_counter)
    build, shape = UNUSUAL[kind]
    model, asked = tiny_models.seeded(build), prompts(2, 1)
    target = Target.wrap(model, shape.get("target_layer_ids", TAPS))
    write_zlab(tiny_models.taught(target, asked, TOKENS, steps=30, **shape), tmp_path / "export")
    drafter = load_drafter(tmp_path / "export").eval()
    found = evaluate(drafter, target, asked, TOKENS, frozenset())
    assert found.report()["lossless"] and found.report()["acceptance_length"] > 1.1
    draft = zlab.DFlashDraftModel.from_pretrained(tmp_path / "export", dtype=torch.float32).eval()
    for number, prompt in enumerate(asked):
        ids = torch.tensor([prompt])
        theirs = zlab.dflash_generate(draft, model, ids, TOKENS, None, temperature=0.0, return_stats=True)
        assert theirs.acceptance_lengths == found.accepted[number]
        assert theirs.output_ids[0, len(prompt) :].tolist() == found.replies[number]


def test_the_walk_is_what_serving_gives(pair):
    """Along a stored greedy reply, a walk meets the very blocks of serving; the last may be cut by the token budget."""
    rows, blocks = [], []
    for prompt in pair.prompts:
        found = served(pair, prompt)
        rows.append(prompt + found.tokens)
        blocks.append(found.accepted)
    rows[1] = rows[1][:-9]  # a shorter row: padding must not matter
    width = max(map(len, rows))
    ids = torch.tensor([row + [7] * (width - len(row)) for row in rows])
    loss = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        loss[number, len(pair.prompts[0]) : len(row)] = 1
    walked = walk(pair.drafter, pair.target, ids, loss)
    for number, (ours, theirs) in enumerate(zip(walked, blocks, strict=True)):
        sure = len(ours) - 2
        assert ours[:sure] == theirs[:sure] and sure > 2
        assert sum(ours) == len(rows[number]) - len(pair.prompts[0]) - 1


def test_the_walk_begins_anew_in_every_span(qwen3):
    """A conversation of two replies: no block crosses the user's turn between them, a lone token gives none."""
    prompt = qwen3.prompts[0]
    reply = served(qwen3, prompt, 12).tokens
    ids = torch.tensor([prompt + reply + prompt + reply[:6] + [4, 5]])
    spans = [(9, 21), (30, 36), (37, 38)]
    loss = torch.zeros_like(ids)
    for start, end in spans:
        loss[0, start:end] = 1
    (walked,) = walk(qwen3.drafter, qwen3.target, ids, loss)
    total, ends = 0, []
    for count in walked:
        total += count
        ends.append(total)
    assert 11 in ends and total == 11 + 5  # each span yields its tokens but the first
    assert walk(qwen3.drafter, qwen3.target, ids, torch.zeros_like(ids)) == [[]]


def test_a_wrong_tap_list_shows(qwen3):
    """Sabotage in memory, past every check: the acceptance falls to near 1."""
    good = evaluate(qwen3.drafter, qwen3.target, qwen3.prompts[:3], TOKENS, frozenset()).report()
    shifted = Target.wrap(qwen3.model, (0, 2, 3))
    bad = evaluate(qwen3.drafter, shifted, qwen3.prompts[:3], TOKENS, frozenset()).report()
    assert bad["lossless"] is True
    assert good["acceptance_length"] > 3 > 2 > bad["acceptance_length"]


def test_a_wrong_verifier_shows(qwen3, monkeypatch, capsys):
    """`lossless` compares with decoding that shares nothing with the block loop."""
    monkeypatch.setattr(module, "plain_greedy", lambda prompt, *_: [3] * TOKENS)
    report = evaluate(qwen3.drafter, qwen3.target, qwen3.prompts[:1], TOKENS, frozenset()).report()
    assert report["lossless"] is False
    assert "prompt 1: differs from plain greedy decoding at token 0" in capsys.readouterr().err


def test_a_reply_that_ends_at_once_has_no_block_and_is_counted(qwen3, capsys):
    first = served(qwen3, qwen3.prompts[0], 2).tokens[0]
    found = evaluate(qwen3.drafter, qwen3.target, qwen3.prompts[:2], TOKENS, frozenset({first}))
    assert found.accepted[0] == [] and found.replies[0] == [first] and found.lossless == [True, True]
    assert found.report()["blocks"] == len(found.accepted[1]) > 0 and found.report()["prompts"] == 2
    assert capsys.readouterr().err == "1 of 2 replies end with their first token: no block\n"


def test_nothing_drafted_is_refused():
    with pytest.raises(JobError, match="no block was drafted"):
        Evaluation([[], []], [True, True], [[2], [2]], 5).report()


@pytest.mark.parametrize(
    ("change", "words"),
    [({"hidden_size": 64}, "hidden_size is 64"), ({"num_target_layers": 7}, "7 in"), ({"vocab_size": 97}, "97 in")],
)
def test_a_foreign_target_is_refused(change, words):
    config = Drafter(tiny_models.drafter(**change).config).config
    with pytest.raises(JobError, match=words):
        check_pair(config, tiny_models.nested_qwen35().config)
    check_pair(tiny_models.drafter().config, tiny_models.nested_qwen35().config)


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "Why"}]
ASKED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"messages": CHAT[:2]},
        {"messages": CHAT[:1]},
        {"conversations": [{"from": "human", "value": "Hi"}]},
        {"prompt": "Hi"},
        {"prompt": CHAT[:1]},
        {"prompt": "Hi", "completion": "Yes"},
        {"custom_id": "7", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": CHAT[:1]}},
    ],
)
def test_the_prompt_of_any_row(row):
    (piece,) = prompt_pieces(row, chat.Renderer.load(tiny_dir()))
    assert piece == chat.Piece(ASKED, None, chat.PROMPT, False)


def test_a_prompt_by_its_history_ids_or_text():
    renderer = chat.Renderer.load(tiny_dir())
    (piece,) = prompt_pieces({"prompt": CHAT, "completion": "Because"}, renderer)
    assert piece.text.count("<|im_start|>") == 4 and piece.text.endswith("<|im_start|>assistant\n")
    (piece,) = prompt_pieces({"prompt": "Hi", "prompt_token_ids": [1, 2], "token_ids": [3]}, renderer)
    assert piece.ids == [1, 2]
    (piece,) = prompt_pieces({"text": ASKED + "Yes<|im_end|>\n"}, renderer)
    assert piece.text == ASKED
    with pytest.raises(Reject, match="unknown_dialect"):
        prompt_pieces({"question": "Hi"}, renderer)
    with pytest.raises(Reject, match="every reply has weight 0"):
        prompt_pieces({"messages": [CHAT[0], {**CHAT[1], "weight": 0}]}, renderer)


def test_prompts_are_read_in_order_and_skips_are_said(tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"odd": 1}\nnot json\n{"prompt": "b"}\n{"prompt": "c"}\n')
    found = read_prompts(path, tiny_dir(), 2)
    decoded = [Encoder.load(tiny_dir(), 0).decode(ids) for ids in found]
    assert decoded == [ASKED.replace("Hi", text) for text in "ab"]
    words = f"skipped 2 rows of `{path}`: invalid_json 1 (line 4), unknown_dialect 1 (line 3)\n"
    assert capsys.readouterr().err == words
    assert len(read_prompts(path, tiny_dir(), 0)) == 3
    path.write_text('{"odd": 1}\n')
    with pytest.raises(JobError, match="holds no prompt"):
        read_prompts(path, tiny_dir(), 0)
    path.write_text('[\n{"prompt": "a"}\n]\n')
    with pytest.raises(JobError, match="one JSON list") as caught:
        read_prompts(path, tiny_dir(), 0)
    assert caught.value.hint == "convert it: jq -c '.[]'"  # no word of a run, which has files to skip
    with pytest.raises(JobError, match="No such file") as caught:
        read_prompts(tmp_path / "none", tiny_dir(), 0)
    assert caught.value.code == Exit.CONFIG


def test_the_verb(tmp_path):
    """From files alone, in a fresh process, one JSON object on stdout."""
    vocabulary = len(json.loads((tiny_dir() / "tokenizer.json").read_text())["model"]["vocab"]) + 7
    target = tmp_path / "target"
    config = tiny_models.hf.Qwen3Config(**tiny_models.SHAPE | {"vocab_size": vocabulary})
    tiny_models.hf.Qwen3ForCausalLM(config).save_pretrained(target)
    for file in tiny_dir().glob("*"):
        if file.name != "config.json":
            (target / file.name).write_bytes(file.read_bytes())
    write_zlab(tiny_models.drafter(vocab_size=vocabulary), tmp_path / "ckpt")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n')

    def call(**changes):
        values = {"checkpoint": "ckpt", "target": "target", "prompts": "p.jsonl", "num_prompts": 2}
        argv = EvalArgs(**values | {"max_new_tokens": 9} | changes).to_argv()
        root = str(Path(module.__file__).parent.parent)
        command = [sys.executable, "-P", "-m", "trainer", "eval", *argv]
        return subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": root}, cwd=tmp_path)

    done = call()
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert tuple(report) == EVAL_KEYS
    assert (report["schema"], report["lossless"], report["prompts"]) == ("dflash.eval/1", True, 2)
    assert "\r" not in done.stderr  # no bars where nobody looks
    assert call(max_new_tokens=1).returncode == Exit.USAGE
    refused = call(checkpoint="nowhere")
    assert (refused.returncode, refused.stdout) == (Exit.CONFIG, "")
    words = "error: checkpoint `nowhere`: no readable config.json: No such file or directory\n"
    words += "hint: name a z-lab directory: OUT/export or OUT/checkpoints/step-* of a training\n"
    assert refused.stderr == words


def test_a_reply_ends_where_a_server_ends_it(tmp_path):
    model = tiny_models.qwen3()
    model.generation_config.eos_token_id = [5, 6]
    found = stop_tokens(Target.wrap(model, TAPS), tiny_dir())
    names = json.loads((tiny_dir() / "tokenizer.json").read_text())["added_tokens"]
    by_name = {token["content"]: token["id"] for token in names}
    assert found == {2, 5, 6, by_name["<|im_end|>"], by_name["<|endoftext|>"]}
