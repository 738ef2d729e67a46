"""Lines to rows, rejects and counts: every line has one named fate, and memory does not grow."""

from __future__ import annotations

import base64
import gc
import hashlib
import json
import tracemalloc
from collections import Counter
from functools import partial
from pathlib import Path

import format_reader
import pytest
from job_fixtures import (
    answer,
    chat_line,
    convert,
    finish,
    objects,
    pod,
    prepare,
    rejects,
    run_all,
    start,
    tiny_model,
    write_corpus,
)

from tokenizer.index import convert_object
from tokenizer.job import FILTERED, MALFORMED, Exit, GateFlags, Reject, Spec
from tokenizer.read import LineReader
from tokenizer.requests import Spool
from tokenizer.shard import close, read_commit
from tokenizer.store import Options

# ---- accounting

GOOD = chat_line("how are you?", answer(1))
MULTI = json.dumps(
    {
        "messages": [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "short"},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": answer(2)},
        ]
    }
)
LINES: list[tuple[bytes, str | None]] = [  # a line, and the reason it is rejected for
    (GOOD.encode(), None),
    (b"", "blank"),
    (b'{"messages": [', "invalid_json"),
    (b"  \t ", "blank"),
    ('{"prompt": "caf\xe9"}'.encode("latin-1"), "invalid_utf8"),
    (rb'{"messages": [{"role": "user", "content": "\ud800"}]}', "lone_surrogate"),
    (b'{"colour": "red"}', "unknown_dialect"),
    (b"[1, 2]", "unknown_dialect"),
    (json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode(), "no_completion"),
    (chat_line("q", "bad", finish_reason="content_filter").encode(), "bad_finish_reason"),
    (
        chat_line("q", answer(5)).encode()[:-1] + b', "finish_reason": ' + b"[" * 1015 + b"]" * 1015 + b"}",
        "invalid_json",
    ),
    (chat_line("q", "tiny").encode(), "too_few_loss_tokens"),
    (chat_line("q", answer(3), usage={"completion_tokens": 5000}).encode(), "reasoning_lost"),
    (MULTI.encode() + b"\r", None),
    (chat_line("the last line has no newline", answer(4)).encode(), None),
]


def test_every_line_is_kept_or_rejected_by_name(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "all.jsonl").write_bytes(b"\n".join(line for line, _ in LINES))
    plan, _, _ = prepare(str(tmp_path / "out"), str(source))
    commit = convert(plan, 0, tmp_path / "work")
    expected = Counter(reason for _, reason in LINES if reason not in (None, "blank"))
    assert commit["lines"]["rejected"] == expected
    assert commit["lines"]["kept"] == sum(reason is None for _, reason in LINES)
    assert commit["lines"]["seen"] == commit["lines"]["kept"] + sum(expected.values())
    found = rejects(tmp_path / "work")
    whole = [(r["line"], r["reason"]) for r in found]
    assert whole == [(n, reason) for n, (_, reason) in enumerate(LINES, 1) if reason not in (None, "blank")]
    assert {r["reason"] for r in found} <= MALFORMED | FILTERED
    for reject in found:
        raw = base64.b64decode(reject["raw"]) if reject.get("encoding") == "base64" else reject["raw"].encode()
        assert raw == LINES[reject["line"] - 1][0]
        assert reject["object"] == "all.jsonl" and reject["detail"]


def test_turns_of_kept_lines_are_counted_apart(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]
    bad = {"messages": [*turns, {"role": "user", "content": "b"}, {"role": "assistant", "content": "y"}]}
    one = {"messages": [*turns[:1], {"role": "assistant", "content": answer(1), "finish_reason": "error"}]}
    (source / "a.jsonl").write_text("\n".join([json.dumps(bad), json.dumps(one), MULTI]) + "\n")
    plan, _, _ = prepare(str(tmp_path / "out"), str(source))
    commit = convert(plan, 0, tmp_path / "work")
    entries = rejects(tmp_path / "work")
    assert commit["lines"]["seen"] == commit["lines"]["kept"] + sum(commit["lines"]["rejected"].values()) == 3
    assert len(entries) == sum(commit["lines"]["rejected"].values()) + sum(commit["turns_rejected"].values())


def test_an_over_long_line_is_named_and_its_neighbours_are_kept(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    long = "ü" * (17 << 19)  # 17 MiB
    (source / "a.jsonl").write_text(f"{GOOD}\n{long}\n{GOOD}\n", encoding="utf-8")
    plan, _, _ = prepare(str(tmp_path / "out"), str(source))
    commit = convert(plan, 0, tmp_path / "work")
    (reject,) = rejects(tmp_path / "work")
    assert (reject["line"], reject["reason"]) == (2, "line_too_long")
    assert len(reject["raw"].encode()) == 64 << 10 and set(reject["raw"]) == {"ü"}
    assert commit["lines"] == {"seen": 3, "kept": 2, "rejected": {"line_too_long": 1}}


def test_max_length_cuts_ids_and_mask_alike_and_says_what_it_cost(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", 1, 20)
    full, _, _ = prepare(str(tmp_path / "a"), str(tmp_path / "in"))
    short, _, _ = prepare(str(tmp_path / "b"), str(tmp_path / "in"), max_length=50, min_loss_tokens=1)
    none, _, _ = prepare(str(tmp_path / "c"), str(tmp_path / "in"), max_length=3)
    whole, cut = convert(full, 0, tmp_path / "wa"), convert(short, 0, tmp_path / "wb")
    assert cut["cut"]["rows"] == 20 and cut["tokens"] == 20 * 50
    assert cut["loss_tokens"] + cut["cut"]["loss_tokens"] == whole["loss_tokens"]
    assert convert(none, 0, tmp_path / "wc")["lines"]["rejected"] == {"truncated_away": 20}


def test_the_histogram_is_taken_before_the_filter(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    rows = [chat_line(f"q{n}", "no" if n % 4 else answer(n)) for n in range(100)]
    (source / "a.jsonl").write_text("\n".join(rows))
    plan, args, store = prepare(str(tmp_path / "out"), str(source), gate=GateFlags(max_reject=1.0))
    commit = convert(plan, 0, tmp_path / "work")
    assert sum(commit["histogram"]["before"].values()) == 100
    assert sum(commit["histogram"]["after"].values()) == commit["rows"] == 25
    assert [(s["text"], s["count"]) for s in commit["supervised"]] == [("no", 75)]
    code, lines, _ = finish(pod(args, 0))
    assert code == 0  # a refusal is the run's, not the pod's
    assert lines[-1]["state"] == "refused"
    refused = json.loads(store.get_bytes("refused.json"))
    assert any("exactly 3 loss tokens" in r for r in refused["reasons"])
    assert any("learn the same text: 'no'" in r for r in refused["reasons"])
    assert store.stat("dataset.json") is None
    start(store, plan, "tok-test-r2", sequence=2, gate=GateFlags(allow_degenerate=True))
    assert close(store).state == "complete"  # without a new pod
    assert store.stat("refused.json") is None
    before = store.get_bytes("dataset.json")
    start(store, plan, "tok-test-r3", sequence=3)
    assert close(store).state == "complete" and store.get_bytes("dataset.json") == before


def test_rows_of_ids_alone_are_told_apart_by_what_their_ids_say(tmp_path: Path) -> None:
    """Without words of their own they would all be one empty text, and the dataset a degenerate one."""
    source = tmp_path / "in"
    source.mkdir()
    ids = [list(range(40 + n % 30, 80 + n % 30)) for n in range(60)]
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]
    rows = [{"messages": turns, "token_ids": given, "finish_reason": "length"} for given in ids]
    (source / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan, _, _ = prepare(str(tmp_path / "out"), str(source))
    commit = convert(plan, 0, tmp_path / "work")
    assert commit["rows"] == 60
    assert [s["count"] for s in commit["supervised"]] == [2] * 30
    assert len({s["text"] for s in commit["supervised"]}) == 30 and all(s["text"] for s in commit["supervised"])


def test_batch_outputs_are_joined_with_their_requests(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()

    def request(name: str, text: str) -> str:
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})

    def output(name: str, text: str) -> str:
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        return json.dumps({"custom_id": name, "response": {"status_code": 200, "body": {"choices": [choice]}}})

    asked = [request("r1", "first?"), request("r2", "second?"), request("twice", "a"), request("twice", "b")]
    (source / "requests.jsonl").write_text("\n".join(asked))
    (source / "out.jsonl").write_text("\n".join(output(n, answer(1)) for n in ("r2", "r1", "twice", "never")))
    (requests,) = [o for o in objects(str(source)) if o.path == "requests.jsonl"]
    outputs = next(o for o in objects(str(source)) if o.path == "out.jsonl")
    out = str(tmp_path / "out")
    _, store = run_all(
        out, str(source), tmp_path, batch_inputs={outputs.key: [requests]}, gate=GateFlags(1.0, allow_degenerate=True)
    )
    commit = read_commit(store, 0)
    assert commit["lines"] == {"seen": 4, "kept": 2, "rejected": {"no_prompt": 2}}
    digest = hashlib.sha256((source / "requests.jsonl").read_bytes()).hexdigest()
    assert commit["batch_inputs"] == [{"key": requests.key, "sha256": digest}]
    assert ["second?" in s["segments"][0]["text"] for s in commit["samples"]] == [True, False]
    rows, _ = format_reader.read(Path(out))
    assert [r["source_id"] for r in rows] == ["r2", "r1"]


def test_a_row_that_hides_in_a_request_file_is_not_lost_silently(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "first?"}]}
    request = json.dumps({"custom_id": "r1", "url": "/v1/chat/completions", "body": body})
    chat = json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer(1)}]})
    file = tmp_path / "requests.jsonl"
    file.write_text(f"{request}\n\n{chat}\n")
    (found,) = objects(str(file))
    lfs = tmp_path / "lfs.jsonl"
    lfs.write_text("version https://git-lfs.github.com/spec/v1\nsize 3\n")
    good = tmp_path / "good.jsonl"
    good.write_text(f"{request}\n")
    several = [*objects(str(file)), *objects(str(good)), *objects(str(lfs))]
    digests, refused = Spool(tmp_path / "spool").fill(several, Options())
    assert len(digests) == 3 and digests[1] == hashlib.sha256(good.read_bytes()).hexdigest()
    assert [refusal.key for refusal in refused] == [str(file), str(lfs)]
    assert "requests.jsonl:3: no OpenAI batch request" in refused[0].message
    assert refused[0].code == Exit.DATA and "file of their own" in refused[0].hint
    surrogate = json.dumps({"custom_id": "r1", "body": {"messages": "\ud800"}})
    file.write_text(surrogate + "\n")
    (found,) = objects(str(file))
    spool = Spool(tmp_path / "other")
    assert spool.fill([found], Options())[1] == []
    with pytest.raises(Reject, match="lone_surrogate"):
        spool.lookup()("r1")


def test_memory_of_a_worker_does_not_grow_with_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held after each of many chunks, to the byte: neither lines nor ids nor hashes pile up."""
    monkeypatch.setattr("tokenizer.index.LineReader", partial(LineReader, chunk_bytes=32 << 10))
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.jsonl").write_text("".join(chat_line(f"q {n}", answer(n) * 40) + "\n" for n in range(600)))
    (obj,) = objects(str(source))
    held: list[int] = []

    def report(progress: dict[str, int]) -> None:
        held.append(tracemalloc.get_traced_memory()[0])

    model = tiny_model()
    gc.freeze()  # as in a worker
    tracemalloc.start()
    try:
        convert_object(obj, 0, model, Spec({}), None, tmp_path, Options(), report)
    finally:
        tracemalloc.stop()
        gc.unfreeze()
    chunks = held[2:-1]
    assert len(chunks) > 25
    assert max(chunks) < chunks[0] + 200_000, chunks  # bytes; the chunks after the first are 900 kB of lines


def test_an_index_without_rows_is_a_shard_of_none(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "in", 2, 3)
    (source / "part-001.jsonl").write_text("{broken\n\n")
    plan, _, _ = prepare(str(tmp_path / "out"), str(source), shards=2)
    nothing = convert(plan, 0, tmp_path / "skipped", skipped=frozenset(o.key for o in plan.batches[0].objects))
    broken = convert(plan, 1, tmp_path / "broken")
    for commit, folder in ((nothing, "skipped"), (broken, "broken")):
        assert (commit["rows"], commit["tokens"], commit["samples"]) == (0, 0, [])
        assert commit["content_sha256"] == hashlib.sha256().hexdigest()
        assert not list(format_reader.record_batches((tmp_path / folder / "shard.arrow").read_bytes()))
    assert nothing["lines"]["seen"] == 0 and broken["lines"] == {"seen": 1, "kept": 0, "rejected": {"invalid_json": 1}}


def test_samples_are_the_first_rows_wherever_they_are(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.jsonl").write_text("{broken\n" + chat_line("one", answer(1)))
    (source / "b.jsonl").write_text("{broken\n")
    (source / "c.jsonl").write_text("\n".join([chat_line("two", answer(2)), chat_line("long", answer(3) * 60)]))
    (source / "d.jsonl").write_text(chat_line("four", answer(4)))
    plan, _, _ = prepare(str(tmp_path / "out"), str(source))
    samples = convert(plan, 0, tmp_path / "work")["samples"]
    assert [s["id"] for s in samples] == ["a.jsonl:2#0", "c.jsonl:1#0", "c.jsonl:2#0"]
    assert samples[1]["segments"][1] == {"text": answer(2) + "<|im_end|>", "loss": True}
    long = samples[2]["segments"][1]["text"]
    assert long.startswith(answer(3)[:30]) and long.endswith("<|im_end|>") and " ... " in long and len(long) < 1000
