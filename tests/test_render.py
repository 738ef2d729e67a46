"""Manifests: golden files, strict validation against the oldest and newest schema, refusals by field name."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import kubernetes_validate
import pytest
import yaml

from dflashctl.errors import UsageError
from dflashctl.overrides import refuse_values
from dflashctl.render import FAIL_INDEX, FAIL_JOB, Node, Run, base, max_failed_indexes, quantity, render, to_yaml
from tokenizer.job import Exit

IMAGE = "registry.example/dflash/tokenizer@sha256:" + "a" * 64
TOKENIZE = Run(
    kind="tokenize", run="tok-qwen-0a1b2c3d", job="tok-qwen-0a1b2c3d-r2", namespace="dflash", image=IMAGE,
    argv=["--contract", "1", "--out", "s3://b/out"], node=Node(), model="Qwen/Qwen3.6-27B", spec_sha256="c0ffee",
    completions=64, parallelism=64,
)  # fmt: skip
B200 = Node(
    cpu="64", memory="512Gi", gpus=7, shm="64Gi", selector={"node.example/type": "b200"},
    tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    volumes={"model": "60Gi", "data": "12Gi", "checkpoints": "24Gi", "cache": "pvc:caches"},
)  # fmt: skip
TRAIN = dataclasses.replace(TOKENIZE, kind="train", run="trn-qwen-0a1b2c3d", job="trn-qwen-0a1b2c3d", node=B200,
                            model="s3://models/Qwen3.6-27B",
                            argv=["--split", "4+3"], completions=1, parallelism=1, queue="gpu")  # fmt: skip
RUNS = {"tokenize": TOKENIZE, "train": TRAIN}


def rendered(run):
    return render(base(run.kind), run)


@pytest.mark.parametrize("kind", RUNS)
def test_golden(kind, root):
    """A change of a manifest is a change somebody reads: DFLASH_GOLDEN=1 writes the files anew."""
    golden, text = root / "tests" / "golden" / f"{kind}.yaml", to_yaml([rendered(RUNS[kind])])
    if os.environ.get("DFLASH_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


def test_another_process_renders_the_same_bytes():
    code = "import sys; sys.path[:0] = sys.argv[1].split(':'); from test_render import *; print(to_yaml([rendered(TRAIN)]), end='')"
    env = os.environ | {"PYTHONHASHSEED": "7"}
    out = subprocess.run(
        [sys.executable, "-c", code, ":".join(sys.path)], env=env, capture_output=True, text=True, check=True
    )
    assert out.stdout == to_yaml([rendered(TRAIN)])


@pytest.mark.parametrize("version", ["1.33", "1.37"])
@pytest.mark.parametrize("kind", RUNS)
def test_strictly_valid(kind, version):
    kubernetes_validate.validate(base(kind), version, strict=True)
    kubernetes_validate.validate(rendered(RUNS[kind]), version, strict=True)
    wrong = rendered(RUNS[kind])
    wrong["spec"]["paralelism"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


@pytest.mark.parametrize("kind", RUNS)
def test_the_base_job_is_not_changed_and_its_exit_codes_are_ours(kind):
    before = base(kind)
    job = render(before, RUNS[kind])
    assert before == base(kind)
    for manifest in (before, job):
        rules = manifest["spec"]["podFailurePolicy"]["rules"]
        codes = {r["action"]: r["onExitCodes"]["values"] for r in rules if "onExitCodes" in r}
        assert rules[0]["action"] == "Ignore"
        assert codes["FailJob"] == sorted(int(c) for c in FAIL_JOB[kind])
        assert codes.get("FailIndex", []) == sorted(int(c) for c in FAIL_INDEX[kind])
    again = {Exit.RETRY, Exit.SIGTERM, Exit.RANK_DIED, Exit.OK}
    assert not again & {*FAIL_JOB[kind], *FAIL_INDEX[kind]}


def test_pod_security_restricted_and_no_token():
    for run in RUNS.values():
        pod = rendered(run)["spec"]["template"]["spec"]
        [container] = pod["containers"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"] == container["resources"]["limits"]
        writable = {m["mountPath"] for m in container["volumeMounts"]}
        home = next(e["value"] for e in container["env"] if e["name"] == "HOME")
        assert home in writable and "/tmp" in writable
        assert {"name": "PYTHONUNBUFFERED", "value": "1"} in container["env"]


def test_tokenize_sees_no_gpu_and_train_has_seven_in_one_container():
    tokenize, train = (rendered(r)["spec"]["template"]["spec"]["containers"] for r in (TOKENIZE, TRAIN))
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in tokenize[0]["env"]
    assert len(train) == 1 and train[0]["resources"]["limits"]["nvidia.com/gpu"] == "7"
    volumes = {v["name"]: v for v in rendered(TRAIN)["spec"]["template"]["spec"]["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    assert volumes["cache"] == {"name": "cache", "persistentVolumeClaim": {"claimName": "caches"}}
    assert volumes["model"]["emptyDir"]["sizeLimit"] == "60Gi"


def test_kueue_label_suspends_and_the_rest_is_untouched():
    plain, queued = rendered(TOKENIZE), rendered(dataclasses.replace(TOKENIZE, queue="cpu"))
    assert queued["metadata"]["labels"].pop("kueue.x-k8s.io/queue-name") == "cpu"
    assert queued["spec"].pop("suspend") is True
    assert queued == plain


def test_parallelism_is_clamped_and_max_failed_indexes_is_five_percent():
    job = rendered(dataclasses.replace(TOKENIZE, completions=3, parallelism=64))
    assert (job["spec"]["parallelism"], job["spec"]["maxFailedIndexes"]) == (3, 1)
    assert [max_failed_indexes(n) for n in (1, 20, 21, 64, 100)] == [1, 1, 2, 4, 5]


def test_env_secret_and_account():
    run = dataclasses.replace(TOKENIZE, env={"B": "2", "A": "1"}, s3_secret="s3", service_account="me")
    job = rendered(run)
    pod = job["spec"]["template"]["spec"]
    assert [e["name"] for e in pod["containers"][0]["env"]][-2:] == ["A", "B"]
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "s3"}}]
    assert pod["serviceAccountName"] == "me"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"run": "Tok_X"}, "--name"),
        ({"run": "a" * 41}, "--name"),
        ({"image": ""}, "image"),
        ({"parallelism": 0}, "--parallelism"),
        ({"completions": 0}, "--shards"),
        ({"env": {"A-B": "1"}}, "--env"),
        ({"env": {"AWS_SECRET_ACCESS_KEY": "marker"}}, "--env"),
        ({"env": {"HF_TOKEN": "marker"}}, "--env"),
        ({"env": {"PROXY": "http://me:marker@host"}}, "--env"),
        ({"node": Node(cpu="four")}, "cpu"),
        ({"node": Node(memory="6GB")}, "memory"),
        ({"node": Node(gpus=1)}, "gpus"),
        ({"node": Node(volumes={"nope": "1Gi"})}, "volumes.nope"),
        ({"node": Node(volumes={"scratch": "big"})}, "volumes.scratch"),
        ({"node": Node(shm="1Gi")}, "volumes.shm"),
        ({"sets": ["spec.paralelism=3"]}, "spec.paralelism"),
        ({"sets": ["spec.template.spec.containers.1.image=x"]}, "containers.1"),
        ({"sets": ["spec.template.spec.containers.x.image=x"]}, "containers.x"),
        ({"sets": ["spec"]}, "--set"),
        ({"sets": ["metadata.labels.deep"]}, "--set"),
        ({"sets": ["spec.template.metadata.name=1"]}, "spec.template.metadata.name"),
        ({"sets": ["spec.completions=9"]}, "--shards"),
        ({"sets": ["metadata.name=x"]}, "--name"),
        ({"sets": ["metadata.labels.dflashctl/run=x"]}, "dflashctl/run"),
        ({"sets": ["spec.backoffLimitPerIndex=many"]}, "spec.backoffLimitPerIndex"),
        ({"sets": ["spec.backoffLimitPerIndex=-1"]}, "spec.backoffLimitPerIndex"),
        ({"sets": ["spec.backoffLimitPerIndex=true"]}, "spec.backoffLimitPerIndex"),
        ({"sets": ["spec.suspend=1"]}, "spec.suspend"),
        ({"sets": ["spec.template.spec.tolerations={"]}, "spec.template.spec.tolerations"),
        ({"sets": ["spec.template.spec.containers.0.resources.limits.cpu=four"]}, "limits.cpu"),
        ({"sets": ["spec.template.spec.volumes.0.emptyDir.sizeLimit=big"]}, "sizeLimit"),
        ({"sets": ["spec.template.spec.containers.0.env=[{name: HF_TOKEN, value: marker}]"]}, "HF_TOKEN"),
        ({"sets": ["spec.template.spec.containers.0.env.0.name=AWS_SECRET_ACCESS_KEY"]}, "AWS_SECRET_ACCESS_KEY"),
        ({"env": {"KEY": "AKIAIOSFODNN7EXAMPLE"}}, "--env KEY"),
        ({"queue": "my queue"}, "--queue"),
        ({"s3_secret": "S3_keys"}, "--s3-secret"),
        ({"service_account": "-x"}, "--service-account"),
        ({"namespace": "a" * 64}, "--namespace"),
        ({"image": "a b"}, "--image"),
        ({"node": Node(cpu="0")}, "cpu"),
        ({"node": Node(volumes={"scratch": ""})}, "volumes.scratch"),
        ({"node": Node(volumes={"scratch": "pvc:"})}, "volumes.scratch"),
        ({"node": Node(selector={"gpu": True})}, "selector.gpu"),
        ({"node": Node(tolerations=[{"ke": "x"}])}, "tolerations[0].ke"),
        ({"node": Node(tolerations=[{"key": "x", "effect": "Never"}])}, "tolerations[0].effect"),
        ({"node": Node(tolerations=[{"tolerationSeconds": "1"}])}, "tolerations[0].tolerationSeconds"),
    ],
)
def test_impossible_values_are_refused_by_field_name(change, field):
    with pytest.raises(UsageError) as error:
        rendered(dataclasses.replace(TOKENIZE, **change))
    assert field in f"{error.value.message} {error.value.hint}" and error.value.code == 2
    assert "marker" not in f"{error.value.message} {error.value.hint}"


@pytest.mark.parametrize(
    ("node", "field"),
    [
        (dataclasses.replace(B200, shm="512Gi"), "shm"),
        (dataclasses.replace(B200, gpus=-1), "gpus"),
        (dataclasses.replace(B200, shm="x"), "shm"),
    ],
)
def test_train_profiles_that_cannot_run(node, field):
    with pytest.raises(UsageError, match=field):
        rendered(dataclasses.replace(TRAIN, node=node))


def env_of(run):
    return {e["name"]: e.get("value") for e in rendered(run)["spec"]["template"]["spec"]["containers"][0]["env"]}


def test_a_training_pod_is_told_the_sizes_of_its_volumes():
    assert env_of(TRAIN)["DFLASH_MODEL_CACHE_BYTES"] == str(60 * 2**30)
    assert env_of(TRAIN)["DFLASH_DATA_CACHE_BYTES"] == str(12 * 2**30)
    volumes = {"model": "pvc:models", "data": "900M"}
    other = env_of(dataclasses.replace(TRAIN, node=dataclasses.replace(B200, volumes=volumes), env={"A": "1"}))
    assert "DFLASH_MODEL_CACHE_BYTES" not in other  # a claim tells its size itself
    assert other["DFLASH_DATA_CACHE_BYTES"] == "900000000" and other["A"] == "1"
    stands = {e["name"]: e.get("value") for e in base("train")["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert stands == env_of(dataclasses.replace(TRAIN, node=Node()))


@pytest.mark.parametrize("target", ["/model/Qwen", "Qwen/Qwen3.6-27B", "Qwen3.6-27B", "../Qwen", "models/a/b@c"])
def test_a_target_that_no_pod_can_find_is_refused(target):
    with pytest.raises(UsageError, match="--target"):
        rendered(dataclasses.replace(TRAIN, model=target))


def test_targets_that_a_pod_can_find():
    claim = dataclasses.replace(B200, volumes={"model": "pvc:models"})
    for target, node in [
        ("/model/Qwen", claim),
        ("s3://m/Qwen", B200),
        ("Qwen/Qwen3.6-27B@main", B200),
        ("/opt/x", B200),
    ]:
        assert rendered(dataclasses.replace(TRAIN, model=target, node=node))


def test_a_training_is_guaranteed_and_has_time_to_save():
    job = rendered(TRAIN)["spec"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert {"cpu", "memory", "ephemeral-storage", "nvidia.com/gpu"} == container["resources"]["limits"].keys()
    shm = next(v["emptyDir"] for v in pod["volumes"] if v["name"] == "shm")
    assert shm["medium"] == "Memory" and quantity(shm["sizeLimit"]) < quantity(
        container["resources"]["limits"]["memory"]
    )
    assert all("sizeLimit" in v["emptyDir"] for v in pod["volumes"] if "emptyDir" in v)
    assert pod["terminationGracePeriodSeconds"] == 600 and pod["restartPolicy"] == "Never"
    assert job["backoffLimit"] == 10 and "activeDeadlineSeconds" not in job
    ignored, failed = job["podFailurePolicy"]["rules"]
    assert ignored["action"] == "Ignore" and ignored["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert failed["onExitCodes"]["values"] == [64, 65, 70, 73, 76, 78]


def test_a_profile_that_says_nothing_leaves_the_base_job_as_it_is():
    bare = rendered(dataclasses.replace(TRAIN, node=Node()))["spec"]["template"]["spec"]
    stands = base("train")["spec"]["template"]["spec"]
    assert bare["containers"][0]["resources"] == stands["containers"][0]["resources"]
    assert bare["volumes"] == stands["volumes"]
    none = rendered(dataclasses.replace(TRAIN, node=Node(gpus=0)))["spec"]["template"]["spec"]
    assert "nvidia.com/gpu" not in none["containers"][0]["resources"]["limits"]


def test_variables_that_only_sound_like_secrets_pass():
    env = {"TOKENIZERS_PARALLELISM": "false", "AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/token"}
    job = rendered(dataclasses.replace(TOKENIZE, env=env))
    assert {e["name"] for e in job["spec"]["template"]["spec"]["containers"][0]["env"]} >= set(env)


def test_set_reaches_existing_optional_and_free_fields():
    sets = ["spec.backoffLimitPerIndex=5", "metadata.labels.team.example/x=7", "spec.template.spec.priorityClassName=low",
            "spec.template.spec.containers.0.args.0=run", "spec.template.spec.nodeSelector.kubernetes.io/arch=amd64"]  # fmt: skip
    job = rendered(dataclasses.replace(TOKENIZE, sets=sets))
    assert job["spec"]["backoffLimitPerIndex"] == 5
    assert job["metadata"]["labels"]["team.example/x"] == "7"
    pod = job["spec"]["template"]["spec"]
    assert (pod["priorityClassName"], pod["nodeSelector"]) == ("low", {"kubernetes.io/arch": "amd64"})
    kubernetes_validate.validate(job, "1.37", strict=True)


def test_set_gives_each_field_a_value_of_its_kind():
    sets = ["spec.template.spec.imagePullSecrets=[{name: pull}]", "spec.template.spec.hostNetwork=true",
            "spec.template.spec.containers.0.env.0.value=0", "spec.template.spec.containers.0.resources.limits.cpu=2",
            "spec.template.spec.volumes.0.emptyDir.sizeLimit=5Gi", "spec.template.spec.affinity={nodeAffinity: {}}",
            "spec.template.spec.nodeSelector.pool=1"]  # fmt: skip
    job = rendered(dataclasses.replace(TOKENIZE, sets=sets))
    pod = job["spec"]["template"]["spec"]
    assert pod["imagePullSecrets"] == [{"name": "pull"}] and pod["hostNetwork"] is True
    assert pod["containers"][0]["env"][0]["value"] == "0" and pod["nodeSelector"]["pool"] == "1"
    for version in ("1.33", "1.37"):
        kubernetes_validate.validate(job, version, strict=True)


def test_a_value_of_this_environment_is_found_wherever_it_stands():
    job = rendered(dataclasses.replace(TOKENIZE, model="s3://bucket/marker-of-a-secret", env={"A": "1"}))
    refuse_values(job, [])
    refuse_values(job, ["another-secret"])
    with pytest.raises(UsageError) as error:
        refuse_values(job, ["marker-of-a-secret"])
    assert "metadata.annotations.dflashctl/model" in error.value.message and "marker" not in error.value.message


def test_volumes_that_are_all_claims_take_no_disk_of_the_node():
    node = Node(volumes={"scratch": "pvc:a", "tmp": "pvc:b"})
    job = rendered(dataclasses.replace(TOKENIZE, node=node))
    stands = base("tokenize")["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    limits = job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["ephemeral-storage"] == stands["ephemeral-storage"]


@pytest.mark.parametrize(
    ("text", "number"), [("4", 4), ("500m", 0.5), ("2Gi", 2**31), ("1k", 1000), ("1.5M", 1.5e6), ("1Ti", 2**40)]
)
def test_quantities(text, number):
    assert quantity(text) == number


def test_yaml_reads_back_as_the_same_object():
    assert yaml.safe_load(to_yaml([rendered(TRAIN)])) == rendered(TRAIN)
