"""The reader of pods' logs against an API that misbehaves on order: every line once and whole, and an end in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import ctl
from double.api import Double
from served import Typed, a_job, a_pod, put, standing

from dflashctl.backends import podlogs
from dflashctl.backends.kube import Refused
from dflashctl.backends.podlogs import LogReader, each, moment, since
from dflashctl.errors import ApiError

Pod = dict[str, Any]


def pod(name: str = "p", phase: str = "Running", *containers: str, created: str = "2026-01-01T00:00:00Z") -> Pod:
    return {
        "metadata": {"name": name, "creationTimestamp": created},
        "spec": {"containers": [{"name": c} for c in containers or ("tokenizer",)]},
        "status": {"phase": phase},
    }


class Script:
    """An API: each request for a log takes the next step of its pod's script, pods are what they are set to."""

    def __init__(self, **steps: list[Any]) -> None:
        self.steps, self.pods = steps, {name: pod(name) for name in steps}
        self.asked: list[dict[str, Any]] = []

    def now(self) -> tuple[list[tuple[int, Pod]], bool]:
        ended = all(p["status"]["phase"] != "Running" for p in self.pods.values())
        return [(i, p) for i, p in enumerate(self.pods.values())], ended

    def find(self, path: str) -> Pod | None:
        return self.pods.get(path.rsplit("/", 1)[-1])

    def lines(self, path: str, **query: Any) -> Iterator[bytes]:
        self.asked.append(query)
        name = path.split("/")[-2]
        step = self.steps[name].pop(0) if len(self.steps[name]) > 1 else self.steps[name][0]
        for item in step:
            if callable(item):
                item(self)
            elif isinstance(item, Exception):
                raise item
            else:
                yield item

    def read(self, previous: bool = False, follow: bool = True) -> list[tuple[int, str]]:
        reader = LogReader(self, "/pods", self.now)  # type: ignore[arg-type]
        return [(line.index, line.text) for line in reader.read(previous, follow)]


def ends(*names: str) -> Any:
    def end(script: Script) -> None:
        for name in names:
            script.pods[name] = pod(name, "Succeeded")

    return end


def stamped(n: int, text: str, zone: str = "Z", fraction: str = "") -> bytes:
    return f"2026-01-01T00:00:{n:02d}.{fraction or '000000001'}{zone} {text}\n".encode()


A, B, C = stamped(1, "a"), stamped(1, "b"), stamped(2, "c")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_S", "RETRY_S"):
        monkeypatch.setattr(podlogs, name, 0.02)
    monkeypatch.setattr(podlogs, "QUIET_S", 0.2)


@pytest.mark.parametrize(
    "broken",
    [
        [A, B, ConnectionError("reset")],
        [A, B],  # a rotation ends a stream, too
        [A, B, Refused(500, "", "the kubelet is busy")],
        [A, B, b"2026-01-01T00:00:02.00000"],  # a proxy that cuts a line and ends well
        [A, B, C[:-1]],  # it cuts before the newline
    ],
)
def test_a_stream_that_breaks_is_opened_anew_where_it_ended(broken: list[Any]) -> None:
    script = Script(p=[broken, [A, B, C, ends("p")], [A, B, C]])
    assert script.read() == [(0, "a"), (0, "b"), (0, "c")]
    assert script.asked[1]["sinceTime"] == "2026-01-01T00:00:01Z"


@pytest.mark.parametrize("status", [400, 429, 500, 502, 503, 504])
def test_a_log_that_cannot_be_opened_yet(status: int) -> None:
    script = Script(p=[[Refused(status, "", "not now")], [ConnectionError("no route")], [A, ends("p")], [A]])
    assert script.read() == [(0, "a")]


def test_an_end_without_a_newline_counts_when_the_pod_is_dead() -> None:
    assert Script(p=[[A, ends("p"), C[:-1]], [A, C[:-1]]]).read() == [(0, "a"), (0, "c")]
    assert Script(p=[[A, ends("p"), C[:-1]], [A]]).read() == [(0, "a"), (0, "c")]  # the file was rotated meanwhile
    gone = Script(p=[[A, lambda s: s.pods.clear(), C[:-1]], [Refused(404, "NotFound", "gone")]])
    assert gone.read() == [(0, "a"), (0, "c")]


def test_a_node_of_another_time_zone() -> None:
    lines = [stamped(1, "a", "+02:00", "5"), stamped(1, "b", "+02:00", "25"), stamped(2, "c", "+02:00")]
    assert since(lines[0].split()[0]) == "2026-01-01T00:00:01+02:00"
    assert moment(b"2026-01-01T02:00:01.5+02:00") == moment(b"2026-01-01T00:00:01.500000000Z")
    assert moment(b"2026-01-01T00:00:01.25Z") < moment(b"2026-01-01T00:00:01.5Z") and moment(b"odd") == (0.0, "")
    script = Script(p=[[lines[1], lines[0], ConnectionError("cut")], [lines[1], lines[0], lines[2], ends("p")], lines])
    assert [text for _, text in script.read()] == ["b", "a", "c"]


def test_our_container_among_those_that_a_webhook_added() -> None:
    script = Script(p=[[A, ends("p")], [A]])
    script.pods["p"] = pod("p", "Running", "istio-proxy", "trainer")
    script.read()
    assert script.asked[0]["container"] == "trainer"


def test_a_stream_that_is_silent_though_its_pod_is_dead() -> None:
    asleep = threading.Event()
    script = Script(p=[[A, ends("p"), lambda s: asleep.wait(60)], [A, C]], q=[[B, ends("q")], [B]])
    began = time.monotonic()
    assert sorted(script.read()) == [(0, "a"), (0, "c"), (1, "b")]
    assert time.monotonic() - began < 30
    asleep.set()


def test_a_log_that_stays_closed_is_said_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(p=[[Refused(403, "Forbidden", "pods/log is forbidden")]], q=[[A, ends("p", "q")], [A]])
    assert script.read() == [(1, "a")]
    assert "the log of p cannot be read on: pods/log is forbidden" in capsys.readouterr().err
    broken = Script(p=[[ZeroDivisionError("x")]], q=[[A, ends("p", "q")], [A]])
    assert broken.read() == [(1, "a")] and "ZeroDivisionError" in capsys.readouterr().err


def test_an_api_that_fails_for_good_ends_it() -> None:
    script = Script(p=[[A]])

    def fail() -> Any:
        raise ApiError("the API server does not answer")

    script.now = fail  # type: ignore[method-assign]
    with pytest.raises(ApiError, match="does not answer"):
        script.read()


def test_what_is_there_now_index_by_index_and_the_try_before() -> None:
    script = Script(old=[[A]], new=[[B]], none=[[Refused(400, "BadRequest", "waiting to start")]])
    pods = [(0, pod("new", "Failed", created="2026-01-01T00:00:09Z")), (0, pod("old", "Failed")), (1, pod("none"))]
    script.now = lambda: (pods, False)  # type: ignore[method-assign]
    assert script.read(follow=False) == [(0, "b")]
    assert script.read(previous=True, follow=True) == [(0, "a")]


def test_a_log_that_breaks_off_again_and_again_fails_at_the_end_and_the_others_are_read() -> None:
    script = Script(p=[[A, ConnectionError("cut")]], q=[[B]])
    seen = []
    lines = LogReader(script, "/pods", script.now).read(False, False)  # type: ignore[arg-type]
    with pytest.raises(ApiError):
        for line in lines:
            seen.append(line.text)
    assert seen == ["a", "b"]


def test_pods_that_do_not_exist_yet(tmp_path: Path) -> None:
    with standing(Double(tmp_path, namespace="default")) as double:
        job = a_job("run", str(tmp_path / "out"), 2)
        put(double, "jobs", job)
        kube = {"KUBECONFIG": str(double.kubeconfig), "DFLASH_BACKEND": "kube"}
        for pods in ([], [a_pod(job, 0, "Pending")]):
            for one in pods:
                put(double, "pods", one)
            for flags in ([], ["-f"], ["--index", "0"]):
                early = ctl(tmp_path, "logs", "run", "--no-wait", *flags, **kube)
                assert early.code == 3 and "run `run` is pending; nothing of it has started" in early.err
        following = Typed(tmp_path, "logs", "run", "-f", KUBECONFIG=str(double.kubeconfig))
        following.says("run run is pending; its logs are waited for")
        text = "2026-01-01T00:00:01.000000000Z first words\n"
        (tmp_path / "log").write_text(text)
        double.kubelet.logs["run-0-abcde"] = tmp_path / "log"
        put(double, "pods", a_pod(job, 0))
        following.says("[0] first words")
        put(double, "pods", a_pod(job, 0, "Failed"))
        put(double, "jobs", {**job, "status": {"conditions": [{"type": "Failed", "status": "True", "reason": "x"}]}})
        assert following.end() == 0 and following.out == "[0] first words\n"


def test_each_does_not_wait_for_one_that_hangs() -> None:
    asleep = threading.Event()
    found = each(lambda name: name * 2 if name != "hangs" else str(asleep.wait(60)), ["a", "hangs", "b"], 3, 0.5)
    assert found == {"a": "aa", "b": "bb"}
    asleep.set()
    with pytest.raises(ZeroDivisionError):
        each(lambda name: 1 // 0, ["a"], 1)
