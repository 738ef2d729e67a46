"""How runs end on the command line: refused, joined, detached, timed out, from S3 to S3."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import command, ctl, environment, tokenize
from job_fixtures import answer, chat_line, write_corpus
from test_cli import RESULT
from vocab import tiny_dir


def historic(folder: Path, rows: int = 100) -> None:
    """87 % of the rows learn the same six tokens and no more."""
    folder.mkdir(parents=True, exist_ok=True)
    short = int(rows * 0.87)
    lines = [chat_line(f"q {i}", "abcde") for i in range(short)] + [
        chat_line("q", answer(i)) for i in range(short, rows)
    ]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")


def test_the_gate_refuses_the_historic_dataset_and_allowing_it_needs_no_job(tmp_path: Path) -> None:
    historic(tmp_path / "in")
    refused = tokenize(tmp_path, "in", "out", "--max-reject", "1", "--min-loss-tokens", "1", "-o", "json")
    assert refused.code == 3 and list(refused.json()) == RESULT and refused.json()["state"] == "refused"
    assert "exactly 6 loss tokens" in refused.err
    report = ctl(tmp_path, "inspect", "out", "-o", "json").json()
    assert report["degenerate"] and any("exactly 6 loss tokens" in reason for reason in report["reasons"])
    assert ctl(tmp_path, "status", "-o", "json").json()["state"] == "refused"
    assert ctl(tmp_path, "wait").code == 3
    again = ctl(tmp_path, "resume", "-o", "json")
    assert again.code == 3 and again.json()["state"] == "refused"
    allowed = ctl(tmp_path, "resume", "--allow-degenerate", "-o", "json")
    assert allowed.code == 0 and allowed.json()["state"] == "succeeded" and "no further Job" in allowed.err
    assert not (tmp_path / "out" / "refused.json").exists()
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["gate"]["allow_degenerate"] is True
    assert ctl(tmp_path, "resume").code == 0


def test_too_many_malformed_lines_are_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", 1, 20)
    (tmp_path / "in" / "bad.jsonl").write_text("{not json\n" + chat_line("q", answer(50)) + "\n")
    refused = tokenize(tmp_path, "in", "out", "-o", "json")
    assert refused.code == 3 and refused.json()["lines_rejected"] == {"invalid_json": 1}
    allowed = tokenize(tmp_path, "in", "out", "--max-reject", "0.2", "-o", "json")
    assert allowed.code == 0 and allowed.json()["state"] == "succeeded"


def test_no_row_at_all_is_refused_whatever_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows.jsonl").write_text(chat_line("q", "no") + "\n")
    refused = tokenize(tmp_path, "in", "out", "--allow-degenerate", "-o", "json")
    assert refused.code == 3 and refused.json()["rows"] == 0


def test_a_batch_output_is_joined_with_the_requests_found_beside_it(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    request = {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions",
               "body": {"model": "m", "messages": [{"role": "user", "content": "asked"}]}}  # fmt: skip
    choice = {"index": 0, "message": {"role": "assistant", "content": answer(7)}, "finish_reason": "stop"}
    body = {"choices": [choice], "model": "m"}
    output = {"id": "b", "custom_id": "r1", "response": {"status_code": 200, "body": body}, "error": None}
    (tmp_path / "requests.jsonl").write_text(json.dumps(request) + "\n")
    (tmp_path / "in" / "output.jsonl").write_text(json.dumps(output) + "\n")
    alone = tokenize(tmp_path, "in", "out")
    assert alone.code == 4 and "--batch-input" in alone.err
    joined = tokenize(tmp_path, "in", "out", "--batch-input", "requests.jsonl", "-o", "json")
    assert joined.code in (0, 3) and joined.json()["lines_kept"] == 1, joined.err
    shown = tokenize(tmp_path, "in", "x", "--batch-input", "requests.jsonl", "--preview", "1").out
    assert "asked" in shown and answer(7).strip() in shown


@pytest.mark.parametrize("out", ["./in.jsonl", "./in.jsonl/out"])
def test_an_out_that_is_a_file_is_said_with_its_remedy(tmp_path: Path, out: str) -> None:
    (tmp_path / "in.jsonl").write_text(chat_line("q", answer(1)) + "\n")
    done = tokenize(tmp_path, "in.jsonl", out)
    assert done.code == 4 and "a part of this path is a file" in done.err and "name another" in done.err
    assert (tmp_path / "in.jsonl").read_text() == chat_line("q", answer(1)) + "\n"


def test_settings_come_from_dflash_toml_alone(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", 2, 8)
    text = f'[tokenize]\ninput = "in"\nout = "out"\nmodel = "{tiny_dir()}"\n'
    (tmp_path / "dflash.toml").write_text(text)
    result = ctl(tmp_path, "tokenize", "--parallelism", "64", "-o", "json")
    assert result.code == 0 and result.json()["rows"] == 16
    verbose = ctl(tmp_path, "doctor", "-v", "-o", "json")
    origins: dict[str, Any] = {s["name"]: s["origin"] for s in verbose.json()["settings"]}
    assert verbose.code == 0 and origins["tokenize.out"].endswith("dflash.toml")
    assert origins["backend"] == "environment DFLASH_BACKEND" and origins["tokenize.shards"] == "default"


def test_doctor_exits_4_for_what_would_stop_a_run(tmp_path: Path) -> None:
    scratch = {"DFLASH_SCRATCH": str(tmp_path)}
    found = ctl(tmp_path, "doctor", "-o", "json", DFLASH_TOKENIZE_INPUT="nothing", DFLASH_TOKENIZE_OUTT="x", **scratch)
    states = {check["name"]: check["state"] for check in found.json()["checks"]}
    assert found.code == 4 and states["input"] == "failed" and states["environment"] == "warning"
    assert "DFLASH_SCRATCH" not in json.dumps(found.json()), "it is read by the pool"


def test_ctrl_c_detaches_and_the_run_goes_on(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", 2, 3000)
    args = ["tokenize", "in", "--out", "out", "--model", str(tiny_dir()), "--shards", "2"]
    process = subprocess.Popen(
        command(*args), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    said = ""
    while "started" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "goes on" in err and out == "", err
    assert ctl(tmp_path, "wait", "--timeout", "2m").code == 0
    assert (tmp_path / "out" / "dataset.json").exists()


def test_a_timeout_exits_124_and_attaching_again_ends_well(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", 2, 3000)
    detached = tokenize(tmp_path, "in", "out", "--detach", "-o", "name")
    assert detached.code == 0 and detached.out.startswith("tok-out-")
    assert ctl(tmp_path, "wait", "--timeout", "0s").code in (0, 124)
    assert ctl(tmp_path, "wait", "--timeout", "soon").code == 2
    attached = tokenize(tmp_path, "in", "out", "-o", "json")
    assert attached.code == 0 and attached.json()["rows"] == 6000
    assert "running already" in attached.err or "unchanged" in attached.err


@pytest.mark.s3
def test_from_s3_to_s3_with_the_tokenizer_there_too(s3: str, tmp_path: Path) -> None:
    from tokenizer.store import open_store

    store = open_store(s3)
    for file in sorted(write_corpus(tmp_path / "in", 3, 8).iterdir()):
        store.upload_file(file, f"raw/{file.name}")
    store.put_bytes("raw/_SUCCESS", b"")
    for file in tiny_dir().iterdir():
        store.upload_file(file, f"model/{file.name}")
    result = ctl(tmp_path, "tokenize", f"{s3}/raw/", "--out", f"{s3}/out", "--model", f"{s3}/model", "-o", "json")
    assert result.code == 0 and result.json()["rows"] == 24, result.err
    local = tokenize(tmp_path, "in", "out", "-o", "json")
    assert local.json()["tokens"] == result.json()["tokens"]
    compared = ctl(tmp_path, "inspect", f"{s3}/out", "--against", "out", "-o", "json").json()
    assert compared["same_rows"] is True
    wrong = ctl(tmp_path, "tokenize", f"{s3}-none/raw/", "--out", f"{s3}/o", "--model", f"{s3}/model")
    assert wrong.code == 4 and f"{s3}-none" in wrong.err
    denied = ctl(tmp_path, "tokenize", f"{s3}/raw/", "--out", f"{s3}/o", "--model", str(tiny_dir()),
                 AWS_SECRET_ACCESS_KEY="wrong-wrong-wrong")  # fmt: skip
    assert denied.code == 4 and "wrong-wrong" not in denied.err and "Traceback" not in denied.err
