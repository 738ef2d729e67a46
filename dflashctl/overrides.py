"""What a user may put into a Job by hand, `--env` and `--set`: checked by name, so that nothing is refused later.

A secret never stands in a manifest, under whatever name or by whatever way it would get there. A field is set only
where it stands in the Job, or where Kubernetes knows it as optional, with a value of its kind; fields that the renderer
and the run's own records depend on have flags of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from dflashctl.errors import UsageError

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: An environment variable of such a name would put a secret in the manifest: it belongs in a Secret.
_SECRET_NAME = re.compile(
    r"(?:SECRET|TOKEN(?![A-Z])|PASSWORD|PASSWD|CREDENTIAL|ACCESS_?KEY|API_?KEY|PRIVATE_?KEY)(?!.*(?:FILE|PATH|URI)$)",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(r"://[^/\s@:]+:[^/\s@]+@|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")
_REMEDY = "make a Secret of it and name that with `--s3-secret`"
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([KMGTPE]i?|[mkMGTPE])?")

_FREE_MAPS = frozenset({"labels", "annotations", "nodeSelector", "limits", "requests"})
#: Optional fields that --set may add, and their kind; every other path must already stand in the Job.
_OPTIONAL: Mapping[str, type] = {
    "spec.suspend": bool,
    "spec.activeDeadlineSeconds": int,
    "spec.template.spec.activeDeadlineSeconds": int,
    "spec.template.spec.affinity": dict,
    "spec.template.spec.dnsPolicy": str,
    "spec.template.spec.hostNetwork": bool,
    "spec.template.spec.imagePullSecrets": list,
    "spec.template.spec.nodeName": str,
    "spec.template.spec.priorityClassName": str,
    "spec.template.spec.runtimeClassName": str,
    "spec.template.spec.schedulerName": str,
    "spec.template.spec.shareProcessNamespace": bool,
    "spec.template.spec.tolerations": list,
    "spec.template.spec.containers.0.imagePullPolicy": str,
}
#: Fields that more than the Job depends on -> what sets them.
_OWNED = {
    "apiVersion": "it is the base Job's",
    "kind": "it is the base Job's",
    "metadata.name": "it comes from `--name`",
    "metadata.namespace": "it comes from `--namespace`",
    "spec.completionMode": "the plan's indexes need it",
    "spec.completions": "it comes from `--shards`",
    "spec.parallelism": "it comes from `--parallelism`",
    "spec.template.spec.restartPolicy": "the policy for failed pods needs it",
}
_KINDS = {bool: "true or false", int: "a whole number from 0 up", str: "a text", list: "a list", dict: "a mapping"}


def check_variable(name: str, text: str) -> None:
    """Raises UsageError, which does not repeat the value, for a variable that cannot be or that holds a secret."""
    if not _ENV_NAME.fullmatch(name):
        raise UsageError(f"`--env {name}` is no variable name")
    if _SECRET_NAME.search(name) or _SECRET_VALUE.search(text):
        raise UsageError(f"`--env {name}` would put a secret in the manifest", _REMEDY)


def refuse_values(job: Mapping[str, Any], secrets: Sequence[str]) -> None:
    """Raises UsageError that names the field where a Job holds one of these values; it does not repeat the value."""
    for path, text in _texts(job, ()):
        if any(secret in text for secret in secrets):
            field = ".".join(path)
            raise UsageError(f"`{field}` of the Job would hold the value of a secret of this environment", _REMEDY)


def _texts(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every text below `value` with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping | list):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _texts(part, (*path, str(key)))


def assign(job: dict[str, Any], assignments: Sequence[str]) -> None:
    """Each `a.b.0.c=value` of `--set` on the Job; raises UsageError that names the field."""
    for assignment in assignments:
        path, sign, text = assignment.partition("=")
        if not sign or not path:
            raise UsageError(f"`--set {path}` is not FIELD=VALUE")
        if path in _OWNED or "dflashctl/" in path or "app.kubernetes.io/" in path:
            raise UsageError(f"`--set {path}` may not be set", _OWNED.get(path, "the run is found again by it"))
        _assign(job, path, text)
    for container in job["spec"]["template"]["spec"]["containers"] if assignments else ():
        for entry in container["env"]:
            if "value" in entry:
                check_variable(str(entry.get("name")), str(entry["value"]))


def _assign(job: dict[str, Any], path: str, text: str) -> None:
    """On a field that stands in the Job, or that Kubernetes knows as optional."""
    parts, at = path.split("."), job
    for i, part in enumerate(parts):
        last, here = i == len(parts) - 1, ".".join(parts[: i + 1])
        if isinstance(at, list):
            if not part.isdigit() or int(part) >= len(at):
                raise UsageError(f"`--set {path}`: there is no `{here}`")
            if last:
                at[int(part)] = _value(path, part, text, type(at[int(part)]))
            else:
                at = at[int(part)]
            continue
        free = i > 0 and parts[i - 1] in _FREE_MAPS
        if not isinstance(at, dict) or (
            part not in at and not free and here not in _OPTIONAL and part not in _FREE_MAPS
        ):
            raise UsageError(f"`--set {path}`: `{here}` is not a field of the Job")
        if free:
            # a label's own name holds dots: the rest of the path is one key
            if parts[i - 1] in ("limits", "requests") and not _QUANTITY.fullmatch(text):
                raise UsageError(f"`--set {path}` is `{text}`, not a Kubernetes quantity such as 4, 500m or 16Gi")
            at[".".join(parts[i:])] = text
            return
        if last:
            at[part] = _value(path, part, text, type(at[part]) if part in at else _OPTIONAL.get(here, dict))
            return
        at = at.setdefault(part, {}) if part in _FREE_MAPS else at[part]


def _value(path: str, key: str, text: str, kind: type) -> Any:
    """The value of `text` where one of that kind stands; a text stays as it was typed, YAML gives the others."""
    if kind is str:
        if key == "sizeLimit" and not _QUANTITY.fullmatch(text):
            raise UsageError(f"`--set {path}` is `{text}`, not a Kubernetes quantity such as 16Gi")
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UsageError(f"`--set {path}` is not {_KINDS[kind]}") from None
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise UsageError(f"`--set {path}` is `{text}`, not {_KINDS[kind]}")
    return value
