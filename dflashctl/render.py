"""Manifests as a pure function: base Job from k8s/jobs + what one run needs -> the Job that is sent. No templates.

All static policy stays in the YAML, where it can be read, diffed and validated; this file patches names, argv, sizes
and the exit-code lists, which are generated from tokenizer.job.Exit: a pod and its failure policy cannot drift apart.
The same arguments give the same bytes: sorted keys, no time stamps, no random names.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import yaml

from dflashctl.errors import UsageError
from dflashctl.overrides import assign, check_variable
from tokenizer.job import Exit

FAIL_JOB = {
    "tokenize": (Exit.USAGE, Exit.SELF_CHECK, Exit.CONFIG),
    "train": (Exit.USAGE, Exit.DATA, Exit.SELF_CHECK, Exit.DISK_FULL, Exit.DIVERGED, Exit.CONFIG),
}
FAIL_INDEX = {"tokenize": (Exit.DATA,), "train": ()}
#: A volume -> the variable that tells the pod its size, which a pod cannot find out: it sees the node's disk.
SIZES = {"model": "DFLASH_MODEL_CACHE_BYTES", "data": "DFLASH_DATA_CACHE_BYTES"}
MODEL = "/model"  # where the Job mounts the volume `model`

NAME_LIMIT = 40  # leaves room for -rN, the completion index and the pod's suffix below the 63 of a label
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
ROOM = 2.0 * 2**30  # bytes
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([KMGTPE]i?|[mkMGTPE])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_TOLERATION: Mapping[str, type | tuple[str, ...]] = {
    "key": str,
    "operator": ("Exists", "Equal"),
    "value": str,
    "effect": ("NoSchedule", "PreferNoSchedule", "NoExecute"),
    "tolerationSeconds": int,
}


@dataclass(frozen=True)
class Node:
    """A node profile (`[node.NAME]` of dflash.toml): what one pod asks for, in Kubernetes quantities.

    What a profile leaves out stays as the base Job has it.
    """

    cpu: str = ""
    memory: str = ""
    gpus: int | None = None
    shm: str = ""
    selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    volumes: Mapping[str, str] = field(default_factory=dict)  # name -> size of its emptyDir, or "pvc:CLAIM"


@dataclass(frozen=True)
class Run:
    """One Job to submit. `job`: the Job's own name, `run` or `run-rN`. `argv`: what follows the image's entry point."""

    kind: str  # "tokenize" | "train"
    run: str
    job: str
    namespace: str
    image: str
    argv: Sequence[str]
    node: Node
    model: str
    spec_sha256: str
    completions: int = 1
    parallelism: int = 1
    queue: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    s3_secret: str = ""
    service_account: str = ""
    sets: Sequence[str] = ()


def base(kind: str) -> dict[str, Any]:
    """The base Job as it stands in k8s/jobs; installed or not, the same file."""
    text = resources.files("dflashctl.k8s").joinpath(f"jobs/{kind}.yaml").read_text(encoding="utf-8")
    value: dict[str, Any] = yaml.safe_load(text)
    return value


def max_failed_indexes(completions: int) -> int:
    return max(1, -(-completions * 5 // 100))


def render(base_job: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """The Job of `run`; raises UsageError that names the field for anything Kubernetes would refuse or drop."""
    _check(run)
    job = copy.deepcopy(dict(base_job))
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    labels = {"app.kubernetes.io/instance": run.run, "dflashctl/run": run.run}
    job["metadata"] |= {"name": run.job, "namespace": run.namespace}
    job["metadata"]["labels"] |= labels | ({"kueue.x-k8s.io/queue-name": run.queue} if run.queue else {})
    job["metadata"]["annotations"] = {"dflashctl/model": run.model, "dflashctl/spec-sha256": run.spec_sha256}
    spec["template"]["metadata"]["labels"] |= labels
    spec["podFailurePolicy"]["rules"] = _rules(spec["podFailurePolicy"]["rules"], run.kind, container["name"])
    if run.queue:
        spec["suspend"] = True  # Kueue admits it by un-suspending
    if run.kind == "tokenize":
        spec |= {
            "completions": run.completions,
            "parallelism": min(run.parallelism, run.completions),
            "maxFailedIndexes": max_failed_indexes(run.completions),
        }
    container["image"] = run.image
    container["args"] = [*container["args"], *run.argv]
    _place(pod, container, run.node)
    container["env"] += [{"name": k, "value": v} for k, v in sorted(run.env.items())]
    if run.s3_secret:
        container["envFrom"] = [{"secretRef": {"name": run.s3_secret}}]
    if run.service_account:
        pod["serviceAccountName"] = run.service_account
    assign(job, run.sets)
    return job


def to_yaml(objects: Sequence[Mapping[str, Any]]) -> str:
    """One YAML document an object: sorted keys, no line folding, no aliases; the same objects are the same bytes."""
    dumper = type("Plain", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})
    return "".join("---\n" + yaml.dump(dict(o), Dumper=dumper, sort_keys=True, width=10**9) for o in objects)


def _rules(rules: Sequence[Mapping[str, Any]], kind: str, container: str) -> list[dict[str, Any]]:
    """The base's own first rule (Ignore DisruptionTarget), then one rule an action from our exit codes."""
    kept = [dict(r) for r in rules if r["action"] == "Ignore"]
    for action, codes in (("FailJob", FAIL_JOB[kind]), ("FailIndex", FAIL_INDEX[kind])):
        if codes:
            on = {"containerName": container, "operator": "In", "values": sorted(int(c) for c in codes)}
            kept.append({"action": action, "onExitCodes": on})
    return kept


def _place(pod: dict[str, Any], container: dict[str, Any], node: Node) -> None:
    """Resources (requests equal limits: Guaranteed QoS), placement and volume sizes of the profile."""
    size = {key: value for key, value in (("cpu", node.cpu), ("memory", node.memory)) if value}
    if node.gpus is not None:
        size["nvidia.com/gpu"] = str(node.gpus)
    for side in ("requests", "limits"):
        sized = container["resources"][side] | size
        container["resources"][side] = {k: v for k, v in sized.items() if v != "0"}
    if node.selector:
        pod["nodeSelector"] = dict(node.selector)
    if node.tolerations:
        pod["tolerations"] = [dict(t) for t in node.tolerations]
    known = {v["name"]: v for v in pod["volumes"]}
    wanted = dict(node.volumes) | ({"shm": node.shm} if node.shm else {})
    for name, value in wanted.items():
        if name not in known:
            raise UsageError(f"`volumes.{name}` is no volume of this Job", f"known are {', '.join(sorted(known))}")
        if value.startswith("pvc:"):
            known[name].pop("emptyDir", None)
            known[name]["persistentVolumeClaim"] = {"claimName": value[4:]}
        else:
            known[name].setdefault("emptyDir", {})["sizeLimit"] = value
    _tell_sizes(container, known)
    disk = _disk(known.values())
    for side in ("requests", "limits"):  # the kubelet evicts a pod whose volumes on disk outgrow its limit
        if disk:
            container["resources"][side]["ephemeral-storage"] = f"{math.ceil(disk / 2**30)}Gi"
    memory, shm = container["resources"]["limits"]["memory"], known.get("shm", {}).get("emptyDir", {}).get("sizeLimit")
    if shm and quantity(shm) >= quantity(memory):
        raise UsageError(f"`shm` {shm} is not below `memory` {memory}", "/dev/shm counts against the memory limit")


def _tell_sizes(container: dict[str, Any], volumes: Mapping[str, Mapping[str, Any]]) -> None:
    """Sizes of volumes as variables of the pod; a claim has its own file system, which tells its size itself."""
    kept = []
    for entry in container["env"]:
        name = next((volume for volume, variable in SIZES.items() if variable == entry["name"]), None)
        limit = volumes[name].get("emptyDir", {}).get("sizeLimit") if name else None
        if name is None or limit:
            kept.append(entry | ({"value": str(int(quantity(limit)))} if limit else {}))
    container["env"] = kept


def _check_target(target: str, node: Node) -> None:
    """Refuse a target that no pod can find: below /model on a volume that starts empty, or a hub id that may move."""
    model = node.volumes.get("model", "")
    if target.startswith(f"{MODEL}/") and not model.startswith("pvc:"):
        raise UsageError(
            f"`--target {target}` lies on the volume `model`, which starts empty ({model or 'an emptyDir'})",
            'name a claim that holds it (`volumes.model = "pvc:CLAIM"` of the profile), or an s3:// prefix as target',
        )
    if not target.startswith(("/", "s3://", "file:")) and not re.fullmatch(r"[\w.-]+/[\w.-]+@[\w./-]+", target):
        raise UsageError(
            f"`--target {target}` is nothing that a pod can find",
            "give a path on the model volume, an s3:// prefix, or a hub id with its revision: ID@REVISION",
        )


def _disk(volumes: Iterable[Mapping[str, Any]]) -> float:
    """Bytes on the node's disk that volumes may grow to, with room for logs and the image's own layer."""
    places = [v["emptyDir"] for v in volumes if "emptyDir" in v and v["emptyDir"].get("medium") != "Memory"]
    sizes = [quantity(place["sizeLimit"]) for place in places if place.get("sizeLimit")]
    return sum(sizes) + ROOM if sizes else 0.0


def _check(run: Run) -> None:
    if not _DNS_LABEL.fullmatch(run.run) or len(run.run) > NAME_LIMIT:
        raise UsageError(f"`--name` is `{run.run}`, not a DNS label of at most {NAME_LIMIT} characters",
                         "use lower-case letters, digits and `-`")  # fmt: skip
    if not run.image:
        raise UsageError(
            "no image is set",
            f"give `--image REF@sha256:...`, or `image` in [{run.kind}] or `registry` at the top of dflash.toml",
        )
    for name, number in (("parallelism", run.parallelism), ("shards", run.completions)):
        if number < 1:
            raise UsageError(f"`--{name}` is {number}, not a number from 1 up")
    for name, text in run.env.items():
        check_variable(name, text)
    _check_names(run)
    _check_node(run.node)
    if run.kind == "train":
        _check_target(run.model, run.node)
    if run.kind == "tokenize" and run.node.gpus:
        raise UsageError(f"`gpus` is {run.node.gpus}: tokenize pods see no GPU", "use a profile without gpus")


def _check_names(run: Run) -> None:
    """Names of other objects, which the API server would refuse or never find."""
    claims = {f"volumes.{n}": v[4:] for n, v in run.node.volumes.items() if v.startswith("pvc:")}
    names = {"--queue": run.queue, "--s3-secret": run.s3_secret, "--service-account": run.service_account}
    for field_, name in {**names, "--namespace": run.namespace}.items():
        if name and (len(name) > 63 or not _SUBDOMAIN.fullmatch(name)):
            raise UsageError(f"`{field_}` is `{name}`, not the name of an object", "use a-z, 0-9, `-`, `.`")
    for field_, name in claims.items():
        if not _SUBDOMAIN.fullmatch(name):
            raise UsageError(f"`{field_}` is `pvc:{name}`, not `pvc:` and the name of a claim")
    if re.search(r"\s", run.image):
        raise UsageError(f"`--image` is `{run.image}`, not an image reference", "REF@sha256:...")


def _check_node(node: Node) -> None:
    """Sizes, labels and tolerations of a profile."""
    sizes = {"cpu": node.cpu, "memory": node.memory, "shm": node.shm}
    sizes = {name: value for name, value in sizes.items() if value}
    sizes |= {f"volumes.{n}": v for n, v in node.volumes.items() if not v.startswith("pvc:")}
    for name, value in sizes.items():
        if not _QUANTITY.fullmatch(value) or quantity(value) <= 0:
            raise UsageError(f"`{name}` is `{value}`, not a Kubernetes quantity such as 4, 500m or 16Gi")
    if node.gpus is not None and node.gpus < 0:
        raise UsageError(f"`gpus` is {node.gpus}, not a number from 0 up")
    for key, value in node.selector.items():
        if not isinstance(value, str):
            raise UsageError(f"`selector.{key}` is {value!r}, not a text", "write its value in quotes")
    for number, toleration in enumerate(node.tolerations):
        for key, value in toleration.items():
            known = _TOLERATION.get(key)
            fits = isinstance(value, known) if isinstance(known, type) else known is not None and value in known
            if not fits:
                raise UsageError(
                    f"`tolerations[{number}].{key}` is {value!r}",
                    f"known are {', '.join(_TOLERATION)} as in Kubernetes",
                )


def quantity(text: str) -> float:
    """A Kubernetes quantity in its base unit: `500m` -> 0.5, `2Gi` -> 2**31."""
    number = re.match(r"[0-9.]+", text)
    assert number is not None  # _QUANTITY has been matched
    unit = text[number.end() :]
    if unit == "m":
        return float(number.group()) / 1000
    power = "KMGTPE".find(unit[:1].upper()) + 1 if unit else 0
    step = 1024.0 if unit.endswith("i") else 1000.0
    return float(number.group()) * float(step**power)
