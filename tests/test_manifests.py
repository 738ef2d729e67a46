"""The YAML in k8s/ as people read and apply it: valid as it stands, least privilege, overlays that build."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

VERSIONS = ("1.33", "1.37")


def documents(path: Path) -> list[dict[str, Any]]:
    return [d for d in yaml.safe_load_all(path.read_text()) if d]


def test_the_base_is_valid_and_restricted(root: Path) -> None:
    found = {}
    for path in sorted((root / "k8s" / "base").glob("*.yaml")):
        if path.name == "kustomization.yaml":
            continue
        for document in documents(path):
            found[document["kind"], document["metadata"]["name"]] = document
            for version in VERSIONS:
                kubernetes_validate.validate(document, version, strict=True)
    [namespace] = [d for (kind, _), d in found.items() if kind == "Namespace"]
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    accounts = {name for kind, name in found if kind == "ServiceAccount"}
    assert accounts == {"dflash-tokenize", "dflash-train"}
    assert all(not d["automountServiceAccountToken"] for (kind, _), d in found.items() if kind == "ServiceAccount")


def test_the_role_allows_what_is_asked_for_and_nothing_else(root: Path) -> None:
    [role] = documents(root / "k8s" / "base" / "role.yaml")
    allowed = {r: set(rule["verbs"]) for rule in role["rules"] for r in rule["resources"]}
    assert set(allowed) == {"jobs", "pods", "pods/log", "events", "workloads", "localqueues/pendingworkloads"}
    assert not [verb for verbs in allowed.values() for verb in verbs if verb in ("*", "deletecollection", "escalate")]
    assert "secrets" not in allowed and allowed["pods"] <= {"get", "list", "watch"} and allowed["pods/log"] == {"get"}


def test_the_jobs_use_the_accounts_of_the_base(root: Path) -> None:
    for kind in ("tokenize", "train"):
        [job] = documents(root / "k8s" / "jobs" / f"{kind}.yaml")
        assert job["spec"]["template"]["spec"]["serviceAccountName"] == f"dflash-{kind}"


@pytest.mark.parametrize("overlay", ["base", "jobs", "overlays/b200", "overlays/kueue"])
def test_kustomize_builds_valid_manifests(overlay: str, root: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl here: kustomize is not run")
    done = subprocess.run(
        [kubectl, "kustomize", str(root / "k8s" / overlay)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    built = [d for d in yaml.safe_load_all(done.stdout) if d]
    for document in built:
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
    jobs = {d["metadata"]["name"]: d for d in built if d["kind"] == "Job"}
    if overlay == "overlays/b200":
        assert jobs["train"]["spec"]["template"]["spec"]["nodeSelector"]
        assert "nodeSelector" not in jobs["tokenize"]["spec"]["template"]["spec"]
    if overlay == "overlays/kueue":
        assert all(j["spec"]["suspend"] and j["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] for j in jobs.values())
