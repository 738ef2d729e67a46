"""Text is printed character for character; without a terminal there are whole lines, few of them, and no colour."""

from __future__ import annotations

import io

import pytest

from dflashctl import errors, show
from dflashctl.follow import Patience, Speed, progress_line, speed
from dflashctl.runs import Status
from tokenizer.job import Exit, JobError
from tokenizer.store import StoreError

TRICKY = "index [3] of s3://b/k[/x] failed, taps [1, 16]"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_errors_keep_every_character(stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    said = stream()
    monkeypatch.setattr("sys.stderr", said)
    monkeypatch.setenv("TERM", "xterm")
    show.fail(TRICKY, f"hint of {TRICKY}")
    assert said.getvalue().count(TRICKY) == 2
    assert ("\x1b[" in said.getvalue()) == (stream is Terminal)


def test_colour_is_left_out_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert show.paint("x", show.RED, Terminal()) == "x"
    monkeypatch.delenv("NO_COLOR")
    assert show.paint("x", show.RED, Terminal()) == "\x1b[31mx\x1b[0m"
    monkeypatch.setenv("TERM", "dumb")
    assert show.paint("x", show.RED, Terminal()) == "x"


def test_control_characters_are_spelt_out_and_text_is_not_touched() -> None:
    text = "é 中文 👩‍👩‍👧 [b]x[/b]\ta\n"
    assert show.printable(text) == text
    assert show.printable("a\x1b[31m\r\x00\x9b\ud800") == "a\\x1b[31m\\r\\x00\\u009b\\ud800"


def test_columns_line_up_with_wide_characters() -> None:
    lines = show.table(("name", "n"), [("中文", "1"), ("abc", "22")], right=(1,))
    assert lines == ["name   n", "中文   1", "abc   22"]


def test_progress_without_a_terminal_is_whole_lines_at_most_one_in_ten_seconds() -> None:
    now, said = [0.0], io.StringIO()
    screen = show.Screen(said, lambda: now[0])
    for tick in range(300):
        now[0] = tick / 10
        screen.update(lambda: ["unused"], f"line {tick}")
    assert said.getvalue().splitlines() == ["line 100", "line 200"]
    assert "\r" not in said.getvalue() and said.getvalue().isascii()


def test_a_watcher_sees_every_change_at_once() -> None:
    said = io.StringIO()
    screen = show.Screen(said, lambda: 0.0)
    for state in ("pending", "running", "running", "failed"):
        screen.update(lambda: [], state, change=(state,))
    assert said.getvalue().split() == ["pending", "running", "failed"]


def test_a_terminal_is_redrawn_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("shutil.get_terminal_size", lambda: (20, 5))
    said = Terminal()
    screen = show.Screen(said, lambda: 0.0)
    screen.update(lambda: ["a" * 30, "b"], "")
    assert said.getvalue() == "\x1b[2K" + "a" * 17 + "...\n\x1b[2Kb\n\x1b[J"
    screen.update(lambda: [str(i) for i in range(9)], "")
    assert said.getvalue().count("\x1b[2A") == 1 and "... 6 more lines" in said.getvalue()


def test_units() -> None:
    assert [show.span(s) for s in (8, 123, 3900)] == ["8s", "2m03s", "1h05m"]
    assert [show.rate(r, "rows") for r in (7, 1200, 3.4e6)] == ["7 rows/s", "1.2 k rows/s", "3.4 M rows/s"]
    assert [show.size(n) for n in (5, 96 << 20, 3 << 40)] == ["5 B", "96.0 MiB", "3.0 TiB"]


def test_the_progress_line_has_rates_and_an_eta() -> None:
    first = Status("r", "tokenize", "o", "running", total=4, total_bytes=1000, bytes=100)
    now = Status(
        "r", "tokenize", "o", "running", total=4, succeeded=1, rows=50, tokens=4000, bytes=300, total_bytes=1000
    )
    pace = speed(first, now, 10.0)
    assert pace == Speed(5.0, 400.0, 35.0)
    assert progress_line(now, pace) == (
        "r running, 1/4 indexes, 50 rows, 4,000 tokens, 5 rows/s, 400 tokens/s, ETA 35s"
    )
    assert speed(first, first, 0.0) == Speed(0.0, 0.0, None)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ApiError("x"), 1),
        (errors.UsageError("x"), 2),
        (errors.RunFailed("x"), 3),
        (errors.PreflightError("x"), 4),
        (errors.TakenError("x"), 5),
        (errors.TimedOut("x"), 124),
        (errors.Detached("x"), 130),
        (KeyboardInterrupt(), 130),
        (JobError(Exit.CONFIG, "x"), 4),
        (JobError(Exit.RETRY, "x"), 1),
        (StoreError("credentials", "s3://b", "x"), 4),
        (StoreError("unreachable", "s3://b", "x"), 1),
        (FileNotFoundError(2, "No such file", "f"), 1),
        (ZeroDivisionError("x"), 1),
    ],
)
def test_every_end_has_its_code_and_one_line(error: BaseException, code: int) -> None:
    found, message, _ = errors.describe(error)
    assert found == code and message and "\n" not in message


def test_secrets_are_hidden_wherever_they_turn_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "MARKER/secret+1")
    monkeypatch.setenv("DFLASH_TOKENIZE_OUT", "s3://bucket/out")  # TOKENIZE is no TOKEN
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/token")
    _, message, hint = errors.describe(errors.ApiError("MARKER/secret+1 at s3://bucket/out", "http://me:pass@host/x"))
    assert message == "[hidden] at s3://bucket/out" and hint == "http://[hidden]@host/x"
    assert "/var/run/token" not in errors.secrets_of({"AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/token"})


def test_a_result_is_printed_in_the_asked_format_alone(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    import yaml

    document = {"schema": "s", "text": "[3] é"}
    for output in show.FORMATS:
        show.emit(document, output, lambda: ["a table"], "a-name")
        printed = capsys.readouterr()
        assert printed.err == ""
        expected = {"table": "a table\n", "wide": "a table\n", "name": "a-name\n"}.get(output, printed.out)
        assert printed.out == expected
        if output in ("json", "yaml"):
            assert {"json": json.loads, "yaml": yaml.safe_load}[output](printed.out) == document
            assert "[3] é" in printed.out
    show.emit(document, "name", list)
    assert capsys.readouterr().out == ""


def test_talk_has_its_label_and_the_hint_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    show.warn("odd", "do this")
    show.fail("broken")
    assert capsys.readouterr().err == "warning: odd\nhint: do this\nerror: broken\n"


def test_talk_cannot_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for talk in (show.say, show.warn, show.fail):
        talk("a\x1b[2J [3] \udcff")
    show.fail("x", "b\x07")
    err = capsys.readouterr().err
    assert "\x1b" not in err and "\x07" not in err
    assert err.count(r"a\x1b[2J [3] \udcff") == 3 and r"hint: b\x07" in err


def test_who_started_a_run_waits_longer_for_room_than_for_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("dflashctl.follow.time.monotonic", lambda: clock[0])
    for reason, after in (("ErrImagePull", 5.0), ("Unschedulable: 0/3 nodes are available: 3 Insufficient cpu.", 600.0)):
        patience, now = Patience(5.0, ("suspended",), 600.0), Status("r", "tokenize", "o", "stuck", reason=reason)
        assert not patience.over(now)
        clock[0] += after - 1
        assert not patience.over(now)
        clock[0] += 1
        assert patience.over(now)
