"""A real S3 server on this machine for the demo and the tests: SeaweedFS, from the optional extra `s3`.

    with EmbeddedS3(directory, buckets=["raw", "out"]) as server:
        subprocess.run([...], env={**os.environ, **server.env()})

    python -m dflashctl.embedded DIRECTORY --bucket raw --bucket out -- COMMAND ARG...

It listens on free ports of the loopback interface alone, with credentials made for this start. A directory is for one
start: the server's own records name its ports.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

LISTENERS = ("s3", "master", "filer", "volume", "admin")  # each has a port, and one for gRPC
READY_SECONDS = 60.0
BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


class EmbeddedError(Exception):
    """The server is not installed or did not start, or cannot have such a bucket."""


def find_server() -> str | None:
    """Path of the `weed` program of this environment, or on PATH; None without the extra."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


class EmbeddedS3:
    """A running server; `stop()` or the end of a `with` block ends it. Its log is `directory`/server.log."""

    def __init__(self, directory: str | os.PathLike[str], buckets: Sequence[str] = ()) -> None:
        program = find_server()
        if program is None:
            raise EmbeddedError("the embedded S3 server is not installed\nhint: pip install 'dflashctl[s3]'")
        self.directory = Path(directory)
        self.access_key = f"dflash-{secrets.token_hex(4)}"
        self.secret_key = secrets.token_hex(16)
        ports = _free_ports(2 * len(LISTENERS))
        self.endpoint = f"http://127.0.0.1:{ports[0]}"
        self.filer = f"http://127.0.0.1:{ports[4]}"
        (self.directory / "data").mkdir(parents=True, exist_ok=True)
        flags = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-webdav=false", "-admin.ui=false", "-master.telemetry=false"]
        flags += [
            "-filer.saveToFilerLimit=65536",
            "-volume.max=4096",  # every bucket takes some; by default their number follows from the free disk space
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.autoCreateBucket=false",
        ]
        for name, port, grpc in zip(LISTENERS, ports[::2], ports[1::2], strict=True):
            flags += [f"-{name}.port={port}", f"-{name}.port.grpc={grpc}"]
        with (self.directory / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [program, "-logtostderr=true", "mini", f"-dir={self.directory / 'data'}", *flags],
                env={**os.environ, **self._credentials(), "GOMEMLIMIT": "200MiB"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C meant for the client must not end its store first
            )
        try:
            self._wait_ready()
            for bucket in buckets:
                self.create_bucket(bucket)
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def env(self) -> dict[str, str]:
        """What an S3 client needs to find it."""
        return {**self._credentials(), "AWS_ENDPOINT_URL_S3": self.endpoint, "AWS_REGION": "us-east-1"}

    def create_bucket(self, name: str) -> None:
        """Through the server's own file interface, which needs no signature; one that exists is fine.

        Raises EmbeddedError for a name that is none: the server takes it, and then lists nothing below it.
        """
        if not BUCKET.fullmatch(name):
            raise EmbeddedError(f"`{name}` is no bucket name: 3 to 63 small letters, digits, dots and hyphens")
        try:
            self._filer_request("POST", f"/buckets/{name}/")
        except urllib.error.HTTPError as error:
            if error.code != 409:
                raise

    def stop(self) -> None:
        """End the server; the data stay."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> EmbeddedS3:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _credentials(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}

    def _filer_request(self, method: str, path: str, data: bytes | None = None) -> None:
        request = urllib.request.Request(self.filer + path, method=method, data=data)
        with urllib.request.urlopen(request, timeout=10) as answer:
            answer.read()

    def _wait_ready(self) -> None:
        """Until a file can be stored and the S3 side asks for a signature."""
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self._filer_request("PUT", "/ready", b"x")
                with urllib.request.urlopen(self.endpoint, timeout=10):
                    return
            except urllib.error.HTTPError as error:
                if error.code == 403:
                    return
            except OSError:
                pass
            time.sleep(0.05)
        raise EmbeddedError(f"the embedded S3 server did not start\nhint: see {self.directory / 'server.log'}")


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command with a server beside it; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m dflashctl.embedded", description=main.__doc__)
    parser.add_argument("directory", nargs="?", help="where the server keeps its data (default: a temporary folder)")
    parser.add_argument("--bucket", action="append", default=[], help="create this bucket; may be repeated")
    arguments = list(sys.argv[1:] if argv is None else argv)
    own, command = arguments, []
    if "--" in arguments:
        cut = arguments.index("--")
        own, command = arguments[:cut], arguments[cut + 1 :]
    args = parser.parse_args(own)
    if not command:
        parser.error("name a command after --")
    with tempfile.TemporaryDirectory(prefix="dflash-s3-") as temporary:
        try:
            with EmbeddedS3(args.directory or temporary, args.bucket) as server:
                return subprocess.run(command, env={**os.environ, **server.env()}, check=False).returncode
        except EmbeddedError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
