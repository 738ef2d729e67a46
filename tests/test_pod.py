"""One index from lines to commit: accounting, determinism, exit codes, last words. Real processes, real S3."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import format_reader
import pytest
from faultproxy import FaultProxy
from job_fixtures import (
    answer,
    chat_line,
    contents,
    convert,
    environment,
    finish,
    objects,
    pod,
    prepare,
    run_all,
    start,
    write_corpus,
)

from tokenizer.job import TOKENIZER_DIR, Exit, overlay
from tokenizer.shard import read_commit, read_runs
from tokenizer.store import open_store

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


def test_all_unreadable_files_of_an_index_are_named_at_once(tmp_path: Path) -> None:
    source = tmp_path / "in"
    write_corpus(source, 1, 5)
    bad = {
        "b.jsonl": b"version https://git-lfs.github.com/spec/v1\nsize 3\n",
        "c.json": b'[\n {"a": 1}\n]\n',
        "d.jsonl": '{"a": 1}\n'.encode("utf-16"),
        "e f.jsonl.gz": gzip.compress(b"PAR1 and more"),
    }
    for name, data in bad.items():
        (source / name).write_bytes(data)
    (source / "one-line.jsonl").write_bytes(gzip.compress(GOOD.encode() * 1000))  # read to its end it is well
    _, args, _ = prepare(str(tmp_path / "out"), str(source), shards=1)
    for workers in ("1", "2"):
        code, lines, _ = finish(pod(replace(args, workers=int(workers)), 0))
        words, hint = lines[-1]["message"], lines[-1]["hint"]
        assert code == Exit.DATA and all(words.count(str(source / name)) == 1 for name in bad), words
        every = " ".join(f"--skip-file {shlex.quote(str(source / name))}" for name in bad)
        assert f"`resume {every}`" in hint and "one-line" not in words + hint and "part-000" not in words + hint


def asked(number: int) -> str:
    body = {"messages": [{"role": "user", "content": f"q {number}"}]}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n"


def test_unreadable_request_files_are_named_at_once_and_with_them_the_objects(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "in", 1, 5)
    (source / "lfs.jsonl").write_text("version https://git-lfs.github.com/spec/v1\nsize 3\n")
    folder = tmp_path / "requests"
    folder.mkdir()
    bad = {"list.jsonl": b"[\n {}\n]\n", "wide.jsonl": asked(1).encode("utf-16"), "rows x.jsonl": GOOD.encode()}
    for name, data in {"good.jsonl": asked(2).encode(), **bad}.items():
        (folder / name).write_bytes(data)
    pinned = objects(str(folder))
    needing = {o.key: pinned for o in objects(str(source))}
    _, args, _ = prepare(str(tmp_path / "out"), str(source), shards=1, batch_inputs=needing)
    for workers in ("1", "2"):
        code, lines, _ = finish(pod(replace(args, workers=int(workers)), 0))
        words, hint = lines[-1]["message"], lines[-1]["hint"]
        named = sorted([*(str(folder / name) for name in bad), str(source / "lfs.jsonl")])
        assert code == Exit.DATA and all(words.count(name) == 1 for name in named), words
        assert f"`resume {' '.join(f'--skip-file {shlex.quote(name)}' for name in named)}`" in hint, hint
        assert "good.jsonl" not in words + hint and "part-000" not in words + hint


def test_an_object_of_batch_requests_alone_is_no_data(tmp_path: Path) -> None:
    """The command line takes request files out where it sees them; of many objects on S3 it looks into a few."""
    source = write_corpus(tmp_path / "in", 2, 5)
    (source / "part-001.jsonl").write_text("\n" + "".join(asked(n) for n in range(3)))
    _, args, _ = prepare(str(tmp_path / "out"), str(source), shards=2)
    assert finish(pod(args, 0))[0] == 0
    code, lines, _ = finish(pod(args, 1))
    words, hint = lines[-1]["message"], lines[-1]["hint"]
    assert code == Exit.DATA and f"{source}/part-001.jsonl: OpenAI batch requests alone" in words
    assert "`--batch-input`" in hint and f"--skip-file {source}/part-001.jsonl" in hint
    (source / "part-001.jsonl").write_text(asked(1) + GOOD)  # beside rows it is a line that is not taken
    _, args, store = prepare(str(tmp_path / "mixed"), str(source), shards=2)
    assert finish(pod(args, 1))[0] == 0
    assert json.loads(store.get_bytes("commits/00001.json"))["lines"]["rejected"] == {"no_completion": 1}


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
    source = str(write_corpus(tmp_path / "in", 2, 3))
    _, args, _ = prepare(str(tmp_path / "out"), source)
    argv = ["--index", "0", *args.to_argv(), "--workers", "2"]  # one alone would be the pod itself
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
        assert f"no space left on the disk: scratch directory {room}" in lines[-1]["message"] and lines[-1]["hint"]
        assert [p.name for p in room.iterdir()] == []
    finally:
        subprocess.run(["umount", str(room)], check=True)
    assert not [k for k in contents(store.root) if k.startswith(("data", "commits"))]
