"""Raw access to a Kubernetes API: the client library for kubeconfig, TLS and tokens; plain dicts for everything else.

Pure code sees the same dicts from a cluster, a recording or a test, so nothing of the library's models is used (its
release 36 drops unknown fields silently and returns logs as the text "b'...'"). There is no watch: a list that is read
anew every two seconds cannot be stale, cannot end silently and needs no 410 handling (docs/decisions/001.md).
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

from dflashctl.errors import ApiError, CliError, PreflightError, UsageError

CONNECT_S = 5.0
READ_S = (5.0, 10.0, 20.0)  # of the tries of one question: a dead connection is found soon, a slow server is waited for
WRITE_S = 35.0  # admission webhooks may take thirty
LOG_READ_S = 60.0  # a followed log may be silent; then the stream is opened anew where it ended
PASSING = (429, 500, 502, 503, 504)  # answers that another try may mend
PATIENCE_S = 60.0  # how long an API server may be out of reach before a command gives up


class Refused(ApiError):
    """The API server answered with a Status: `status` is the HTTP code, `reason` its one word."""

    def __init__(self, status: int, reason: str, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.status = status
        self.reason = reason
        if status in (401, 403):  # as for a store: who may not ask has a preflight that failed
            self.code = PreflightError.code


def kubeconfig() -> tuple[str, dict[str, str]]:
    """(current context or "", context -> its namespace), read without the client: it is heavy, and nothing is sent."""
    import yaml

    current, found = "", dict[str, str]()
    for name in (os.environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")).split(os.pathsep):
        try:
            with open(name, encoding="utf-8") as file:
                value = yaml.safe_load(file) or {}
            current = current or str(value.get("current-context") or "")
            for entry in value.get("contexts") or []:
                found.setdefault(entry["name"], (entry.get("context") or {}).get("namespace") or "default")
        except FileNotFoundError:
            continue
        except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError):
            raise PreflightError(f"kubeconfig `{name}` cannot be read", "set KUBECONFIG to one that can") from None
    return current, found


class Api:
    """One context of a kubeconfig, or the pod's own service account."""

    def __init__(self, context: str | None = None, patience_s: float = PATIENCE_S) -> None:
        self._context = context
        self._patience_s = patience_s
        self.namespace = "default"
        self.context = ""
        self._load()

    def _load(self) -> None:
        from kubernetes import client, config  # heavy: only when a cluster is meant
        from kubernetes.config.config_exception import ConfigException

        settings = client.Configuration()
        settings.retries = False  # ours are the one place
        settings.connection_pool_maxsize = 256  # a followed log holds one; beyond the size each return is a warning
        try:
            # the library reads KUBECONFIG when it is imported; ours is read when it is used
            file = os.environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")
            contexts, active = config.list_kube_config_contexts(config_file=file)
            names = {c["name"]: c for c in contexts}
            name = self._context or active["name"]
            if name not in names:
                raise UsageError(f"context `{name}` is not in the kubeconfig", f"known are {', '.join(sorted(names))}")
            config.load_kube_config(config_file=file, context=name, client_configuration=settings)
            self.context = name
            self.namespace = names[name]["context"].get("namespace") or "default"
        except (ConfigException, TypeError) as error:
            if self._context:
                raise UsageError(f"context `{self._context}` cannot be used: {error}") from None
            try:
                config.load_incluster_config(client_configuration=settings)
                self.context = "in-cluster"
            except ConfigException:
                raise PreflightError(
                    "no kubeconfig context is set", "`kubectl config use-context NAME`, or --context"
                ) from None
        self._client = client.ApiClient(settings)

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """The object or list at `path`; raises Refused (404 included) or ApiError."""
        return self._json("GET", path, query)

    def find(self, path: str) -> dict[str, Any] | None:
        """The object at `path`, or None where there is none."""
        try:
            return self.get(path)
        except Refused as error:
            if error.status == 404:
                return None
            raise

    def items(self, path: str, **query: Any) -> list[dict[str, Any]]:
        """All items of a list, page by page, begun anew where a page has expired (410 Gone); each gets the kind that
        lists leave out.
        """
        found: list[dict[str, Any]] = []
        more = ""
        while True:
            try:
                page = self.get(path, **{"limit": 500, **query}, **({"continue": more} if more else {}))
            except Refused as error:
                if error.status != 410 or not more:
                    raise
                found, more = [], ""
                continue
            kind = str(page.get("kind", "")).removesuffix("List")
            found += [{"kind": kind, **item} for item in page.get("items") or []]
            more = (page.get("metadata") or {}).get("continue") or ""
            if not more:
                return found

    def create(self, path: str, body: Mapping[str, Any], dry_run: bool = False) -> dict[str, Any]:
        """POST with strict validation: a field the server does not know is an error, not a silent loss."""
        query = {"fieldValidation": "Strict", "fieldManager": "dflashctl"} | ({"dryRun": "All"} if dry_run else {})
        return self._json("POST", path, query, body)

    def patch(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A merge patch (RFC 7386)."""
        return self._json("PATCH", path, {"fieldManager": "dflashctl"}, body, "application/merge-patch+json")

    def delete(self, path: str, uid: str) -> None:
        """Foreground deletion of this very object: its pods go first; gone already is fine."""
        body = {"propagationPolicy": "Foreground", "preconditions": {"uid": uid}}
        try:
            self._json("DELETE", path, {}, body)
        except Refused as error:
            if error.status not in (404, 409):
                raise

    def lines(self, path: str, read_s: float = LOG_READ_S, **query: Any) -> Iterator[bytes]:
        """Lines of a log stream with their newline, which only the last one may lack. read_s: seconds of silence.

        Raises ConnectionError when there is no connection or it breaks off, Refused when there is no log (yet).
        """
        try:
            response = self._send("GET", path, query, None, None, (CONNECT_S, read_s), accept="*/*")
        except Exception as error:
            if isinstance(error, CliError) or not _passing(error):
                raise
            self._forget_connections()
            raise ConnectionError(_words(error)) from None
        pending = b""
        try:
            for chunk in response.stream(65536):
                *whole, pending = (pending + chunk).split(b"\n")
                yield from (line + b"\n" for line in whole)
        except Exception as error:  # urllib3's tree of broken streams and time-outs
            raise ConnectionError(str(error)) from None
        finally:
            response.close()
        if pending:
            yield pending

    def _json(
        self, method: str, path: str, query: Mapping[str, Any], body: Any = None, content: str | None = None
    ) -> dict[str, Any]:
        reads = iter(READ_S[:-1])

        def send() -> Any:
            read_s = next(reads, READ_S[-1]) if method == "GET" else WRITE_S
            return self._send(method, path, query, body, content, (CONNECT_S, read_s))

        response = self._retried(send)
        value: dict[str, Any] = json.loads(response)
        return value

    def _retried(self, send: Callable[[], Any]) -> bytes:
        """The body, through passing faults with jitter; a POST that went through answers 409 the second time."""
        end, pause = time.monotonic() + self._patience_s, 0.2
        while True:
            try:
                response = send()
                try:
                    data: bytes = response.read()
                finally:
                    response.close()
                return data
            except Refused as error:
                if error.status not in PASSING or time.monotonic() > end:
                    raise
            except Exception as error:
                if isinstance(error, CliError) or not _passing(error):
                    raise
                self._forget_connections()
                if time.monotonic() > end:
                    raise ApiError(f"the API server of context `{self.context}` does not answer: {_words(error)}",
                                   "the run goes on; ask again when it is back") from None  # fmt: skip
            time.sleep(random.uniform(pause / 2, pause))
            pause = min(pause * 2, 5.0)

    def _forget_connections(self) -> None:
        """Where one has died silently the idle ones have, too: each would cost its own time-out."""
        self._client.rest_client.pool_manager.clear()

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        body: Any,
        content: str | None,
        timeout: tuple[float, float],
        accept: str = "application/json",
        fresh: bool = False,
    ) -> Any:
        """One request, not read yet. A 401 loads the kubeconfig anew once: tokens expire while a command waits."""
        from kubernetes.client.exceptions import ApiException

        headers = {"Accept": accept, "Content-Type": content or "application/json"}
        parts = [(k, str(v).lower() if isinstance(v, bool) else v) for k, v in query.items()]
        try:
            return self._client.call_api(
                path + (f"?{urlencode(parts)}" if parts else ""),
                method,
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                _preload_content=False,
                _request_timeout=timeout,
            )
        except ApiException as error:
            if error.status == 401 and not fresh:
                self._load()
                return self._send(method, path, query, body, content, timeout, accept, fresh=True)
            raise _refused(error) from None


def _refused(error: Any) -> Refused:
    try:
        said = json.loads(error.body)
    except (TypeError, ValueError):
        said = {}
    said = said if isinstance(said, dict) else {}
    status = int(error.status or 0)
    message = str(said.get("message") or error.reason or f"HTTP {status}")
    hints = {
        401: "the credentials of this context are not accepted: log in again",
        403: "ask for the Role in k8s/base, or another --namespace",
    }
    return Refused(status, str(said.get("reason") or ""), message, hints.get(status, ""))


def _passing(error: Exception) -> bool:
    """Network faults, which urllib3 raises in a tree of its own."""
    return isinstance(error, OSError) or type(error).__module__.startswith("urllib3")


def _words(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error).splitlines()[0][:200]
