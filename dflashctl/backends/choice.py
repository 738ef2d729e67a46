"""Which backend a command means: flag, environment, dflash.toml; else the kubeconfig's cluster, else this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflashctl.backends.base import BACKENDS, Backend
from dflashctl.config import Settings
from dflashctl.errors import UsageError

if TYPE_CHECKING:
    from dflashctl.backends.cluster import KubeBackend


def choose(settings: Settings, kind: str, flags: Mapping[str, Any]) -> Backend:
    """Asks nobody but the kubeconfig; raises UsageError for a backend or a context that is not known."""
    from dflashctl.backends.kube import kubeconfig

    top = settings.section("")
    name = top["backend"].value or ("kube" if top["context"].value or kubeconfig()[0] else "local")
    if name == "local":
        from dflashctl.backends.local import LocalBackend

        return LocalBackend.here()
    if name == "kube":
        return cluster(settings, kind, flags)
    raise UsageError(f"backend {name!r} ({top['backend'].origin}) is not known", f"known are {', '.join(BACKENDS)}")


def cluster(settings: Settings, kind: str, flags: Mapping[str, Any]) -> KubeBackend:
    """The cluster that is meant, not connected yet. `kind`: the section that says where its pods go."""
    from dflashctl.backends.cluster import KubeBackend
    from dflashctl.backends.kube import Api, kubeconfig
    from dflashctl.place import Placing

    top = settings.section("")
    current, known = kubeconfig()
    context = str(top["context"].value or current)
    if context not in known and (context or known):
        hint = f"known are {', '.join(sorted(known))}" if known else "the kubeconfig has none"
        raise UsageError(f"context `{context}` ({top['context'].origin}) is not in the kubeconfig", hint)
    namespace = str(top["namespace"].value or known.get(context) or "default")
    placing = Placing(settings.section(kind, flags), settings.sections, str(top["registry"].value or ""))
    return KubeBackend(lambda: Api(context or None), context, namespace, placing, Path.cwd() / ".dflash" / "kube")
