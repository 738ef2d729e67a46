"""One index from lines to commit: accounting, determinism, exit codes, last words. Real processes, real S3."""

from __future__ import annotations

import base64
import gc
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any

import format_reader
import psutil
import pytest
from faultproxy import FaultProxy
from job_fixtures import (
    ROOT,
    answer,
    chat_line,
    contents,
    environment,
    finish,
    objects,
    pod,
    prepare,
    start,
    write_corpus,
)
from s3_fixtures import *  # noqa: F403
from vocab import tiny_dir

from tokenizer import workers
from tokenizer.index import Model, convert_index, convert_object, load_model
from tokenizer.job import FILTERED, MALFORMED, TOKENIZER_DIR, Exit, GateFlags, JobError, Plan, Spec, overlay
from tokenizer.read import LineReader
from tokenizer.scratch import PREFIX, scratch
from tokenizer.shard import Commit, close, read_commit, read_runs
from tokenizer.store import Options, Store, open_store


@cache
def tiny_model(**options: Any) -> Model:
    return load_model(tiny_dir(), Spec({}, **options), 0)


def convert(plan: Plan, index: int, folder: Path, count: int = 2, skipped: frozenset[str] = frozenset()) -> Commit:
    folder.mkdir()
    model = tiny_model(loss_on=plan.spec.loss_on)
    commit: Commit = convert_index(
        index, plan, skipped, model, folder, count=count, downloads=2, on_progress=lambda delta: None
    )[2]
    return commit


def rejects(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rejects.jsonl").read_bytes().splitlines()]


def run_all(out: str, source: str, tmp_path: Path, **more: Any) -> tuple[Plan, Store]:
    """Every index by a pod of its own."""
    plan, args, store = prepare(out, source, **more)
    for index in range(len(plan.batches)):
        code, lines, err = finish(pod(args, index, DFLASH_SCRATCH=str(tmp_path / "scratch")))
        assert (code, err) == (0, ""), (lines, err)
    return plan, store


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


# ---- the same bytes


def test_bytes_do_not_depend_on_workers_order_or_who_does_it(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "in", 7, 9)
    (source / "part-003.jsonl").write_text("\n".join([GOOD, "{broken", MULTI]))
    (source / "part-004.jsonl.gz").write_bytes(gzip.compress((source / "part-004.jsonl").read_bytes()))
    (source / "part-004.jsonl").unlink()
    plan, _, _ = prepare(str(tmp_path / "out"), str(source), shards=2)
    found = []
    for count in (1, 2, 5):
        folder = tmp_path / f"work-{count}"
        commits = [convert(plan, index, folder.with_suffix(f".{index}"), count) for index in (0, 1)]
        files = [
            (folder.with_suffix(f".{index}") / name).read_bytes()
            for index in (0, 1)
            for name in ("shard.arrow", "rejects.jsonl")
        ]
        found.append((commits, files))
    assert found[0] == found[1] == found[2]


def test_a_small_limit_makes_more_batches_of_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_corpus(tmp_path / "in", 1, 40)
    plan, _, _ = prepare(str(tmp_path / "out"), str(source))
    whole = convert(plan, 0, tmp_path / "a")
    monkeypatch.setattr("tokenizer.convert.BATCH_CHARS", 500)
    small = convert(plan, 0, tmp_path / "b")
    different = {k for k in whole if whole[k] != small[k]}  # type: ignore[literal-required]
    assert different == {"shard", "content_sha256"}
    batches = [rows for rows, _ in format_reader.record_batches((tmp_path / "b" / "shard.arrow").read_bytes())]
    assert sum(batches) == 40 and len(batches) > 5


def test_skipped_and_repinned_objects(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "in", 3, 5)
    out = str(tmp_path / "out")
    plan, args, store = prepare(out, str(source), shards=1)
    (source / "part-001.jsonl").write_text(chat_line("anew?", answer(70)) + "\n")
    code, lines, _ = finish(pod(args, 0))
    assert code == Exit.DATA and "part-001.jsonl" in lines[-1]["message"] and "changed" in lines[-1]["message"]
    now = {o.path: o for o in objects(str(source))}
    start(
        store,
        plan,
        "tok-test-r2",
        sequence=2,
        repinned=(now["part-001.jsonl"],),
        skipped=(now["part-002.jsonl"].key,),
    )
    code, lines, _ = finish(pod(args, 0))
    assert code == Exit.DATA  # a pod of the first Job keeps to what it was told
    newer = type(args)(out=args.out, run="tok-test-r2")
    code, lines, _ = finish(pod(newer, 0))
    assert code == 0, lines
    commit = read_commit(store, 0)
    assert commit["rows"] == 6 and commit["skipped"] == [now["part-002.jsonl"].key]
    dataset = json.loads(store.get_bytes("dataset.json"))
    assert dataset["skipped"] == commit["skipped"]
    assert overlay(plan, read_runs(store))[1] == set(commit["skipped"])


def test_what_a_killed_try_left_is_taken_or_replaced_and_a_commit_is_left_alone(tmp_path: Path) -> None:
    source = str(write_corpus(tmp_path / "in", 2, 20))
    clean, out = str(tmp_path / "clean"), str(tmp_path / "out")
    run_all(clean, source, tmp_path, shards=1)
    good = contents(clean)
    _, args, store = prepare(out, source, shards=1)
    name = "data-00000-of-00001.arrow"
    for left in (good[name], good[name][:-1], bytes(len(good[name])), b""):  # whole, torn, foreign, empty
        store.put_bytes(name, left)
        assert finish(pod(args, 0))[0] == 0
        assert contents(out) == good
        for key in ("commits/00000.json", "dataset.json", "dataset_info.json", "state.json"):
            store.delete(key)
    store.put_bytes("commits/00000.json", good["commits/00000.json"])
    store.put_bytes(name, b"whoever committed knows better")
    assert finish(pod(args, 0))[0] == 0
    assert store.get_bytes(name) == b"whoever committed knows better"


@pytest.mark.parametrize("where", ["file", pytest.param("s3", marks=pytest.mark.s3)])
def test_two_pods_on_one_index_at_once(where: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    out = str(tmp_path / "out") if where == "file" else request.getfixturevalue("s3") + "/data set"
    source = str(write_corpus(tmp_path / "in", 4, 50))
    _, clean = run_all(str(tmp_path / "clean"), source, tmp_path, shards=1)
    _, args, store = prepare(out, source, shards=1)
    both = [pod(args, 0, DFLASH_SCRATCH=str(tmp_path / "scratch")) for _ in range(2)]
    ended = [finish(process) for process in both]
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert contents(out) == contents(clean.root)
    assert [s.key for s in store.list("stats/")] == ["stats/tok-test-00000.json"]


# ---- S3


@pytest.mark.s3
def test_from_s3_to_s3_through_a_server_that_fails_every_tenth_call(
    s3: str, s3_faults: FaultProxy, tmp_path: Path
) -> None:
    write_corpus(tmp_path / "in", 6, 30)
    _, local = run_all(str(tmp_path / "out"), str(tmp_path / "in"), tmp_path, shards=2)
    bucket = open_store(s3)
    for path in sorted((tmp_path / "in").iterdir()):
        bucket.upload_file(path, f"raw/{path.name}")
    s3_faults.fail = 0.1
    out = f"{s3}/out"
    _, args, _ = prepare(out, f"{s3}/raw", shards=2)
    codes = []
    for index in (0, 1):
        ended = finish(pod(args, index))
        codes.append(ended[0])
        assert ended[2] == ""
    assert codes == [0, 0]
    s3_faults.fail = 0.0
    assert sum(s3_faults.faults.values()) > 0
    found, expected = contents(out), contents(local.root)
    for key in expected:
        if (
            key.endswith(".arrow")
            or key.startswith(("rejected/", TOKENIZER_DIR))
            or key in ("state.json", "dataset_info.json")
        ):
            assert found[key] == expected[key]
    import datasets

    options = {
        "key": os.environ["AWS_ACCESS_KEY_ID"],
        "secret": os.environ["AWS_SECRET_ACCESS_KEY"],
        "endpoint_url": s3_faults.endpoint,
    }
    loaded = datasets.load_from_disk(out, storage_options=options)
    assert loaded["id"] == datasets.load_from_disk(local.root)["id"]
    assert len(loaded) == 180


@pytest.mark.s3
def test_a_wrong_secret_is_78_in_one_line(s3: str, tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", 1, 2)
    _, args, _ = prepare(f"{s3}/out", str(tmp_path / "in"))
    secret = "a-marker-that-must-not-be-shown"
    code = f"import tokenizer.pod as p; p.POD = type(p.POD)(patience=1, auth_patience=0); raise SystemExit(p.main({['--index', '0', *args.to_argv()]!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(AWS_SECRET_ACCESS_KEY=secret),
        capture_output=True,
        text=True,
        timeout=60,
    )
    (line,) = [json.loads(text) for text in done.stdout.splitlines()]
    assert (done.returncode, line["exit"], done.stderr) == (Exit.CONFIG, Exit.CONFIG, "")
    assert secret not in done.stdout and line["hint"]


# ---- how a pod ends


def test_last_words(tmp_path: Path) -> None:
    """Exit code, log line, termination message and stored log say the same; nobody sees a traceback."""
    source = tmp_path / "in"
    write_corpus(source, 2, 5)
    (source / "part-001.jsonl.gz").write_bytes(gzip.compress(GOOD.encode() * 1000)[:-20])
    out = str(tmp_path / "out")
    _, args, store = prepare(out, str(source), shards=1)
    message = tmp_path / "termination-log"
    code, lines, err = finish(pod(args, 0, TERMINATION_LOG=str(message), DFLASH_TRY="2"))
    said = json.loads(message.read_bytes())
    assert code == said["exit"] == lines[-1]["exit"] == Exit.DATA
    assert said["reason"] == "data" and "part-001.jsonl.gz" in said["message"] and "cut gzip" in said["message"]
    assert "--skip-file" in said["hint"] + said["message"]
    assert message.stat().st_size < 4096 and err == ""
    assert json.loads(store.get_bytes("logs/tok-test/00000-2.txt").splitlines()[-1]) == lines[-1]
    assert not [k for k in contents(out) if k.startswith(("data", "commits", "rejected"))]  # nothing half-taken


def test_a_good_pod_says_what_it_did(tmp_path: Path) -> None:
    message = tmp_path / "termination-log"
    _, args, store = prepare(str(tmp_path / "out"), str(write_corpus(tmp_path / "in", 1, 20)))
    code, lines, _ = finish(pod(args, 0, TERMINATION_LOG=str(message)))
    said = json.loads(message.read_bytes())
    assert code == said["exit"] == 0 and said["rows"] == 20 and said["loss_tokens"] > 0
    progress = [line for line in lines if line["event"] == "progress"][-1]
    assert progress["rows"] == 20 and progress["bytes"] == progress["total_bytes"] > 0
    assert {"time", "level", "index", "tokens_per_s"} <= progress.keys()
    stats = json.loads(store.get_bytes("stats/tok-test-00000.json"))
    assert stats["versions"]["pyarrow"] and stats["seconds"] > 0
    code, lines, _ = finish(pod(args, 0))
    assert [line["event"] for line in lines] == ["unchanged", "closed"] and code == 0


@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        ("plan", Exit.CONFIG, "not the plan of this Job"),
        ("tokenizer", Exit.CONFIG, "tokenizer.json is not the file of the plan"),
        ("tokenizer gone", Exit.CONFIG, "chat_template.jinja is missing"),
        ("run gone", Exit.CONFIG, "runs/other.json"),
        ("index", Exit.CONFIG, "index 7 of a run of 1"),
        ("no index", Exit.USAGE, "JOB_COMPLETION_INDEX"),
        ("contract", Exit.CONFIG, "contract version"),
        ("flag", Exit.USAGE, "--colour"),
        ("scheme", Exit.USAGE, "unknown scheme"),
    ],
)
def test_what_no_retry_can_mend(spoil: str, code: Exit, words: str, tmp_path: Path) -> None:
    plan, args, store = prepare(str(tmp_path / "out"), str(write_corpus(tmp_path / "in", 1, 2)))
    argv, index = args.to_argv(), "0"
    if spoil == "plan":
        store.put_bytes("plan.json", plan.to_json() + b" ")
    elif spoil == "tokenizer":
        store.put_bytes("tokenizer/tokenizer.json", b"{}")
    elif spoil == "tokenizer gone":
        store.delete("tokenizer/chat_template.jinja")
    elif spoil == "run gone":
        argv[argv.index("--run") + 1] = "other"
    elif spoil == "index":
        index = "7"
    elif spoil == "no index":
        index = ""
    elif spoil == "contract":
        argv[1] = "999"
    elif spoil == "flag":
        argv += ["--colour", "red"]
    elif spoil == "scheme":
        argv[argv.index("--out") + 1] = "gs://bucket/x"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tokenizer", "run", *argv],
        env=environment(JOB_COMPLETION_INDEX=index),
        capture_output=True,
        text=True,
        timeout=60,
    )
    last = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, last["exit"], done.stderr) == (code, code, "")
    assert words in last["message"]


def test_sigterm_is_143_with_the_log_stored(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    os.mkfifo(source / "never-ends.jsonl")  # a reader of it waits for ever: the pod is surely at work
    (source / "a.jsonl").write_text(GOOD * 1)
    _, args, store = prepare(str(tmp_path / "out"), str(source / "a.jsonl"))
    (source / "a.jsonl").unlink()
    os.rename(source / "never-ends.jsonl", source / "a.jsonl")
    message = tmp_path / "termination-log"
    process = pod(args, 0, TERMINATION_LOG=str(message), DFLASH_SCRATCH=str(tmp_path / "scratch"))
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    assert first["event"] == "started"
    process.send_signal(signal.SIGTERM)
    code, lines, err = finish(process)
    assert (code, err) == (143, "") and lines[-1]["event"] == "stopped"
    assert json.loads(message.read_bytes())["exit"] == 143
    assert b'"stopped"' in store.get_bytes("logs/tok-test/00000-0.txt")
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_bug_is_one_line_with_its_place_and_the_traceback_is_in_the_log(tmp_path: Path) -> None:
    source = str(write_corpus(tmp_path / "in", 1, 3))
    _, args, store = prepare(str(tmp_path / "out"), source)
    argv = ["--index", "0", *args.to_argv()]
    code = (
        "import tokenizer.convert as c, tokenizer.pod as p\n"
        "def broken(row, lookup): raise KeyError('surprise')\n"
        f"c.dialects.parse = broken\nraise SystemExit(p.main({argv!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == Exit.RETRY and done.stderr == "" and "Traceback" not in done.stdout
    last = json.loads(done.stdout.splitlines()[-1])
    assert "part-000.jsonl:1: internal error, KeyError: 'surprise'" in last["message"]
    assert b"Traceback" in store.get_bytes("logs/tok-test/00000-0.txt")


def test_a_killed_worker_is_75_and_said(tmp_path: Path) -> None:
    source = str(write_corpus(tmp_path / "in", 1, 3))
    _, args, _ = prepare(str(tmp_path / "out"), source)
    argv = ["--index", "0", *args.to_argv()]
    code = (
        "import os, tokenizer.index as i, tokenizer.pod as p\n"
        f"i.convert_object = lambda *a: os.kill(os.getpid(), 9)\nraise SystemExit(p.main({argv!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    last = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == Exit.RETRY and "SIGKILL" in last["message"] and "memory" in last["hint"]


def test_a_full_disk_is_73_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on file size stands for a full disk: the kernel refuses the write in the same place."""
    source = str(write_corpus(tmp_path / "in", 1, 400))
    _, args, store = prepare(str(tmp_path / "out"), source)
    room = tmp_path / "room"
    room.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(room)], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        code, lines, err = finish(pod(args, 0, DFLASH_SCRATCH=str(room)))
        assert (code, err) == (Exit.DISK_FULL, ""), lines
        assert "no space left" in lines[-1]["message"] and lines[-1]["hint"]
        assert [p.name for p in room.iterdir()] == []
    finally:
        subprocess.run(["umount", str(room)], check=True)
    assert not [k for k in contents(store.root) if k.startswith(("data", "commits"))]


# ---- parts


def test_scratch_of_the_killed_is_removed_and_of_the_living_is_not(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib; from tokenizer.scratch import scratch\n"
        f"with scratch(pathlib.Path({str(tmp_path)!r})) as folder:\n"
        "    (folder / 'big').write_bytes(b'x'); print(folder, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    theirs = Path(process.stdout.readline().strip())
    with scratch(tmp_path) as mine:
        assert theirs.exists() and mine.exists() and mine != theirs
    process.kill()
    process.communicate()
    assert theirs.exists()
    with scratch(tmp_path):
        assert not theirs.exists()
    assert list(tmp_path.glob(f"{PREFIX}*")) == []


def test_workers_do_every_task_once_and_the_first_error_ends_all() -> None:
    seen: list[dict[str, int]] = []
    before = psutil.Process().children()

    def work(next_task: Any, report: Any) -> None:
        while (task := next_task()) is not None:
            if task == 999:
                raise JobError(Exit.DATA, "task 999", "leave it out")
            report({"task": task})

    workers.run(range(100), 4, work, seen.append)
    assert sorted(s["task"] for s in seen) == list(range(100))
    with pytest.raises(workers.WorkerFailed) as error:
        workers.run([1, 999, 2], 2, work, seen.append)
    assert (error.value.code, error.value.message, error.value.hint) == (Exit.DATA, "task 999", "leave it out")
    assert psutil.Process().children() == before


def test_cpus_are_those_of_the_cgroup(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert list(workers._quotas(str(tmp_path))) == [1.5]
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("400000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert list(workers._quotas(str(tmp_path))) == [4.0]
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert list(workers._quotas(str(tmp_path))) == []
    assert 1 <= workers.cpus() <= (os.cpu_count() or 1)


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
