"""The command line as its users meet it: exit codes, stdout for data, stderr for talk, JSON objects as promised."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cli_fixtures import ctl, tokenize
from job_fixtures import ROOT, answer, chat_line, contents, write_corpus
from vocab import tiny_dir

from dflashctl import interrupt

RESULT = [
    "schema", "run", "state", "out", "lines_seen", "lines_kept", "lines_rejected", "turns_rejected",
    "rows", "tokens", "loss_tokens", "seconds",
]  # fmt: skip
STATUS = ["schema", "run", "kind", "state", "reason", "queue", "indexes", "rows", "tokens"]
INSPECT = [
    "schema", "rows", "tokens", "loss_tokens", "loss_share", "lines", "loss_per_row", "histogram",
    "most_common_supervised", "degenerate", "reasons",
]  # fmt: skip


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a corpus `in`, and the complete dataset `out` of it."""
    folder = tmp_path_factory.mktemp("done")
    write_corpus(folder / "in", 4, 8)
    first = tokenize(folder, "in", "out", "--parallelism", "9", "--shards", "3", "-o", "json")
    assert first.code == 0, first.err
    (folder / "first.json").write_text(first.out)
    (folder / "first.err").write_text(first.err)
    return folder


def test_the_result_is_one_object_and_the_talk_is_not_in_it(done: Path) -> None:
    result = json.loads((done / "first.json").read_text())
    assert list(result) == RESULT
    assert (result["state"], result["rows"], result["lines_seen"], result["lines_kept"]) == ("succeeded", 32, 32, 32)
    assert result["lines_rejected"] == {} and result["turns_rejected"] == {}
    assert result["out"] == str(done / "out") and result["run"].startswith("tok-out-")
    said = (done / "first.err").read_text()
    assert said.splitlines()[0] == "backend local"
    assert "parallelism 9 is clamped to the 3 shards" in said and "\r" not in said and "\x1b" not in said


def test_the_same_again_is_unchanged(done: Path) -> None:
    before = contents(str(done / "out"))
    again = tokenize(done, "in", "out", "--shards", "3", "-o", "json")
    assert again.code == 0 and "unchanged" in again.err
    assert again.json()["rows"] == 32
    assert contents(str(done / "out")) == before


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (["--max-length", "9"], "max_length"),
        (["--loss-on", "response"], "loss_on"),
        (["--shards", "2"], "shards"),
        (["--template-kwargs", '{"a": 1}'], "template_kwargs"),
        (["--generator", "m@1"], "generator"),
    ],
)
def test_another_spec_exits_5_naming_the_field(done: Path, change: list[str], word: str) -> None:
    refused = tokenize(done, "in", "out", *change)
    assert refused.code == 5 and f"`{word}`" in refused.err and refused.out == ""


def test_another_input_exits_5_naming_the_key(done: Path, tmp_path: Path) -> None:
    refused = tokenize(done, "in/part-000.jsonl", "out")
    assert refused.code == 5 and "part-001.jsonl" in refused.err
    (done / "in" / "more.jsonl").write_text(chat_line("q", answer(99)) + "\n")
    try:
        refused = tokenize(done, "in", "out")
    finally:
        (done / "in" / "more.jsonl").unlink()
    assert refused.code == 5 and "more.jsonl" in refused.err


def test_a_removed_input_exits_5_naming_the_key_and_not_the_shards(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", 3, 8)
    assert tokenize(tmp_path, "in", "out", "--shards", "3").code == 0
    (tmp_path / "in" / "part-001.jsonl").unlink()
    taken = tokenize(tmp_path, "in", "out", "--shards", "3")
    assert taken.code == 5 and "part-001.jsonl` of the plan is no longer there" in taken.err, taken.err
    assert tokenize(tmp_path, "in", "out", "--shards", "2").code == 5


def test_a_commit_that_is_none_is_one_clear_error(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", 1, 8)
    assert tokenize(tmp_path, "in", "out").code == 0
    (tmp_path / "out" / "dataset.json").unlink()
    (tmp_path / "out" / "commits" / "00000.json").write_text("{}")
    for verb in (["status"], ["inspect", "./out"], ["resume"]):
        failed = ctl(tmp_path, *verb)
        assert failed.code == 1 and "`commits/00000.json` of OUT is not its commit record" in failed.err, failed.err


def test_a_name_of_another_out_exits_5(done: Path) -> None:
    run = json.loads((done / "first.json").read_text())["run"]
    refused = tokenize(done, "in", "elsewhere", "--name", run)
    assert refused.code == 5 and run in refused.err and not (done / "elsewhere").exists()


def test_status_ls_and_wait_agree(done: Path) -> None:
    run = json.loads((done / "first.json").read_text())["run"]
    for reference in ([], ["@latest"], [run], [str(done / "out")]):
        status = ctl(done, "status", *reference, "-o", "json")
        assert status.code == 0 and list(status.json()) == STATUS
        assert status.json()["state"] == "succeeded" and status.json()["run"] == run
        assert status.json()["indexes"] == {"total": 3, "succeeded": 3, "active": 0, "failed": []}
    assert [r["run"] for r in ctl(done, "ls", "-o", "json").json()["runs"]] == [run]
    assert ctl(done, "ls", "-o", "name").out == run + "\n"
    waited = ctl(done, "wait", run, "-o", "json")
    assert waited.code == 0 and waited.json()["state"] == "succeeded"


def test_global_options_stand_before_or_after_the_verb(done: Path) -> None:
    assert ctl(done, "-o", "json", "status").json() == ctl(done, "status", "-o", "json").json()
    assert ctl(done, "-o", "json", "status", "-o", "name").out == ctl(done, "status", "-o", "name").out


def test_out_alone_answers_when_the_local_state_is_lost(done: Path, tmp_path: Path) -> None:
    status = ctl(tmp_path, "status", str(done / "out"), "-o", "json")
    assert status.code == 0 and status.json()["state"] == "succeeded"
    named = ctl(tmp_path, "status", "-o", "json", DFLASH_TOKENIZE_OUT=str(done / "out"))
    assert named.json() == status.json()
    unknown = ctl(tmp_path, "status", "nobody")
    assert unknown.code == 1 and "`nobody`" in unknown.err


def test_inspect(done: Path) -> None:
    report = ctl(done, "inspect", "out", "-o", "json").json()
    assert list(report) == INSPECT
    assert sum(report["histogram"].values()) == report["rows"] == 32
    assert report["loss_share"] == report["loss_tokens"] / report["tokens"]
    assert not report["degenerate"] and report["reasons"] == []
    text = ctl(done, "inspect", "out").out
    assert "loss tokens per row" in text and "the answer to" in text
    both = ctl(done, "inspect", "out", "--against", "out", "-o", "json").json()
    assert both["same_rows"] is True and both["spec"] == {}
    assert ctl(done, "inspect", "nothing").code == 4


def test_logs(done: Path) -> None:
    one = ctl(done, "logs", "--index", "1")
    lines = [json.loads(line) for line in one.out.splitlines()]
    assert {line["index"] for line in lines} == {1} and any(line["event"] == "committed" for line in lines)
    every = ctl(done, "logs", "--grep", "committed").out.splitlines()
    assert [line.split(" ")[0] for line in every] == ["[0]", "[1]", "[2]"]
    failed = ctl(done, "logs", "--failed")
    assert failed.code == 0 and failed.out == "" and "no index" in failed.err


def test_preview_marks_what_is_learnt(done: Path) -> None:
    text = tokenize(done, "in", "unused", "--preview", "2").out
    assert "what is 0?" in text and "{+the answer to 0 is 0, and then some <|im_end|>+}" in text
    assert "the answer to 1 is" in text and "the answer to 2 is" not in text
    rows = tokenize(done, "in", "unused", "--preview", "2", "-o", "json").json()["rows"]
    assert ["".join(s["text"] for s in row["segments"] if s["loss"]) for row in rows] == [
        f"{answer(i)}<|im_end|>" for i in range(2)
    ]
    assert not (done / "unused").exists()
    for none in ("0", "-1"):
        refused = tokenize(done, "in", "unused", "--preview", none)
        assert refused.code == 2 and f"`--preview` {none} is below 1" in refused.err


def test_a_preview_of_what_cannot_be_read_speaks_of_no_run(done: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("version https://git-lfs.github.com/spec/v1\nsize 3\n")
    failed = tokenize(tmp_path, "a.jsonl", "unused", "--preview", "2")
    assert failed.code == 4 and "a.jsonl: a Git LFS pointer" in failed.err, failed.err
    assert "hint: fetch it: git lfs pull, or leave it out\n" in failed.err
    pinned = ("--batch-input", "a.jsonl", "--batch-input", "b.jsonl")
    failed = tokenize(tmp_path, str(done / "in"), "unused", "--preview", "2", *pinned)
    assert failed.code == 4 and "a.jsonl: a Git LFS pointer" in failed.err and "b.jsonl: a Git LFS" in failed.err
    assert "resume" not in failed.err


def test_dry_run_with_shards_asks_nothing(tmp_path: Path) -> None:
    dry = ctl(
        tmp_path, "tokenize", "s3://nobody/in", "--out", "s3://nobody/out", "--model", "no/such", "--shards", "4",
        "--dry-run=client", "-o", "json", "--name", "x", AWS_ENDPOINT_URL="http://127.0.0.1:9", HF_HUB_OFFLINE="1",
    )  # fmt: skip
    assert dry.code == 0, dry.err
    assert dry.json()["run"] == "x" and dry.json()["job"]["indexes"] == [0, 1, 2, 3]
    assert not (tmp_path / ".dflash").exists()


def test_dry_run_is_the_same_every_time_and_writes_nothing(done: Path) -> None:
    first, second = (tokenize(done, "in", "dry", "--dry-run") for _ in range(2))
    assert first.code == 0 and first.out == second.out and "--out" in first.out
    assert not (done / "dry").exists()
    assert tokenize(done, "in", "dry", "--dry-run=never").code == 2


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["in", "--out", "bucket/x"], 2, "s3://bucket/x"),
        (["in", "--out", "o", "--shards", "0"], 2, "`--shards` 0"),
        (["in", "--out", "o", "--shards", "x"], 2, "--shards"),
        (["in", "--out", "o", "--name", "A"], 2, "DNS label"),
        (["in", "--out", "o", "--template-kwargs", "[]"], 2, "JSON object"),
        (["in", "--out", "o", "--no-such"], 2, "--no-such"),
        (["in", "--out", "o", "--backend", "slurm"], 2, "'slurm'"),
        (["in", "--out", "o", "-o", "xml"], 2, "'xml'"),
        (["in", "--out", "o", "--config", "none.toml"], 2, "none.toml"),
        (["nothing-here", "--out", "o"], 4, "nothing-here"),
        (["in/*.gz", "--out", "o"], 4, "in/*.gz"),
        (["empty", "--out", "o"], 4, "empty 1"),
        (["in", "--out", "o", "--model", "./nothing"], 4, "./nothing"),
        (["in", "--out", "o", "--model", "no/such-model"], 4, "no/such-model"),
        (["twice/a", "twice/b", "--out", "o"], 4, "would both give the row ids"),
    ],
)
def test_each_mistake_is_one_clear_error(done: Path, args: list[str], code: int, words: str) -> None:
    for name in ("a", "b"):
        (done / "twice" / name).mkdir(parents=True, exist_ok=True)
        (done / "twice" / name / "rows.jsonl").write_text(chat_line("q", answer(1)) + "\n")
    (done / "empty").mkdir(exist_ok=True)
    (done / "empty" / "nothing.jsonl").touch()
    model = [] if "--model" in args else ["--model", str(tiny_dir())]
    failed = ctl(done, "tokenize", *args, *model, HF_HUB_OFFLINE="1")
    assert failed.code == code, failed.err
    assert words in failed.err and failed.out == "" and "Traceback" not in failed.err
    assert len([line for line in failed.err.splitlines() if line.startswith("error: ")]) == 1
    assert not (done / "o").exists()


def test_a_name_that_is_not_utf8_is_one_clear_error(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", 1, 20)
    os.rename(tmp_path / "in" / "part-000.jsonl", os.fsencode(tmp_path) + b"/in/a\xff.jsonl")
    failed = tokenize(tmp_path, "in", "out")
    assert failed.code == 4 and r"in/a\udcff.jsonl` is not UTF-8" in failed.err, failed.err


def test_logs_as_one_object(done: Path) -> None:
    document = ctl(done, "logs", "--index", "0", "--grep", "committed", "-o", "json").json()
    assert list(document) == ["schema", "run", "lines"] and document["schema"] == "dflash.logs/1"
    assert [line["index"] for line in document["lines"]] == [0]
    assert json.loads(document["lines"][0]["text"])["event"] == "committed"
    assert ctl(done, "logs", "--failed", "-o", "json").json()["lines"] == []


@pytest.mark.parametrize("place", ["dflashctl.show", "tokenizer.job"])
def test_ctrl_c_is_one_line_wherever_it_comes(tmp_path: Path, place: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTS.format(place))
    done = ctl(tmp_path, "tokenize", "in", "--out", "o", "--model", "m", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (done.code, done.out, done.err.splitlines()[-1]) == (130, "", interrupt.WORDS), done.err
    assert "Traceback" not in done.err


INTERRUPTS = """
import sys
class Ctrl:
    def find_spec(self, name, path=None, target=None):
        if name == "{}":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Ctrl())
"""


def test_errors_are_printed_character_for_character(tmp_path: Path) -> None:
    text = "index [3] of s3://b/k[/x] failed, taps [1, 16]"
    failed = ctl(tmp_path, "status", text.replace("/", "_"))
    assert failed.code == 1 and f"`{text.replace('/', '_')}`" in failed.err
    (tmp_path / "dflash.toml").write_text(f'"{text}" = 1\n')
    failed = ctl(tmp_path, "ls")
    assert failed.code == 2 and f"`{text}`" in failed.err


def test_secrets_are_never_printed(done: Path) -> None:
    secret = "MARK/er+Secret=0123456789"
    env = {"AWS_SECRET_ACCESS_KEY": secret, "AWS_ACCESS_KEY_ID": "AK", "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    args = ["in", "out-secret", "--dry-run", "-o", "json"]
    seen = [
        tokenize(done, *args, **env),
        ctl(done, "status", secret.replace("/", "_"), **{**env, "MY_TOKEN": secret.replace("/", "_")}),
        ctl(done, "doctor", "-v", **env, DFLASH_TOKENIZE_OUT="s3://b/x"),
    ]
    assert seen[1].code == 1 and "[hidden]" in seen[1].err
    assert not any(secret in text or secret.replace("/", "_") in text for d in seen for text in (d.out, d.err))
