"""What `wait` makes of each scenario that was recorded on a real cluster: served by the double's API, asked by the CLI."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import pytest
from cli_fixtures import ctl
from double.api import Double
from k8s_objects import SCENARIOS, Recording

from dflashctl.backends.base import Known

MINE = {"app.kubernetes.io/managed-by": "dflashctl", "app.kubernetes.io/component": "train"}
ENDS = {
    "indexed_ok": 0, "success_policy": 0, "pod_deleted_by_hand": 0, "sidecar_target": 0,
    "fail_index": 3, "max_failed_indexes": 3, "backoff_exceeded": 3, "fail_job": 3, "bad_command": 3, "oom": 3,
    "deadline": 3, "peer_dies": 3,
    "image_missing": 3, "bad_configmap": 3, "unschedulable_gpu": 3,  # stuck: over at once with --stuck-after 0s
    "delete_running": 3, "suspend": 124,
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_wait_of_a_recorded_scenario(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded objects are served as they were at the end; the run is labelled as one of ours."""
    double = Double(tmp_path, namespace="default")  # its controllers are not started: nothing changes
    recorded_job, pods, events = Recording(name).at(1e9)
    job = recorded_job or Recording(name).at(0.5)[0]
    assert job is not None
    job["metadata"] |= {"namespace": "default", "labels": {"dflashctl/run": name.replace("_", "-"), **MINE}}
    job["metadata"]["annotations"] = {"dflashctl/out": str(tmp_path / "out"), "dflashctl/indexes": ""}
    for plural, objects in (("jobs", [job]), ("pods", pods), ("events", events)):
        for obj in objects:
            obj["metadata"].setdefault("namespace", "default")
            double.cluster.objects[(plural, "default", obj["metadata"]["name"])] = obj
    for obj in pods:
        obj["metadata"].setdefault("labels", {})["batch.kubernetes.io/job-name"] = job["metadata"]["name"]
    threading.Thread(target=double.server.serve_forever, args=(0.05,), daemon=True).start()
    monkeypatch.setenv("KUBECONFIG", str(double.kubeconfig))
    known = Known(name.replace("_", "-"), "train", str(tmp_path / "out"), job["metadata"]["name"], 0.0)
    if recorded_job is None:
        del double.cluster.objects[("jobs", "default", job["metadata"]["name"])]
        home = tmp_path / ".dflash" / "kube"
        home.mkdir(parents=True)
        (home / "x.json").write_text(json.dumps({**dataclasses.asdict(known), "namespace": "default"}))
    flags = ["--timeout", "0s"] if name == "suspend" else ["--timeout", "20s", "--stuck-after", "0s"]
    try:
        waited = ctl(tmp_path, "wait", known.run, *flags, "-o", "json", DFLASH_BACKEND="kube")
    finally:
        double.server.shutdown()
        double.server.server_close()
    assert waited.code == ENDS[name], waited.err


def test_every_recorded_scenario_is_waited_for() -> None:
    assert set(SCENARIOS) == set(ENDS)
