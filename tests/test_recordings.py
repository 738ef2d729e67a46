"""Every scenario that was recorded on a real cluster, played to every command that follows: the right end, in time.

The recorded objects are served in real time by the double's API, from shortly before the truth. A command has ten
seconds from the moment when the truth can be seen; so it has when that moment finds its connections dead or its token
expired.
"""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from double.api import Double, Handler
from k8s_objects import SCENARIOS, Recording
from served import MINE, Typed, put, standing

from dflashctl.backends.base import Known
from dflashctl.progress import fold

LIMIT_S = 10.0
LEAD_S = 1.0  # played before the truth
HELP_S = 0.5  # of `dflashctl --help` on a machine that does nothing else
STUCK = {"image_missing": "ErrImageNeverPull", "bad_configmap": "CreateContainerConfigError",
         "unschedulable_gpu": "Unschedulable"}  # fmt: skip
SUCCEEDED = {"indexed_ok", "success_policy", "pod_deleted_by_hand", "sidecar_target"}
KIND = {"jobs": "job", "pods": "pods", "events": "events"}


class Stage:
    """A recording on the double's API, as a run of ours."""

    def __init__(self, double: Double, name: str, folder: Path) -> None:
        self.double, self.name, self.folder = double, name, folder
        self.run = name.replace("_", "-")
        self.logs: dict[str, str] = {}  # of the container that is followed, the first
        self.recording = Recording(name)
        self.truth, self.seen_at = self._truth(), 0.0
        known = Known(self.run, "train", str(folder / "out"), self.run, 0.0)
        home = folder / ".dflash" / "kube"  # what the command that submitted it left here
        home.mkdir(parents=True)
        (home / f"{self.run}.json").write_text(json.dumps({**dataclasses.asdict(known), "namespace": "default"}))
        self.show(self.truth - LEAD_S)

    def _truth(self) -> float:
        """When the objects first say how it ends: an end, or what nobody mends by waiting."""
        wanted = fold(*self.recording.at(1e9)).state
        began = self.recording.data["job"][0]["t"]
        for t in self.recording.times():
            if t >= began and fold(*self.recording.at(t)).state == wanted:
                return t
        raise AssertionError(self.name)

    def show(self, t: float) -> None:
        """All objects as they were at `t`."""
        job, pods, events = self.recording.at(max(t, self.recording.data["job"][0]["t"]))
        cluster = self.double.cluster
        with cluster.lock:
            cluster.objects.clear()
            for obj in (*([self._ours(job)] if job else []), *pods, *events):
                put(self.double, {"Job": "jobs", "Pod": "pods", "Event": "events"}[obj["kind"]], obj)
            for pod in pods:
                self._log(pod)

    def _ours(self, job: dict[str, Any]) -> dict[str, Any]:
        labels = {**(job["metadata"].get("labels") or {}), "dflashctl/run": self.run, **MINE}
        labels["app.kubernetes.io/component"] = "train"  # its end is its Job's: there are no commits
        meta = {**job["metadata"], "labels": labels, "annotations": {"dflashctl/out": str(self.folder / "out")}}
        return {**job, "metadata": meta}

    def _log(self, pod: dict[str, Any]) -> None:
        """What the pod had printed once it ran."""
        name = pod["metadata"]["name"]
        text = self.recording.data["logs"].get(f"{name}/{pod['spec']['containers'][0]['name']}", "")
        self.logs[name] = text
        if pod["status"]["phase"] != "Pending":
            path = self.folder / f"{name}.log"
            path.write_text("".join(f"2026-01-01T00:00:00.{i:09d}Z {x}\n" for i, x in enumerate(text.splitlines())))
            self.double.kubelet.logs[name] = path

    def begun(self) -> list[str]:
        """Pods whose log can be read by now; one that is still being made is waited for."""
        return list(self.double.kubelet.logs)

    def play(self) -> None:
        """In real time, from `LEAD_S` before the truth to the end of the recording."""
        began, start = time.monotonic(), self.truth - LEAD_S
        for t in [t for t in self.recording.times() if t > start]:
            time.sleep(max(0.0, began + t - start - time.monotonic()))
            self.show(t)
            self.seen_at = self.seen_at or (time.monotonic() if t >= self.truth else 0.0)
        self.seen_at = self.seen_at or time.monotonic()


class Asked(Handler):
    """Counts who asks, and can let every connection of before a moment die."""

    asked: set[str]
    fault, since = "", 0.0

    def setup(self) -> None:
        super().setup()
        self.born = time.monotonic()

    def _dies(self) -> bool:
        kind = type(self)
        if self.born >= kind.since or kind.fault not in ("silent", "dropped"):
            return False
        if kind.fault == "silent":
            threading.Event().wait(120)
        self.close_connection = True
        self.connection.close()
        return True

    def serve(self) -> None:
        if not self._dies():
            type(self).asked.add(self.path.partition("?")[0])
            super().serve()

    def chunk(self, data: bytes) -> None:
        if not self._dies():
            super().chunk(data)

    do_GET = do_POST = do_PATCH = do_DELETE = serve


@pytest.fixture
def double(tmp_path: Path) -> Iterator[Double]:
    double = Double(tmp_path, namespace="default")
    double.server.RequestHandlerClass = type("Bound", (Asked,), {"double": double, "asked": set()})
    with standing(double):
        yield double


def ends(name: str, verb: str) -> int:
    """The exit code that a command owes a scenario."""
    if verb != "wait" or name in SUCCEEDED:
        return 0
    return 124 if name == "suspend" else 3


def started(stage: Stage, *args: str) -> Typed:
    """A command that has looked at least once."""
    process = Typed(stage.folder, *args, KUBECONFIG=str(stage.double.kubeconfig))
    process.says("context double")
    return process


def late(stage: Stage, processes: list[Typed]) -> list[float]:
    """Plays the recording; seconds that each command took from the truth to its end.

    A machine that does other things is slower by a factor, which a whole command tells that is begun at the truth;
    the seconds are those of a machine that does nothing else.
    """
    player = threading.Thread(target=stage.play)
    player.start()
    while not stage.seen_at:
        time.sleep(0.01)
    everybody = [*processes, Typed(stage.folder, "--help", KUBECONFIG=str(stage.double.kubeconfig))]
    ended: dict[int, float] = {}
    give_up = time.monotonic() + 240
    while len(ended) < len(everybody) and time.monotonic() < give_up:
        for number, process in enumerate(everybody):
            if number not in ended and process.process.poll() is not None:
                ended[number] = time.monotonic() - stage.seen_at
        time.sleep(0.02)
    player.join()
    for process in everybody:
        process.process.kill()
    assert len(ended) == len(everybody), [p.err for p in everybody]
    return [ended[i] / max(1.0, ended[len(processes)] / HELP_S) for i in range(len(processes))]


def until_asked(stage: Stage, *words: str) -> None:
    """The commands have made these requests (the last parts of their paths)."""
    asked: set[str] = stage.double.server.RequestHandlerClass.asked  # type: ignore[attr-defined]
    end = time.monotonic() + 60
    while not all(any(a.endswith(w) for a in asked) for w in words):
        assert time.monotonic() < end, asked
        time.sleep(0.02)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_command_ends_as_it_should_within_ten_seconds(name: str, double: Double, tmp_path: Path) -> None:
    stage = Stage(double, name, tmp_path)
    over = name not in STUCK and name != "suspend"
    commands: dict[str, list[str]] = {"wait": ["wait", stage.run, "--stuck-after", "0s", "-o", "json"]}
    if over:
        commands["logs"] = ["logs", stage.run, "-f"]
    if name not in STUCK:  # what is stuck may be mended: it is watched on
        commands["status"] = ["status", stage.run, "-w", "-o", "json"]
    if name == "suspend":
        commands["wait"] += ["--timeout", "1s"]
    processes = {verb: started(stage, *args) for verb, args in commands.items()}
    until_asked(stage, "jobs", *(f"{pod}/log" for pod in stage.begun() if over))
    took = dict(zip(processes, late(stage, list(processes.values())), strict=True))
    assert {v: p.process.returncode for v, p in processes.items()} == {v: ends(name, v) for v in processes}, [
        p.err for p in processes.values()
    ]
    assert all(seconds < LIMIT_S for seconds in took.values()), took
    state = "stuck" if name in STUCK else fold(*stage.recording.at(1e9)).state
    for verb in processes.keys() & {"wait", "status"}:
        if name != "suspend" or verb == "status":
            assert json.loads(processes[verb].out)["state"] == state
    if name in STUCK:
        assert STUCK[name] in processes["wait"].err
    if over and name != "delete_running":
        printed = sorted(x for text in stage.logs.values() for x in text.splitlines())
        mine = sorted(re.sub(r"^\[[0-9]+\] ", "", line) for line in processes["logs"].out.splitlines())
        assert mine == printed, processes["logs"].err


@pytest.mark.parametrize("fault", ["silent", "dropped", "token", "unavailable"])
@pytest.mark.parametrize("name", ["fail_index", "indexed_ok", "delete_running"])
def test_in_time_through_faults_at_the_very_moment(name: str, fault: str, double: Double, tmp_path: Path) -> None:
    stage = Stage(double, name, tmp_path)
    processes = [
        started(stage, "wait", stage.run), started(stage, "status", stage.run, "-w"),
        started(stage, "logs", stage.run, "-f"),
    ]  # fmt: skip
    until_asked(stage, "jobs", "pods", *(f"{pod}/log" for pod in stage.begun()))
    time.sleep(1.0)
    kind: Any = double.server.RequestHandlerClass
    if fault == "token":
        double.rotate_token()
    elif fault == "unavailable":
        double.cluster.refuse = [503, 500, 429] * 3
    else:
        kind.fault, kind.since = fault, time.monotonic()
    took = late(stage, processes)
    assert [p.process.returncode for p in processes] == [ends(name, "wait"), 0, 0], [p.err for p in processes]
    assert all(seconds < LIMIT_S for seconds in took), (took, [p.err for p in processes])
    assert not [p.err for p in processes if "Traceback" in p.err]
