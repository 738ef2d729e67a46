"""Logs of many pods through HTTP: each line once and whole, whatever happens to streams, tokens and the API server."""

from __future__ import annotations

import subprocess

import pytest
import yaml
from cluster_fixtures import *  # noqa: F403
from cluster_fixtures import Site

pytestmark = pytest.mark.s3

CHATTER = """
import sys, time
for i in range(300):
    text = f"line {i} \\u00fc\\u6f22\\U0001f600".encode()
    sys.stdout.buffer.write(text[:-2]); sys.stdout.buffer.flush()
    sys.stdout.buffer.write(text[-2:] + b"\\n"); sys.stdout.buffer.flush()
    time.sleep(0.01)
sys.stdout.buffer.write(b"7\\nlast without newline"); sys.stdout.buffer.flush()
"""


def chatter(site: Site, name: str, indexes: int) -> None:
    """A Job that prints 302 lines a pod, labelled as a run of ours."""
    [job] = yaml.safe_load_all(
        site.ctl(
            site.settings(input=["s3://x/in"], out="s3://x/out", shards=indexes), "tokenize", "--name", name, "--parallelism",
            str(indexes), "--dry-run=client",
        ).out
    )  # fmt: skip
    container = job["spec"]["template"]["spec"]["containers"][0]
    container |= {"command": ["python", "-c", CHATTER], "args": []}
    site.api.create(site.jobs, job)


def test_every_line_of_many_pods_once_and_whole(site: Site) -> None:
    chatter(site, "chatter", 8)
    cwd = site.settings(input=["s3://x/in"], out="/nonexistent/out")
    followed = site.ctl(cwd, "logs", "chatter", "-f")
    wanted = [f"line {i} \u00fc\u6f22\U0001f600" for i in range(300)] + ["7", "last without newline"]
    assert followed.code == 0, followed.err
    for index in range(8):
        mine = [line.partition("] ")[2] for line in followed.out.splitlines() if line.startswith(f"[{index}] ")]
        assert mine == wanted
    some = site.ctl(cwd, "logs", "chatter", "--index", "2,5-6", "--grep", "line 7 ")
    assert [line[:3] for line in some.out.splitlines()] == ["[2]", "[5]", "[6]"]
    assert site.ctl(cwd, "logs", "chatter", "--index", "2").out.splitlines() == wanted


@pytest.mark.parametrize("fault", ["cut", "rotated", "token", "unavailable"])
def test_no_line_is_lost_or_doubled_by(site: Site, fault: str) -> None:
    double = site.needs_double("cut a stream, rotate a log, expire a token or be unavailable")
    name = f"faulty-{fault}"
    chatter(site, name, 1)
    argv, env = site.command("logs", name, "-f")
    cwd = site.settings(input=["s3://x/in"], out="/nonexistent/out")
    process = subprocess.Popen(argv, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(20)]
    if fault == "cut":
        double.cluster.cut_logs_after = 0
    elif fault == "rotated":
        double.cluster.end_logs_after = 0
    elif fault == "token":
        double.rotate_token()
    else:
        double.cluster.refuse = [503] * 5 + [429, 500]
    rest = process.stdout.read()  # not communicate(): it would pass by what readline() has buffered
    _, err = process.communicate(timeout=60)
    got = [line.rstrip("\n").partition("] ")[2] for line in [*lines, *rest.splitlines()]]
    assert process.returncode == 0, err
    assert got == [f"line {i} \u00fc\u6f22\U0001f600" for i in range(300)] + ["7", "last without newline"]


def test_an_expired_token_that_nobody_renews_ends_with_a_hint(site: Site) -> None:
    double = site.needs_double("expire a token")
    cwd = site.settings(input=["in"], out="out")
    token = double.cluster.token
    double.rotate_token(renew=False)
    try:
        refused = site.ctl(cwd, "ls")
    finally:
        double.cluster.token = token
    assert refused.code == 4 and "log in" in refused.err and token not in refused.err


def test_odd_words_of_a_server_are_printed_as_they_are(site: Site) -> None:
    cwd = site.settings(input=["in"], out="out")
    refused = site.ctl(cwd, "status", "index [3] of s3:b/k[/x] failed, taps [1, 16]")
    assert refused.code != 0 and "[3] of s3:b/k[/x] failed, taps [1, 16]" in refused.err
