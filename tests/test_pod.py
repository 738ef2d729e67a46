"""One index from lines to commit: the same bytes whoever does it, and S3. Real processes, a real server."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
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
