"""Where the pods of a run go: image, node profile and the other settings of a submit, resolved without asking anybody.

Pure. A run remembers them by name in its record of OUT, so that `resume` needs no flag again; what is set now wins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dflashctl.config import PLACE, Value
from dflashctl.errors import UsageError
from dflashctl.overrides import check_variable
from dflashctl.render import Node

IMAGES = {"tokenize": "dflash-tokenizer", "train": "dflash-trainer"}
_DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")


@dataclass(frozen=True)
class Place:
    """What submitting needs beside the Job itself."""

    image: str = ""
    node: Node = field(default_factory=Node)
    queue: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    s3_secret: str = ""
    service_account: str = ""
    sets: Sequence[str] = ()


@dataclass(frozen=True)
class Placing:
    """The settings of one invocation: `values` of [tokenize] or [train], all sections of the file, the registry."""

    values: Mapping[str, Value]
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    registry: str = ""

    def flags(self, last: Mapping[str, Any]) -> dict[str, Any]:
        """What is set, by name, of the next Job: whatever was said last, here or for the run's `last` Job.

        A flag is said now; a file or a variable is, where it differs from what it was then (kept as `settings`).
        """
        told = {k: v for k in PLACE if (v := self.values.get(k)) and v.origin != "default" and v.value}
        settings = {k: v.value for k, v in told.items() if not v.origin.startswith("--")}
        before = last.get("settings") or {}
        now = {k: v.value for k, v in told.items() if k not in settings or before.get(k) != v.value}
        for name, value in (now.get("env") or {}).items():  # kept in the run's record, whatever becomes of the Job
            check_variable(name, _text(name, value))
        return {k: last[k] for k in PLACE if last.get(k)} | now | {"settings": {**before, **settings}}

    def place(self, kind: str, flags: Mapping[str, Any]) -> Place:
        """Raises UsageError for a node profile that is not there or a variable that is no text."""
        profile = self.profile(str(flags.get("node") or ""))
        env = {name: _text(name, value) for name, value in (flags.get("env") or {}).items()}
        sizes = {key: value for key, value in profile.items() if key not in ("image", "split")}
        volumes = sizes.get("volumes") or {}
        for name, value in volumes.items():
            if not isinstance(value, str):
                raise UsageError(f"`volumes.{name}` is {value!r}, not a size such as 60Gi or pvc:CLAIM")
        return Place(
            image=str(flags.get("image") or profile.get("image") or self._of_registry(kind)),
            node=Node(**sizes),
            queue=str(flags.get("queue") or ""),
            env=env,
            s3_secret=str(flags.get("s3_secret") or ""),
            service_account=str(flags.get("service_account") or ""),
            sets=tuple(flags.get("set") or ()),
        )

    def profile(self, name: str) -> Mapping[str, Any]:
        """The keys of [node.NAME]; raises UsageError."""
        if not name:
            return {}
        found = self.sections.get(f"node.{name}")
        if found is None:
            known = [s.removeprefix("node.") for s in sorted(self.sections) if s.startswith("node.")]
            hint = f"known are {', '.join(known)}" if known else f"write a section [node.{name}] in dflash.toml"
            raise UsageError(f"`--node` {name!r} is no node profile", hint)
        return found

    def _of_registry(self, kind: str) -> str:
        return f"{self.registry.rstrip('/')}/{IMAGES[kind]}:{release()}" if self.registry else ""


def release() -> str:
    """The tag of images of this release."""
    try:
        return version("dflashctl")
    except PackageNotFoundError:
        return "latest"


def by_digest(image: str) -> bool:
    """Whether the reference can only ever mean one image."""
    return bool(_DIGEST.search(image))


def parse_env(pairs: Sequence[str]) -> dict[str, str]:
    """`["K=V", ...]` of --env; raises UsageError. A value is not repeated in messages: it may be a secret."""
    found = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise UsageError("`--env` is not NAME=VALUE", "repeat it for each variable")
        check_variable(name, value)
        found[name] = value
    return found


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"`env.{name}` is not a text", "write its value in quotes")
    return value
