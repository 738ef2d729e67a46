"""Targets that are fetched: from S3 through a faulty network, and from a hub that is a server of this test."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import signal
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
from faultproxy import FaultProxy
from train_fixtures import random_rows, write_dataset
from train_runs import args, target_dir

from tokenizer.job import Exit, JobError
from tokenizer.store import Store, open_store
from trainer import fetch, hub
from trainer.check import small
from trainer.fetch import RECORD, local_target
from trainer.prepare import prepare
from trainer.target import read_config

BIG = 24 << 20  # bytes of the weights: three ranged GETs


def model_files() -> dict[str, bytes]:
    """A model as it lies under a prefix: what is loaded, and what is not."""
    real = {path.name: path.read_bytes() for path in target_dir().iterdir()}
    return real | {"model.safetensors": os.urandom(BIG), "pytorch_model.bin": b"x" * 9, "onnx/model.onnx": b"x"}


def upload(uri: str, files: dict[str, bytes]) -> Store:
    store = open_store(uri)
    for name, data in files.items():
        store.put_bytes(name, data)
    return store


class Told(list[dict[str, Any]]):
    """What was told; `checked` are the names that the check saw."""

    def __init__(self) -> None:
        super().__init__()
        self.checked: list[set[str]] = []

    def check(self, folder: Path) -> None:
        self.checked.append({path.name for path in folder.iterdir()})

    def text(self) -> str:
        return "\n".join(str(event.get("message", "")) for event in self)


def fetched(uri: str) -> tuple[Path, Told]:
    told = Told()
    return Path(local_target(uri, told.append, told.check)), told


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def reads(proxy: FaultProxy, name: str) -> int:
    return sum(r.method == "GET" and r.path.split("?")[0].endswith(f"/{name}") for r in proxy.requests)


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "model"
    monkeypatch.setenv("DFLASH_MODEL_CACHE", str(folder))
    monkeypatch.delenv("DFLASH_MODEL_CACHE_BYTES", raising=False)
    return folder


@pytest.mark.s3
def test_a_prefix_is_fetched_once_and_checked_before_its_weights(s3: str, s3_faults: FaultProxy, volume: Path) -> None:
    files = model_files()
    upload(f"{s3}/m/Tiny", files)
    folder, told = fetched(f"{s3}/m/Tiny")
    assert folder.parent == volume and contents(folder) == {n: d for n, d in files.items() if n not in ("pytorch_model.bin", "onnx/model.onnx")}
    assert "2 other objects are left out" in told.text()
    [seen] = told.checked
    assert "tokenizer.json" in seen and "config.json" in seen and "model.safetensors" not in seen
    last = [event for event in told if event["event"] == "fetch"][-1]
    assert last["bytes"] == last["total_bytes"] == sum(len(d) for d in contents(folder).values())
    record = json.loads((folder / RECORD).read_text())["files"]
    assert {n: d["sha256"] for n, d in record.items()} == {n: hashlib.sha256(d).hexdigest() for n, d in contents(folder).items()}
    s3_faults.reset()
    again, told = fetched(f"{s3}/m/Tiny")
    assert again == folder and "already" in told.text() and reads(s3_faults, "model.safetensors") == 0


@pytest.mark.s3
def test_bad_weather_costs_time_and_no_byte(s3: str, s3_faults: FaultProxy, volume: Path) -> None:
    files = model_files()
    upload(f"{s3}/Tiny", files)
    s3_faults.plan("cut:3000000", 3, match=r"GET /[^/?]+/Tiny/model\.safetensors")
    s3_faults.plan("slowdown", 3)
    folder, _ = fetched(f"{s3}/Tiny")
    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert s3_faults.faults["cut"] and s3_faults.faults["slowdown"]


@pytest.mark.s3
def test_a_kill_in_the_middle_is_gone_on_from(s3: str, s3_faults: FaultProxy, volume: Path) -> None:
    files = model_files()
    upload(f"{s3}/Tiny", files)
    s3_faults.rate = 8 << 20  # bytes a second: seconds for the weights
    pid = os.fork()
    if pid == 0:
        try:
            fetched(f"{s3}/Tiny")
        finally:
            os._exit(0)
    end = time.monotonic() + 60
    while not any(p.stat().st_size for p in volume.glob(".Tiny-*.partial/model.safetensors.part")):
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    [part] = volume.glob(".Tiny-*.partial/model.safetensors.part")
    had = part.stat().st_size
    assert had < BIG and not list(volume.glob("Tiny-*"))
    s3_faults.reset()
    folder, _ = fetched(f"{s3}/Tiny")
    assert contents(folder)["model.safetensors"] == files["model.safetensors"]
    ranges = [r.headers["range"] for r in s3_faults.requests if r.path.endswith("/Tiny/model.safetensors") and "range" in r.headers]
    assert min(int(text.removeprefix("bytes=").partition("-")[0]) for text in ranges) == had
    assert reads(s3_faults, "tokenizer.json") == 0


@pytest.mark.s3
def test_a_copy_that_was_changed_is_mended_file_by_file(s3: str, s3_faults: FaultProxy, volume: Path) -> None:
    files = model_files()
    upload(f"{s3}/Tiny", files)
    folder, _ = fetched(f"{s3}/Tiny")
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"not the weights")
    s3_faults.reset()
    again, told = fetched(f"{s3}/Tiny")
    assert again == folder and contents(folder)["model.safetensors"] == files["model.safetensors"]
    assert "not what was fetched" in told.text() and reads(s3_faults, "tokenizer.json") == 0
    os.utime(folder / "config.json", (1, 1))  # another time and the same bytes
    s3_faults.reset()
    assert fetched(f"{s3}/Tiny")[0] == folder and reads(s3_faults, "config.json") == 0


@pytest.mark.s3
def test_another_model_under_the_prefix_is_another_directory(s3: str, volume: Path) -> None:
    files = model_files()
    store = upload(f"{s3}/Tiny", files)
    first, _ = fetched(f"{s3}/Tiny")
    store.put_bytes("model.safetensors", b"other" * 9)
    second, _ = fetched(f"{s3}/Tiny")
    assert first != second and (second / "model.safetensors").read_bytes() == b"other" * 9
    assert (first / "model.safetensors").read_bytes() == files["model.safetensors"]


@pytest.mark.s3
def test_an_object_that_is_replaced_meanwhile_is_for_the_next_try(s3: str, volume: Path) -> None:
    store = upload(f"{s3}/Tiny", model_files())

    def replace(_: Path) -> None:
        store.put_bytes("model.safetensors", os.urandom(BIG))

    with pytest.raises(JobError) as caught:
        local_target(f"{s3}/Tiny", lambda event: None, replace)
    assert caught.value.code == Exit.RETRY and "changed" in caught.value.message
    assert fetched(f"{s3}/Tiny")[0].is_dir()


@pytest.mark.s3
def test_two_at_once_fetch_it_once(s3: str, s3_faults: FaultProxy, volume: Path) -> None:
    upload(f"{s3}/Tiny", model_files())
    found: list[Path] = []
    inside = threading.Event()

    def slow(folder: Path) -> None:
        inside.set()
        time.sleep(0.3)

    first = threading.Thread(target=lambda: found.append(Path(local_target(f"{s3}/Tiny", lambda e: None, slow))))
    first.start()
    assert inside.wait(60)
    second, told = fetched(f"{s3}/Tiny")
    first.join()
    assert found == [second] and "by another process" in told.text()
    starts = [r.headers["range"] for r in s3_faults.requests if r.path.endswith("/model.safetensors") and "range" in r.headers]
    assert len(starts) == len(set(starts))


@pytest.mark.s3
def test_a_volume_that_is_too_small_is_named_with_its_size(s3: str, volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload(f"{s3}/Tiny", model_files())
    monkeypatch.setenv("DFLASH_MODEL_CACHE_BYTES", str(10 << 20))
    with pytest.raises(JobError) as caught:
        fetched(f"{s3}/Tiny")
    assert caught.value.code == Exit.DISK_FULL
    assert str(volume) in caught.value.message and str(10 << 20) in caught.value.message and "volumes.model" in caught.value.hint
    assert not list(volume.glob("*/model*"))


@pytest.mark.s3
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda files: files.clear(), "nothing lies below"),
        (lambda files: files.pop("config.json"), "no config.json"),
        (lambda files: files.pop("model.safetensors"), "no .safetensors"),
        (lambda files: files.update({fetch.INDEX: b'{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}'}), "model-2.safetensors"),
        (lambda files: files.update({fetch.INDEX: b"[]"}), "no index"),
    ],
)
def test_what_cannot_be_a_model_is_refused_before_it_is_fetched(s3: str, volume: Path, change: Any, words: str) -> None:
    files = {n: d[:100] if n.endswith(".safetensors") else d for n, d in model_files().items() if "onnx" not in n and n != "pytorch_model.bin"}
    change(files)
    upload(f"{s3}/Tiny", files)
    with pytest.raises(JobError) as caught:
        fetched(f"{s3}/Tiny")
    assert caught.value.code == Exit.CONFIG and words in caught.value.message
    assert not list(volume.glob("*/*"))


@pytest.mark.s3
def test_refused_credentials_and_a_missing_bucket_are_78_and_a_silent_store_75(s3: str, volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "STORE", fetch.Options(patience=0.5))
    monkeypatch.setattr("tokenizer.retry._succeeded", bytearray(1))
    for name, value, code in (("AWS_SECRET_ACCESS_KEY", "wrong", Exit.CONFIG), ("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9", Exit.RETRY)):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            patch.setattr("tokenizer.s3._connections", {})
            with pytest.raises(JobError) as caught:
                fetched(f"{s3}/Tiny")
            assert caught.value.code == code and "target" in caught.value.message
    with pytest.raises(JobError) as caught:
        fetched("s3://no-such-bucket/Tiny")
    assert caught.value.code == Exit.CONFIG and "no-such-bucket" in caught.value.message


@pytest.mark.s3
def test_an_out_of_another_training_is_refused_before_the_target_is_fetched(s3: str, volume: Path, tmp_path: Path) -> None:
    upload(f"{s3}/Tiny", {path.name: path.read_bytes() for path in target_dir().iterdir()})
    data = write_dataset(tmp_path / "data", random_rows(40))
    told = Told()
    ready = prepare(args(data, tmp_path / "out", target=f"{s3}/Tiny"), tmp_path, told.append, lambda: None)
    assert Path(ready.target).parent == volume and any(event["event"] == "fetch" for event in told)
    shutil.rmtree(volume)
    told.clear()
    with pytest.raises(JobError) as caught:
        prepare(args(data, tmp_path / "out", target=f"{s3}/Tiny", lr=0.01), tmp_path, told.append, lambda: None)
    assert caught.value.code == Exit.CONFIG and "lr is 0.005 there, 0.01 here" in caught.value.message
    assert told == [] and not volume.exists()


def test_a_path_is_left_alone(tmp_path: Path) -> None:
    told = Told()
    for name in (str(target_dir()), "/model/none", "./none", "a/b/c"):
        assert local_target(name, told.append, told.check) == name
    assert local_target(f"file://{target_dir()}", told.append, told.check) == str(target_dir())
    assert told == [] and told.checked == []


def test_small_files_come_first_and_other_formats_not_at_all() -> None:
    listed = [fetch.Stat(n, s, "") for n, s in [("b.safetensors", 9), ("a.safetensors", 5), ("x.bin", 1), ("y.gguf", 1), (".git", 1), ("d/e.json", 1), ("empty", 0), ("z.json", 99)]]
    assert [f.key for f in fetch.chosen(listed)] == ["z.json", "a.safetensors", "b.safetensors"]
    assert [f.key for f in fetch.chosen(listed[3:])] == ["z.json", "y.gguf"]


# ---- a hub


class Hub(http.server.BaseHTTPRequestHandler):
    """What huggingface_hub asks for one repository."""

    protocol_version = "HTTP/1.0"  # no connection outlives the server
    files: dict[str, bytes]
    asked: list[str]
    SHA = "0123456789abcdef0123456789abcdef01234567"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        url = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.asked.append(f"{self.command} {url}")
        prefix = "/api/models/org/Tiny/"
        if url.startswith(prefix + "revision/") and url.endswith(("/v1", self.SHA)):
            self.answer({"id": "org/Tiny", "sha": self.SHA, "siblings": [{"rfilename": n, "size": len(d)} for n, d in self.files.items()]})
        elif url.startswith(prefix + "tree/"):
            self.answer([{"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()} for n, d in self.files.items()])
        elif url.startswith("/org/Tiny/resolve/") and (name := url.split("/", 5)[5]) in self.files:
            self.answer(self.files[name])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RevisionNotFound" if "org/Tiny" in url else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET

    def answer(self, value: Any) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.SHA)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[start:])


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, volume: Path) -> Any:
    """A hub of one repository, and this process told to use it."""
    from huggingface_hub import constants, file_download, hf_api

    handler = type("Bound", (Hub,), {"files": model_files(), "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hf_api, "api", hf_api.HfApi(endpoint=address))
    monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setattr(hub, "PATIENCE_S", 0.5)
    yield handler, server
    server.shutdown()
    server.server_close()


def test_a_hub_id_comes_to_the_volume_with_its_revision(served: Any, volume: Path) -> None:
    handler, server = served
    folder, told = fetched("org/Tiny@v1")
    assert str(folder).startswith(f"{volume}/hub/") and folder.name == Hub.SHA
    assert contents(folder) == {n: d for n, d in handler.files.items() if n not in ("pytorch_model.bin", "onnx/model.onnx")}
    [seen] = told.checked
    assert "tokenizer.json" in seen and "model.safetensors" not in seen
    read_config(str(folder))
    server.shutdown()
    server.server_close()
    again, told = fetched("org/Tiny@v1")
    assert again == folder and "is whole and is used" in told.text()
    shutil.rmtree(volume / "hub")
    with pytest.raises(JobError) as caught:
        fetched("org/Tiny@v1")
    assert caught.value.code == Exit.CONFIG and "no hub can be reached at http://127.0.0.1" in caught.value.message
    assert "s3://" in caught.value.hint


def test_a_hub_that_does_not_know_it(served: Any, volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("org/Tiny@v9", "org/Other@v1"):
        with pytest.raises(JobError) as caught:
            fetched(name)
        assert caught.value.code == Exit.CONFIG and "revision" in caught.value.hint
    for ask in (fetched, lambda name: small(name).__enter__()):  # the pod, and the look before a training here
        with pytest.raises(JobError) as caught:
            ask("org/Tiny")
        assert caught.value.code == Exit.CONFIG and "no revision" in caught.value.message
    monkeypatch.setenv("DFLASH_MODEL_CACHE_BYTES", str(10 << 20))
    with pytest.raises(JobError) as caught:
        fetched("org/Tiny@v1")
    assert caught.value.code == Exit.DISK_FULL
