"""How a pod ends: exit codes, last words, the log that is kept, what is left behind. Real processes, real S3."""

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

import pytest
from job_fixtures import (
    answer,
    chat_line,
    contents,
    environment,
    finish,
    objects,
    pod,
    prepare,
    write_corpus,
)

from tokenizer.job import Exit

GOOD = chat_line("how are you?", answer(1))


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
