"""A secret's value is nowhere: not in a manifest, an argv, a message, a bundle or what is kept here; by marker values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_fixtures import Done, ctl
from double.api import Double
from job_fixtures import write_corpus
from served import a_job, a_pod, put, silent, standing, write_kubeconfig
from vocab import tiny_dir

from dflashctl.errors import describe, redact, secrets_of

MARKER = "MARKER-of-a-secret-value"
KEYS = ["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "HF_TOKEN", "DB_PASSWORD", "my_api_key", "GIT_CREDENTIALS"]  # fmt: skip


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    """A folder from which `tokenize --dry-run=client` asks nobody."""
    write_corpus(tmp_path / "in", 1, 2)
    (tmp_path / "dflash.toml").write_text(
        'backend = "kube"\n[tokenize]\ninput = ["in"]\nout = "./out"\nshards = 1\nimage = "registry.example/i:1"\n'
        f'model = "{tiny_dir()}"\n'
    )
    write_kubeconfig(tmp_path / "kubeconfig", 9, token=MARKER)
    return tmp_path


def typed(cwd: Path, *args: str, **env: str) -> Done:
    """Nothing of what was typed may come back; DFLASH_BACKEND is what the file says."""
    return ctl(cwd, *args, **{"KUBECONFIG": str(cwd / "kubeconfig"), "DFLASH_BACKEND": "", **env})


def kept(cwd: Path) -> list[str]:
    """Files of the folder that hold the marker, the kubeconfig apart."""
    return [
        str(p) for p in cwd.rglob("*")
        if p.is_file() and p.name not in ("kubeconfig", "dflash.toml") and MARKER.encode() in p.read_bytes()
    ]  # fmt: skip


@pytest.mark.parametrize("verb", ["tokenize", "resume"])
@pytest.mark.parametrize("key", KEYS)
def test_a_secret_variable_is_refused_by_name_with_the_remedy(key: str, verb: str, cwd: Path) -> None:
    refused = typed(cwd, verb, "--env", f"{key}={MARKER}")
    assert refused.code == 2 and f"--env {key}" in refused.err and "--s3-secret" in refused.err
    assert MARKER not in refused.out + refused.err and kept(cwd) == []


@pytest.mark.parametrize("backend", ["kube", "local"])
def test_by_whatever_way_it_would_get_into_a_job(backend: str, cwd: Path) -> None:
    text = (cwd / "dflash.toml").read_text()
    ways: list[tuple[list[str], dict[str, str], str]] = [
        (["--env", f"HARMLESS={MARKER}"], {"AWS_SECRET_ACCESS_KEY": MARKER}, text),
        (["--env", "PROXY=http://me:" + MARKER + "@host"], {}, text),
        (["--set", f"metadata.labels.x={MARKER}"], {"HF_TOKEN": MARKER}, text),
        (
            ["--set", f"spec.template.spec.containers.0.env=[{{name: AWS_SECRET_ACCESS_KEY, value: {MARKER}}}]"],
            {},
            text,
        ),
        ([], {"DFLASH_TOKENIZE_ENV": json.dumps({"AWS_SECRET_ACCESS_KEY": MARKER})}, text),
        ([], {"DFLASH_TOKENIZE_ENV": f"AWS_SECRET_ACCESS_KEY={MARKER}"}, text),
        ([], {}, text + f'[tokenize.env]\nAWS_SECRET_ACCESS_KEY = "{MARKER}"\n'),
        ([], {}, text + f'env = "AWS_SECRET_ACCESS_KEY={MARKER}"\n'),
        (["--out", f"s3://key:{MARKER}@bucket/out"], {}, text),
        (["--model", f"s3://key:{MARKER}@bucket/model"], {}, text),
    ]
    for flags, env, file in ways:
        (cwd / "dflash.toml").write_text(file)
        refused = typed(cwd, "tokenize", "--backend", backend, "--dry-run=client", *flags, **env)
        assert MARKER not in refused.out + refused.err, (flags, env)
        if backend == "kube":
            assert refused.code == 2, (flags, env, refused.err)
    assert kept(cwd) == []


def test_a_secret_by_name_is_the_only_way(cwd: Path) -> None:
    shown = typed(cwd, "tokenize", "--dry-run=client", "--s3-secret", "s3-credentials", AWS_SECRET_ACCESS_KEY=MARKER)
    assert shown.code == 0 and "name: s3-credentials" in shown.out, shown.err
    assert MARKER not in shown.out + shown.err and kept(cwd) == []


@pytest.mark.parametrize("token", [MARKER, f"{MARKER}\n", f"{MARKER}\n{MARKER}", f"Bearer {MARKER}\u20ac"])
def test_the_token_of_a_kubeconfig_is_never_said(token: str, cwd: Path) -> None:
    with standing(Double(cwd, namespace="default")) as double:
        write_kubeconfig(cwd / "kubeconfig", double.server.server_address[1], token=token)
        for verb in (["ls"], ["status", "run"], ["wait", "run"], ["logs", "run", "-f"], ["tokenize"]):
            said = typed(cwd, *verb)
            assert said.code in (1, 4) and MARKER not in said.out + said.err, (verb, said.err)
            assert "Traceback" not in said.err
    assert kept(cwd) == []


def test_a_bundle_and_a_crash_hide_what_the_environment_holds(cwd: Path) -> None:
    with standing(Double(cwd, namespace="default")) as double:
        job = a_job("run", str(cwd / "out"), active=1)
        job["metadata"]["annotations"]["note"] = MARKER
        put(double, "jobs", job)
        pod = a_pod(job, 0, "Failed", containerStatuses=[
            {"name": "tokenizer", "state": {"terminated": {"exitCode": 78, "message": f'{{"message": "{MARKER}"}}'}}}
        ])  # fmt: skip
        put(double, "pods", pod)
        found = typed(cwd, "why", "run", "--bundle", KUBECONFIG=str(double.kubeconfig), AWS_SECRET_ACCESS_KEY=MARKER)
    bundle = (cwd / "run-bundle.json").read_text()
    assert found.code == 0 and MARKER not in bundle and "[hidden]" in bundle
    assert double.cluster.token not in bundle


def test_messages_and_quoted_headers_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", MARKER)
    assert secrets_of({"AWS_ACCESS_KEY_ID": MARKER, "AWS_ACCESS_KEY_ID_FILE": "/run/a-file"}) == [MARKER]
    _, message, _ = describe(ValueError(f"Invalid header value b'Bearer {MARKER}-2\\nmore' and {MARKER}"))
    assert MARKER not in message and "-2" not in message
    assert redact("authorization: Bearer abc.def-ghi", []) == "authorization: Bearer [hidden]"


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--set", "spec.nope=1"], "spec.nope"),
        (["--image", "a b"], "--image"),
        (["--name", "Not_a_name"], "--name"),
        (["--parallelism", "0"], "--parallelism"),
        (["--env", f"HF_TOKEN={MARKER}"], "HF_TOKEN"),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run=server"]], ids=["run", "server"])
def test_what_cannot_be_is_refused_before_anything_is_sent(
    flags: list[str], dry: list[str], field: str, cwd: Path
) -> None:
    with silent() as server:
        write_kubeconfig(cwd / "kubeconfig", server.port)
        s3 = {
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{server.port}",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
        }
        refused = typed(cwd, "tokenize", "s3://b/in", "--out", "s3://b/out", *flags, *dry, **s3)
        assert refused.code == 2 and field in refused.err, refused.err
        assert not server.asked.is_set()


def test_no_argv_of_a_child_holds_it(cwd: Path) -> None:
    """What other users of this machine can read of a command that waits."""
    from served import Typed

    with silent() as server:
        write_kubeconfig(cwd / "kubeconfig", server.port, token=MARKER)
        process = Typed(cwd, "wait", KUBECONFIG=str(cwd / "kubeconfig"), AWS_SECRET_ACCESS_KEY=MARKER)
        assert server.asked.wait(60)
        argv = Path(f"/proc/{process.process.pid}/cmdline").read_bytes()
        process.interrupt()
    assert MARKER.encode() not in argv and MARKER not in process.out + process.err
