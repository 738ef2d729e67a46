"""Runs each pod of the double for real: as a process of this machine, or as a container through podman."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from double.state import Cluster, Object, index_of, now, phase

TERMINATION_BYTES, FALLBACK_BYTES, FALLBACK_LINES = 4096, 2048, 80


class Process:
    """An image that is this checkout: `command` + args run here; paths below a mount become paths of a folder."""

    def __init__(self, env: dict[str, str]) -> None:
        self.env = env

    def start(self, pod: Object, folder: Path, env: dict[str, str], mounts: dict[str, Path]) -> subprocess.Popen[bytes]:
        container = pod["spec"]["containers"][0]

        def here(text: str) -> str:
            for path, real in mounts.items():
                if text == path or text.startswith(path + "/"):
                    return str(real) + text[len(path) :]
            return text

        argv = [here(a) for a in [*container.get("command", []), *container.get("args", [])]]
        given = {**self.env, **{k: here(v) for k, v in env.items()}, "TERMINATION_LOG": str(folder / "termination")}
        process = subprocess.Popen(
            argv, env=given, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

        def end() -> None:  # a container ends with its first process: what it left would hold the log open
            process.wait()
            self.kill(pod, process, signal.SIGKILL)

        threading.Thread(target=end, daemon=True).start()
        return process

    def kill(self, pod: Object, process: subprocess.Popen[bytes], sig: int) -> None:
        """A container's first process alone is told; what is killed takes all others along."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if sig == signal.SIGKILL else os.kill)(process.pid, sig)

    def forget(self, pod: Object) -> None:
        pass


class Podman:
    """A real image: read-only root, the pod's user, no capabilities, emptyDir volumes as folders of mode 0777."""

    def __init__(self, image: str, flags: list[str] | None = None) -> None:
        self.image = image
        self.flags = flags or []

    def start(self, pod: Object, folder: Path, env: dict[str, str], mounts: dict[str, Path]) -> subprocess.Popen[bytes]:
        container, security = pod["spec"]["containers"][0], pod["spec"].get("securityContext", {})
        (folder / "termination").touch()
        (folder / "termination").chmod(0o666)
        name = pod["metadata"]["name"]
        argv = ["podman", "run", "--rm", "--name", name, "--network", "host", "--read-only", "--read-only-tmpfs=false"]
        argv += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", *self.flags]
        argv += ["--user", f"{security.get('runAsUser', 10001)}:{security.get('runAsGroup', 10001)}"]
        argv += ["-v", f"{folder / 'termination'}:/dev/termination-log"]
        for path, real in mounts.items():
            argv += ["-v", f"{real}:{path}"]
        for key in env:
            argv += ["--env", key]  # by name: values never stand on a command line
        command = [*container.get("command", []), *container.get("args", [])]
        argv += ["--entrypoint", command[0], self.image, *command[1:]]
        return subprocess.Popen(
            argv, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def kill(self, pod: Object, process: subprocess.Popen[bytes], sig: int) -> None:
        subprocess.run(["podman", "kill", "--signal", str(sig), pod["metadata"]["name"]], capture_output=True)

    def forget(self, pod: Object) -> None:
        subprocess.run(["podman", "rm", "-f", "-t", "0", pod["metadata"]["name"]], capture_output=True)


class Kubelet:
    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.logs: dict[str, Path] = {}

    def start(self, pod: Object) -> None:
        threading.Thread(target=self._live, args=(pod,), daemon=True).start()

    def terminate(self, pod: Object, delete: bool = False, grace_s: float | None = None) -> None:
        """SIGTERM, then SIGKILL after the grace period; a deleted pod leaves the API when its process has ended."""
        meta = pod["metadata"]
        with self.cluster.lock:
            if meta.get("deletionTimestamp"):
                return
            if phase(pod) in ("Succeeded", "Failed"):  # nothing is left to end
                if delete:
                    self.cluster.drop("pods", pod)
                return
            grace = pod["spec"].get("terminationGracePeriodSeconds", 30) if grace_s is None else grace_s
            ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=grace)
            meta["deletionTimestamp"] = ends.strftime("%Y-%m-%dT%H:%M:%SZ")
            meta["drop"] = delete
            self.cluster.put("pods", pod)
            process = self.processes.get(meta["uid"])
            if process is None and not pod["spec"].get("nodeName"):
                self._finish(pod, 137, "Error")
        if process is not None:
            threading.Thread(target=self._stop, args=(pod, process, grace), daemon=True).start()

    def _stop(self, pod: Object, process: subprocess.Popen[bytes], grace: float) -> None:
        runner = self.cluster.images[_image(pod)]
        runner.kill(pod, process, signal.SIGTERM)
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            runner.kill(pod, process, signal.SIGKILL)

    # ---- one pod

    def _live(self, pod: Object) -> None:
        name, uid, image = pod["metadata"]["name"], pod["metadata"]["uid"], _image(pod)
        pulled = False
        while True:  # an image or a secret that is missing is waited for, as a kubelet does
            reason, words = self._hindrance(pod)
            if not reason:
                break
            with self.cluster.lock:
                if pod["metadata"].get("deletionTimestamp"):
                    self._finish(pod, 137, "Error")
                    return
                if not pulled:
                    pulled = True
                    self._waiting(pod, reason, words)
                    self.cluster.event(pod, "Failed", f"Error: {words}", "Warning")
            time.sleep(0.2)
        folder = self.folder / name
        folder.mkdir(parents=True)
        mounts = self._mounts(pod, folder)
        with self.cluster.lock:
            if pod["metadata"].get("deletionTimestamp"):
                self._finish(pod, 137, "Error")
                return
            self.logs[name] = folder / "log"
            (folder / "log").touch()
            process = self.cluster.images[image].start(pod, folder, self._env(pod), mounts)
            self.processes[uid] = process
            pod["status"] |= {"phase": "Running", "startTime": now()}
            pod["status"]["containerStatuses"] = [_status(pod, {"running": {"startedAt": now()}})]
            self.cluster.put("pods", pod)
            self.cluster.event(pod, "Started", "Started container")
            out_of_memory = (pod["metadata"]["labels"]["batch.kubernetes.io/job-name"], index_of(pod) or 0)
            doomed = out_of_memory in self.cluster.oom
            self.cluster.oom.discard(out_of_memory)
        if doomed:
            self.cluster.images[image].kill(pod, process, signal.SIGKILL)
        self._pump(process, folder / "log")
        code = process.wait()
        code = 128 - code if code < 0 else code
        self.cluster.images[image].forget(pod)
        message = _read_tail(folder / "termination", TERMINATION_BYTES)
        if not message and code:
            lines = _read_tail(folder / "log", FALLBACK_BYTES).splitlines()[-FALLBACK_LINES:]
            message = "\n".join(line.partition(" ")[2] for line in lines)
        with self.cluster.lock:
            self._finish(pod, code, "OOMKilled" if doomed else "Completed" if code == 0 else "Error", message)
        for path in mounts.values():
            shutil.rmtree(path, ignore_errors=True)

    def _hindrance(self, pod: Object) -> tuple[str, str]:
        image = _image(pod)
        if image not in self.cluster.images:
            if pod["spec"]["containers"][0].get("imagePullPolicy") == "Never":
                return "ErrImageNeverPull", f'Container image "{image}" is not present with pull policy of Never'
            return "ErrImagePull", f'failed to pull image "{image}": not found'
        for source in pod["spec"]["containers"][0].get("envFrom", []):
            if source["secretRef"]["name"] not in self.cluster.secrets:
                return "CreateContainerConfigError", f'secret "{source["secretRef"]["name"]}" not found'
        return "", ""

    def _waiting(self, pod: Object, reason: str, words: str) -> None:
        pod["status"]["containerStatuses"] = [_status(pod, {"waiting": {"reason": reason, "message": words}})]
        self.cluster.put("pods", pod)

    def _env(self, pod: Object) -> dict[str, str]:
        container, env = pod["spec"]["containers"][0], {}
        for source in container.get("envFrom", []):
            env |= self.cluster.secrets[source["secretRef"]["name"]]
        for entry in container.get("env", []):
            if "value" in entry:
                env[entry["name"]] = entry["value"]
            else:
                where, _, key = entry["valueFrom"]["fieldRef"]["fieldPath"].removeprefix("metadata.").partition("['")
                values = pod["metadata"].get(where, {})
                env[entry["name"]] = values.get(key.removesuffix("']"), "") if isinstance(values, dict) else values
        return env

    def _mounts(self, pod: Object, folder: Path) -> dict[str, Path]:
        mounts = {}
        for mount in pod["spec"]["containers"][0].get("volumeMounts", []):
            real = folder / "volumes" / mount["name"]
            real.mkdir(parents=True, exist_ok=True)
            real.chmod(0o777)
            mounts[mount["mountPath"]] = real
        return mounts

    def _pump(self, process: subprocess.Popen[bytes], log: Path) -> None:
        assert process.stdout is not None
        with log.open("ab", buffering=0) as file:
            for line in process.stdout:
                stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")
                file.write(stamp.encode() + b" " + line)

    def _finish(self, pod: Object, code: int, reason: str, message: str = "") -> None:
        ended: dict[str, Any] = {"exitCode": code, "reason": reason, "finishedAt": now()}
        if message:
            ended["message"] = message
        pod["status"]["phase"] = "Succeeded" if code == 0 else "Failed"
        pod["status"]["containerStatuses"] = [_status(pod, {"terminated": ended})]
        self.processes.pop(pod["metadata"]["uid"], None)
        self.cluster.put("pods", pod)
        if pod["metadata"].pop("drop", False):
            # the controller must see the end before the pod goes: it holds a finalizer on each pod in reality
            threading.Timer(0.3, self.cluster.drop, ("pods", pod)).start()

    def close(self) -> None:
        with self.cluster.lock:
            running = [p for p in self.cluster.live("pods") if p["metadata"]["uid"] in self.processes]
        for pod in running:
            self.cluster.images[_image(pod)].kill(pod, self.processes[pod["metadata"]["uid"]], signal.SIGKILL)
        end = time.monotonic() + 10
        while self.processes and time.monotonic() < end:
            time.sleep(0.05)


def disrupt(cluster: Cluster, kubelet: Kubelet, pod: Object, reason: str = "EvictionByEvictionAPI") -> None:
    """A node drain: the condition that podFailurePolicy ignores, then SIGTERM and deletion."""
    with cluster.lock:
        words = "Eviction API: evicting"
        pod["status"].setdefault("conditions", []).append(
            {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": words}
        )
        cluster.put("pods", pod)
    if phase(pod) in ("Pending", "Running"):
        kubelet.terminate(pod, delete=True)


def _image(pod: Object) -> str:
    return str(pod["spec"]["containers"][0]["image"])


def _status(pod: Object, state: Object) -> Object:
    name = pod["spec"]["containers"][0]["name"]
    return {
        "name": name,
        "image": _image(pod),
        "imageID": "",
        "ready": "running" in state,
        "restartCount": 0,
        "state": state,
    }


def _read_tail(path: Path, limit: int) -> str:
    if not path.exists():
        return ""
    return path.read_bytes()[-limit:].decode("utf-8", "replace")
