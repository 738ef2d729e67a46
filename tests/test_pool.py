"""The local backend's processes, the preview's rows, and the verbs of `python -m tokenizer`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
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
    run_all,
    start,
    write_corpus,
)
from vocab import tiny_dir

from tokenizer.job import PREVIEW_REJECTS, Exit, PreviewArgs, TokenizeArgs
from tokenizer.pool import Pool, max_failed_indexes
from tokenizer.talk import Log


def popen(args: TokenizeArgs, state: Path, jobs: int = 2, code: str = "", **env: str) -> subprocess.Popen[str]:
    """A pool; `code` runs first in its process."""
    argv = ["--state", str(state), "--jobs", str(jobs), *args.to_argv()]
    command = ["-P", "-m", "tokenizer", "pool", *argv]
    if code:
        command = [
            "-c",
            f"import os\nfrom tokenizer import pool, pod, index, job\n{code}\nraise SystemExit(pool.main({argv!r}))",
        ]
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment(DFLASH_SCRATCH=str(state) + "-scratch", **env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def states(state: Path) -> dict[int, dict[str, Any]]:
    records = [json.loads(path.read_bytes()) for path in sorted(state.glob("index-*.json"))]
    return {record["index"]: record for record in records}


def ended(state: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((state / "pool.json").read_bytes())
    return record


def test_a_pool_makes_the_bytes_of_pods_and_tells_what_it_does(tmp_path: Path) -> None:
    source = str(write_corpus(tmp_path / "in", 6, 20))
    _, clean = run_all(str(tmp_path / "clean"), source, tmp_path, shards=3)
    _, args, store = prepare(str(tmp_path / "out"), source, shards=3)
    code, _, err = finish(popen(args, tmp_path / "state"))
    assert (code, err) == (0, "")
    assert contents(store.root) == contents(clean.root)
    assert ended(tmp_path / "state")["state"] == "succeeded"
    for record in states(tmp_path / "state").values():
        assert (record["state"], record["exit"], record["try"]) == ("succeeded", 0, 0)
        assert record["progress"]["rows"] == 40
        assert record["progress"]["bytes"] == record["progress"]["total_bytes"]
        log = (tmp_path / "state" / "logs" / f"{record['index']:05d}-0.txt").read_text().splitlines()
        assert [json.loads(line)["event"] for line in log] == ["started", "progress", "committed", "closed"]
    code, lines, _ = finish(popen(args, tmp_path / "again"))
    assert code == 0 and [line["event"] for line in lines] == ["closed"]  # nothing loaded, nothing forked
    assert {r["state"] for r in states(tmp_path / "again").values()} == {"succeeded"}


def test_a_bad_file_fails_its_index_alone_and_at_once(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "in", 4, 10)
    plan, args, store = prepare(str(tmp_path / "out"), str(source), shards=4)
    (source / "part-002.jsonl").write_text("changed since")
    code, _, _ = finish(popen(args, tmp_path / "state"))
    found = states(tmp_path / "state")
    assert code == Exit.DATA
    assert [found[i]["state"] for i in range(4)] == ["succeeded", "succeeded", "failed", "succeeded"]
    assert (found[2]["exit"], found[2]["try"]) == (Exit.DATA, 0)
    assert "part-002.jsonl" in found[2]["reason"] and ended(tmp_path / "state")["state"] == "failed"
    now = {o.path: o for o in objects(str(source))}
    start(store, plan, "tok-test-r2", sequence=2, repinned=(now["part-002.jsonl"],))
    (source / "part-002.jsonl").touch()  # ... and once more, after the pin
    newer = TokenizeArgs(out=args.out, run="tok-test-r2")
    assert finish(popen(newer, tmp_path / "state2"))[0] == Exit.DATA
    start(store, plan, "tok-test-r3", sequence=3, repinned=(objects(str(source))[2],))
    assert finish(popen(TokenizeArgs(out=args.out, run="tok-test-r3"), tmp_path / "state3"))[0] == 0


def test_two_more_tries_and_then_the_index_has_failed(tmp_path: Path) -> None:
    source = str(write_corpus(tmp_path / "in", 2, 5))
    _, args, _ = prepare(str(tmp_path / "out"), source, shards=2)
    code = (
        "good = index.convert_object\n"
        "def bad(obj, *rest):\n"
        "    if '000' in obj.path: os.kill(os.getpid(), 9)\n"
        "    good(obj, *rest)\n"
        "index.convert_object = bad"
    )
    assert finish(popen(args, tmp_path / "state", code=code))[0] == Exit.DATA
    found = states(tmp_path / "state")
    assert (found[0]["state"], found[0]["exit"], found[0]["try"]) == ("failed", 137, 2)
    assert found[0]["reason"] == "ended by signal 9"
    assert found[1]["state"] == "succeeded"
    assert finish(popen(args, tmp_path / "state"))[0] == 0  # as a resume: only what has no commit
    assert states(tmp_path / "state")[0]["try"] == 3
    assert [max_failed_indexes(n) for n in (1, 20, 21, 64, 100)] == [1, 1, 2, 4, 5]


def test_what_every_index_would_hit_ends_the_run(tmp_path: Path) -> None:
    source = str(write_corpus(tmp_path / "in", 5, 5))
    _, args, store = prepare(str(tmp_path / "out"), source, shards=5)
    code = (
        "def bad(obj, *rest): raise job.JobError(job.Exit.SELF_CHECK, 'the engines differ', 'report it')\n"
        "index.convert_object = bad"
    )
    assert finish(popen(args, tmp_path / "state", jobs=1, code=code))[0] == Exit.SELF_CHECK
    found = states(tmp_path / "state")
    assert [r["state"] for r in found.values()] == ["failed", *["pending"] * 4]
    assert "the engines differ" in ended(tmp_path / "state")["reason"]
    store.put_bytes("tokenizer/tokenizer.json", b"{}")
    code_, _, err = finish(popen(args, tmp_path / "state"))
    assert (code_, err) == (Exit.CONFIG, "")
    assert "not the file of the plan" in ended(tmp_path / "state")["reason"]


def test_sigterm_ends_every_process_and_a_rerun_goes_on(tmp_path: Path) -> None:
    source = tmp_path / "in"
    write_corpus(source, 2, 5)
    _, args, store = prepare(str(tmp_path / "out"), str(source), shards=2)
    kept = (source / "part-000.jsonl").rename(tmp_path / "kept")
    os.mkfifo(source / "part-000.jsonl")  # its reader waits for ever
    process = popen(args, tmp_path / "state")
    root = psutil.Process(process.pid)
    log = tmp_path / "state" / "logs" / "00000-0.txt"
    while not (log.exists() and b"started" in log.read_bytes()):
        assert process.poll() is None
        os.sched_yield()
    family = root.children(recursive=True)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert (code, err) == (Exit.SIGTERM, "")
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert ended(tmp_path / "state")["state"] == "stopped"
    assert states(tmp_path / "state")[0]["state"] == "pending"
    assert b'"stopped"' in store.get_bytes("logs/tok-test/00000-0.txt")
    assert list(Path(f"{tmp_path / 'state'}-scratch").iterdir()) == []
    (source / "part-000.jsonl").unlink()
    kept.rename(source / "part-000.jsonl")  # the same inode and time: unchanged
    assert finish(popen(args, tmp_path / "state"))[0] == 0


def test_every_process_is_told_to_end_before_one_is_waited_for(tmp_path: Path) -> None:
    """Each may take long: its last words go to a store that may be down."""
    _, args, store = prepare(str(tmp_path / "out"), str(write_corpus(tmp_path / "in", 1, 5)))
    pool = Pool(tmp_path / "state", 2, args, store, Log(sys.stdout))
    last = "trap 'touch told; exit' TERM; touch ready1; while :; do sleep 0.02; done"
    first = (
        "trap 'for i in $(seq 300); do [ -e told ] && touch both && exit; sleep 0.02; done; exit' TERM; touch ready0;"
        "while :; do sleep 0.02; done"
    )
    children = [subprocess.Popen(["sh", "-c", code], cwd=tmp_path) for code in (first, last)]
    while not ((tmp_path / "ready0").exists() and (tmp_path / "ready1").exists()):
        os.sched_yield()
    pool.running = {child.pid: (index, 0) for index, child in enumerate(children)}
    pool._end()
    assert (tmp_path / "both").exists() and not pool.running


@pytest.mark.parametrize(
    "argv", [["run", "--colour"], ["pool"], ["pool", "--state", "x", "--jobs", "0"], ["preview", "x"], ["dance"], []]
)
def test_wrong_words_are_one_line_and_64_or_78(argv: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tokenizer", *argv], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode in (Exit.USAGE, Exit.CONFIG)
    assert "Traceback" not in done.stdout + done.stderr
    assert len((done.stdout + done.stderr).splitlines()) in (1, 2)


# ---- preview


def preview(args: PreviewArgs) -> tuple[int, list[dict[str, Any]], str]:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tokenizer", "preview", *args.to_argv()],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_preview_shows_rows_and_rejects_in_order_and_as_many_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        "\n".join([chat_line("q", answer(1), id="x"), "", "{broken", chat_line("r", "tiny"), chat_line("s", answer(2))])
    )
    code, rows, err = preview(PreviewArgs(str(tiny_dir()), (str(path),), rows=9))
    assert (code, err) == (0, "")
    assert [r["id"] for r in rows] == ["a.jsonl:1#0", "a.jsonl:3", "a.jsonl:4#0", "a.jsonl:5#0"]
    first = rows[0]
    assert first["segments"] == [
        {"text": "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", "loss": False},
        {"text": answer(1) + "<|im_end|>", "loss": True},
    ]
    assert (first["source_id"], first["rejected"]) == ("x", None)
    assert [r["rejected"]["reason"] for r in rows[1:3]] == ["invalid_json", "too_few_loss_tokens"]
    assert [r["id"] for r in preview(PreviewArgs(str(tiny_dir()), (str(path),), rows=1))[1]] == ["a.jsonl:1#0"]
    assert preview(PreviewArgs(str(tiny_dir()), (str(path),), rows=2))[1] == rows  # a reject is none of the two
    path.write_text("{broken\n" * 99 + chat_line("q", answer(1)))
    _, rejects, _ = preview(PreviewArgs(str(tiny_dir()), (str(path),), rows=2))
    assert len(rejects) == PREVIEW_REJECTS and all(r["rejected"] for r in rejects)


def test_preview_of_what_is_not_there_is_one_line(tmp_path: Path) -> None:
    code, rows, err = preview(PreviewArgs(str(tiny_dir()), (str(tmp_path / "none.jsonl"),)))
    assert code == Exit.DATA and not rows and "none.jsonl" in err and "Traceback" not in err


def test_a_module_in_the_users_folder_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.py").write_text("raise SystemExit('the wrong one')")
    (tmp_path / "orjson.py").write_text("raise SystemExit('the wrong one')")
    source = str(write_corpus(tmp_path / "in", 1, 5))
    _, args, _ = prepare(str(tmp_path / "out"), source)
    assert finish(pod(args, 0))[0] == 0
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tokenizer", "run", "--index", "0", *args.to_argv()],
        env=environment(PYTHONPATH=str(ROOT)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
