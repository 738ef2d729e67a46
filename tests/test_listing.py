"""What the inputs hold: each object once, output never taken for input, batch requests told from their outputs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from job_fixtures import answer, chat_line

from dflashctl import listing
from dflashctl.errors import PreflightError
from tokenizer.store import Options

REQUEST = {"custom_id": "r", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}
OUTPUT = {"id": "b", "custom_id": "r", "response": {"status_code": 200, "body": {}}, "error": None}


def write(path: Path, *rows: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def find(*inputs: str, batch: tuple[str, ...] = (), out: str = "/nowhere") -> listing.Found:
    return listing.find(inputs, batch, out, Options())


def test_an_object_named_twice_is_read_once_whatever_the_order(tmp_path: Path) -> None:
    path = write(tmp_path / "a" / "b" / "x.jsonl", {"prompt": "q"})
    for inputs in ([path, str(tmp_path / "a")], [str(tmp_path / "a"), path, str(tmp_path / "a" / "b")]):
        (found,) = find(*inputs).objects
        assert (found.key, found.path) == (path, "b/x.jsonl")


def test_what_was_skipped_is_counted(tmp_path: Path) -> None:
    write(tmp_path / "x.jsonl", {"prompt": "q"})
    for name in ("_SUCCESS", ".hidden.jsonl", "half.jsonl.tmp", "notes.md"):
        (tmp_path / name).write_text("x")
    (tmp_path / "none.jsonl").touch()
    found = find(str(tmp_path))
    assert len(found.objects) == 1
    assert found.skipped == {"empty": 1, "hidden": 1, "marker": 1, "other_format": 1, "temporary": 1}


def test_what_is_skipped_beside_request_files_is_counted_too(tmp_path: Path) -> None:
    output = write(tmp_path / "out.jsonl", OUTPUT)
    write(tmp_path / "requests" / "r.jsonl", REQUEST)
    (tmp_path / "requests" / "_SUCCESS").touch()
    (tmp_path / "requests" / "r.jsonl.tmp").write_text("half")
    found = find(output, batch=(str(tmp_path / "requests"),))
    assert found.skips() == "skipped 1 marker, 1 temporary"


def test_output_below_an_input_is_no_input(tmp_path: Path) -> None:
    write(tmp_path / "x.jsonl", {"prompt": "q"})
    write(tmp_path / "out" / "rejected" / "00000.jsonl", {"object": "x"})
    write(tmp_path / "out2" / "y.jsonl", {"prompt": "q"})
    found = find(str(tmp_path), out=str(tmp_path / "out"))
    assert [o.path for o in found.objects] == ["out2/y.jsonl", "x.jsonl"] and found.skipped == {"below_out": 1}
    with pytest.raises(PreflightError) as error:
        find(str(tmp_path), out=str(tmp_path))
    assert "below_out 3" in error.value.message and "name an --out" in error.value.hint


def test_requests_among_the_inputs_are_pinned_for_the_outputs_alone(tmp_path: Path) -> None:
    request = write(tmp_path / "in" / "req.jsonl", REQUEST)
    output = write(tmp_path / "in" / "out.jsonl", OUTPUT)
    plain = tmp_path / "in" / "plain.jsonl"
    plain.write_text(chat_line("q", answer(1)) + "\n")
    found = find(str(tmp_path / "in"))
    assert [o.key for o in found.objects] == [output, str(plain)]
    assert {key: [o.key for o in objects] for key, objects in found.batch_inputs.items()} == {output: [request]}


def test_named_request_files_are_no_data_even_among_the_inputs(tmp_path: Path) -> None:
    request = write(tmp_path / "req.jsonl", REQUEST)
    output = write(tmp_path / "out.jsonl", OUTPUT)
    found = find(str(tmp_path), batch=(request,))
    assert [o.key for o in found.objects] == [output] and [o.key for o in found.batch_inputs[output]] == [request]


def test_what_cannot_be_joined_is_said_before_anything_runs(tmp_path: Path) -> None:
    output = write(tmp_path / "a" / "out.jsonl", OUTPUT)
    with pytest.raises(PreflightError, match=output):
        find(output)
    with pytest.raises(PreflightError, match="none has replies"):
        find(write(tmp_path / "b" / "req.jsonl", REQUEST))
    with pytest.raises(PreflightError, match="no such file"):
        find(str(tmp_path / "none"))


def test_an_output_that_begins_with_a_failed_request_is_one(tmp_path: Path) -> None:
    failed = {"custom_id": "r", "response": None, "error": {"code": "timeout"}}
    output, request = write(tmp_path / "out.jsonl", failed, OUTPUT), write(tmp_path / "req.jsonl", REQUEST)
    assert [o.key for o in find(str(tmp_path)).batch_inputs[output]] == [request]
    assert listing.kind_of(b'{"custom_id": "r", "error": null, "prompt": "q", "completion": "a"}') == ""


def test_named_request_files_serve_every_input_if_none_begins_as_an_output(tmp_path: Path) -> None:
    request = write(tmp_path / "req.jsonl", REQUEST)
    mixed = write(tmp_path / "mixed.jsonl", {"prompt": "q", "completion": "a"}, OUTPUT)
    assert [o.key for o in find(mixed, batch=(request,)).batch_inputs[mixed]] == [request]
    assert find(mixed, request).batch_inputs == {}


def test_an_output_without_an_error_key_and_a_cut_line_are_told_too() -> None:
    long = json.dumps({**REQUEST, "body": {"messages": [{"content": "x" * 99}]}}).encode()
    assert listing.kind_of(long[:-30]) == "request" == listing.kind_of(long)
    assert listing.kind_of(json.dumps(OUTPUT).encode()[:-10]) == "output"
    assert listing.kind_of(b'{"custom_id": "r", "response": {"body": {}}}') == "output"
    assert listing.kind_of(chat_line('"custom_id": "url": "/v1/', "x").encode()) == ""
    assert listing.kind_of(b"[" * 50_000) == listing.kind_of(b'{"custom_id": 1, "x": ' + b"[" * 50_000) == ""
    assert listing.kind_of(b"[1]") == listing.kind_of(b"\xff\xfe{") == listing.kind_of(b"") == ""


def test_compressed_heads_are_looked_into() -> None:
    import zstandard

    line = json.dumps(REQUEST).encode() + b"\n"
    for data in (gzip.compress(line * 9000), zstandard.compress(line * 9000)):
        assert listing.kind_of(listing.first_line(data[: listing.PEEK])) == "request"
    for broken in (b"\x1f\x8bnothing", b"\x28\xb5\x2f\xfdnothing"):
        assert listing.first_line(broken) == b""


def test_a_name_that_is_another_file_in_every_process_is_refused(tmp_path: Path) -> None:
    own = write(tmp_path / "x.jsonl", {"prompt": "q"})
    with open(own) as file, pytest.raises(PreflightError, match="another file in every process"):
        find(f"/proc/self/fd/{file.fileno()}")


def test_a_file_that_links_lead_to_is_read_once_under_its_own_name(tmp_path: Path) -> None:
    own = write(tmp_path / "in" / "m" / "x.jsonl", {"prompt": "q"})
    (tmp_path / "in" / "a.jsonl").symlink_to(own)
    (tmp_path / "in" / "m" / "y.jsonl").symlink_to("x.jsonl")
    (tmp_path / "in" / "b").symlink_to(tmp_path / "in" / "m")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    for inputs in (
        [tmp_path / "in"],
        [tmp_path / "in" / "b", tmp_path / "in"],
        [tmp_path / "in", tmp_path / "in" / "b"],
    ):
        found = find(*map(str, inputs))
        assert [(o.key, o.path) for o in found.objects] == [(own, "m/x.jsonl")]
        assert found.skipped["same_file"] >= 2
    only = find(str(tmp_path / "in" / "a.jsonl"))  # a link alone is a name like any other
    assert [o.path for o in only.objects] == ["a.jsonl"] and only.skipped == {}


def test_hard_links_are_two_files(tmp_path: Path) -> None:
    own = write(tmp_path / "x.jsonl", {"prompt": "q"})
    (tmp_path / "y.jsonl").hardlink_to(own)
    assert [o.path for o in find(str(tmp_path)).objects] == ["x.jsonl", "y.jsonl"]


def test_of_many_objects_on_s3_some_of_each_kind_of_name_are_looked_into() -> None:
    keys = [f"s3://b/{folder}/part-{n:05d}.jsonl" for folder in ("a", "b") for n in range(900)] + ["s3://b/req.jsonl"]
    chosen = listing.samples(sorted(keys))
    assert len(chosen) <= 2 * (listing.SAMPLES + 2) + 1
    assert {0, 899, 900, 1799, 1800} <= set(chosen)
    assert listing.samples(["/x/1.jsonl", "/x/2.jsonl", "/x/3.jsonl"]) == [0, 1, 2]


@pytest.mark.s3
def test_one_batch_file_among_the_samples_has_all_looked_into(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizer.store import open_store

    monkeypatch.setattr(listing, "SAMPLES", 1)
    store = open_store(s3)
    for n in range(6):
        store.put_bytes(f"in/{n}.jsonl", json.dumps(REQUEST if n == 3 else OUTPUT).encode() + b"\n")
    found = find(f"{s3}/in")
    assert [o.path for o in found.objects] == [f"{n}.jsonl" for n in (0, 1, 2, 4, 5)]
    assert {tuple(o.path for o in pinned) for pinned in found.batch_inputs.values()} == {("3.jsonl",)}
