"""Fixtures around one embedded S3 server per test session; conftest imports them, so every test has them.

s3_server: the server. s3: a fresh bucket, with the environment set so that every client and child process finds it.
s3_faults: the same bucket behind a FaultProxy. Mark the tests `s3`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from faultproxy import FaultProxy

from dflashctl.embedded import EmbeddedS3

__all__ = ["s3", "s3_faults", "s3_proxy", "s3_server"]
_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedS3]:
    with EmbeddedS3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def s3_proxy(s3_server: EmbeddedS3) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.endpoint, seed=20) as proxy:
        yield proxy


@pytest.fixture
def s3(s3_server: EmbeddedS3, monkeypatch: pytest.MonkeyPatch) -> str:
    """`s3://bucket` of an empty bucket of this test alone."""
    from tokenizer import s3 as module

    for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    for name, value in s3_server.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module, "_connections", {})  # clients are kept by process: not across environments
    bucket = f"test-{next(_numbers)}"
    s3_server.create_bucket(bucket)
    return f"s3://{bucket}"


@pytest.fixture
def s3_faults(s3: str, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """The proxy that clients now go through; use together with `s3`."""
    s3_proxy.reset()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_proxy.endpoint)
    yield s3_proxy
    s3_proxy.reset()
