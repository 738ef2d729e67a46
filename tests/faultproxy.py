"""An HTTP proxy in front of a real S3 server that fails on purpose, driven by a Python object in the test process.

    with FaultProxy(server.endpoint, seed=1) as proxy:
        proxy.fail = 0.1                  # every tenth request fails, in one of the ways of KINDS
        proxy.plan("cut:3000000", 2)      # the next two GETs of objects: the body is cut after so many bytes
        ... endpoint = proxy.endpoint; proxy.requests, proxy.faults say what happened

Requests keep their Host header, so signatures stay valid. Which requests fail depends on the seed and on their order.
"""

from __future__ import annotations

import collections
import contextlib
import random
import re
import socket
import socketserver
import ssl
import struct
import threading
import time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

# slowdown, error (and denied, on request alone): an answer in place of the server's; reset: the request does not
# reach it; lost: it does, the answer does not come back; cut[:N]: the body breaks off, after N bytes or half way.
KINDS = ("slowdown", "error", "reset", "lost", "cut")
ANSWERS = {"slowdown": (503, "SlowDown"), "error": (500, "InternalError"), "denied": (403, "AccessDenied")}


class Request(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    body_start: bytes


class FaultProxy:
    """Attributes may be changed at any time: fail (0..1), kinds, latency (s), rate (bytes/s), down."""

    def __init__(self, upstream: str, seed: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self.fail, self.kinds, self.latency, self.rate, self.down = 0.0, KINDS, 0.0, 0.0, False
        self.requests: list[Request] = []
        self.faults: collections.Counter[str] = collections.Counter()
        self._upstream = (urlsplit(upstream).hostname or "", urlsplit(upstream).port or 80)
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._planned: list[tuple[str, re.Pattern[str]]] = []
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, _Closed):
                    client = tls.wrap_socket(self.request, server_side=True) if tls else self.request
                    with client:
                        proxy._serve(client)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            request_queue_size = 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def plan(self, fault: str, times: int = 1, match: str = r"GET /[^/?]+/[^?]+") -> None:
        """The next `times` requests whose "METHOD /path" fits the pattern fail so, whatever `fail` says."""
        with self._lock:
            self._planned += [(fault, re.compile(match))] * times

    def reset(self) -> None:
        """Back to faultless; forget what was seen."""
        self.fail, self.kinds, self.latency, self.rate, self.down = 0.0, KINDS, 0.0, 0.0, False
        self.requests, self._planned = [], []
        self.faults = collections.Counter()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _decide(self, request: Request) -> str | None:
        with self._lock:
            self.requests.append(request)
            line = f"{request.method} {request.path}"
            planned = next((plan for plan in self._planned if plan[1].match(line)), None)
            if planned:
                self._planned.remove(planned)
                fault = planned[0]
            elif self._random.random() < self.fail:
                fault = self._random.choice(self.kinds)
            else:
                return None
            self.faults[fault.split(":")[0]] += 1
            return fault

    def _serve(self, client: socket.socket) -> None:
        """Requests of one connection, one after the other; a fault ends the connection."""
        with contextlib.ExitStack() as stack:
            server = _Wire(stack.enter_context(socket.create_connection(self._upstream)))
            wire = _Wire(client)
            while True:
                head = wire.head()
                if self.down:
                    return _abort(client)
                lines = head.decode("latin-1").split("\r\n")
                method, path, _ = lines[0].split(" ", 2)
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)}
                if headers.get("expect", "").lower() == "100-continue":
                    client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                    head = re.sub(rb"(?i)\r\nexpect:[^\r]*", b"", head)
                body = b"".join(wire.body(headers))
                fault = self._decide(Request(method, path, headers, body[:200]))
                time.sleep(self.latency)
                if fault in ANSWERS:
                    return _answer(client, *ANSWERS[fault])
                if fault == "reset":
                    return _abort(client)
                server.sock.sendall(head + body)
                reply = server.head()
                fields = {
                    k.lower(): v.strip()
                    for k, _, v in (line.partition(":") for line in reply.decode("latin-1").split("\r\n")[1:] if line)
                }
                bodiless = method == "HEAD" or reply.split(b" ")[1] in (b"204", b"304")
                if fault == "lost":
                    for _ in () if bodiless else server.body(fields):
                        pass
                    return _abort(client)
                client.sendall(reply)
                left = None
                if fault and fault.startswith("cut"):
                    left = int(fault[4:] or int(fields.get("content-length", "0")) // 2)
                for data in () if bodiless else server.body(fields):
                    if self.rate:
                        time.sleep(len(data) / self.rate)
                    if left is not None and len(data) >= left:
                        client.sendall(data[:left])
                        return
                    left = left if left is None else left - len(data)
                    client.sendall(data)
                if left is not None:
                    return _abort(client)


class _Closed(Exception):
    """The peer closed the connection."""


class _Wire:
    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.buffer = sock, b""

    def _more(self) -> None:
        data = self.sock.recv(65536)
        if not data:
            raise _Closed
        self.buffer += data

    def head(self) -> bytes:
        while b"\r\n\r\n" not in self.buffer:
            self._more()
        head, _, self.buffer = self.buffer.partition(b"\r\n\r\n")
        return head + b"\r\n\r\n"

    def body(self, headers: dict[str, str]) -> Any:
        """Pieces of the body as sent; chunked bodies keep their framing (both ends speak the same)."""
        if "chunked" in headers.get("transfer-encoding", ""):
            while True:
                while b"\r\n" not in self.buffer:
                    self._more()
                line, _, self.buffer = self.buffer.partition(b"\r\n")
                size = int(line.split(b";")[0], 16)
                yield line + b"\r\n"
                yield from self._exactly(size + 2)
                if size == 0:
                    return
        else:
            yield from self._exactly(int(headers.get("content-length", "0")))

    def _exactly(self, size: int) -> Any:
        while size:
            if not self.buffer:
                self._more()
            data, self.buffer = self.buffer[:size], self.buffer[size:]
            size -= len(data)
            yield data


def _abort(sock: socket.socket) -> None:
    """Close with a reset instead of an orderly end."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def _answer(sock: socket.socket, status: int, code: str) -> None:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>on purpose</Message></Error>".encode()
    head = f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: "
    sock.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
