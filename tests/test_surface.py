"""What others build on is frozen here: every verb's flags, the docs made from them, who may import whom, and the cost
of a help text. A change of `surface.txt` is a change of a contract: edit it by hand, on purpose."""

from __future__ import annotations

import ast
import json
import os
import resource
import runpy
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_fixtures import ROOT

OURS = ("dflashctl", "tokenizer", "trainer")
HEAVY = {"torch", "transformers", "datasets", "kubernetes", "boto3", "botocore", "pyarrow", "numpy", "pandas", "yaml"}


# ---- flags


def surface() -> str:
    """One line a parameter: verb, spellings, metavar, and what it is when it is not given."""
    import typer.main

    from dflashctl.cli import build

    command: Any = typer.main.get_command(build())
    lines = []
    for name, verb in [("dflashctl", command), *sorted(command.commands.items())]:
        for p in verb.params:
            names = ", ".join(p.opts) if p.param_type_name == "option" else "(argument)"
            kind = "flag" if getattr(p, "is_flag", False) else str(p.metavar or p.name)
            many = " repeated" if getattr(p, "multiple", False) or p.nargs == -1 else ""
            needed = " required" if p.required else "" if p.default in (None, False, ()) else f" = {p.default}"
            lines.append(f"{name} {names} {kind}{many}{needed}")
    return "\n".join(lines) + "\n"


def test_every_flag_is_as_it_was_promised() -> None:
    assert surface() == (ROOT / "tests" / "surface.txt").read_text()


def test_the_reference_is_what_help_says() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "generate.py"))["reference"]()
    assert made == (ROOT / "docs" / "cli.md").read_text(), "run: python docs/generate.py"


def test_every_setting_has_a_flag_and_stands_in_the_guide() -> None:
    from dflashctl.config import PLACE, SCHEMA

    flags, guide = surface(), (ROOT / "docs" / "guide.md").read_text()
    for key in SCHEMA["tokenize"].keys() - PLACE.keys():
        assert key == "input" or f"tokenize --{key.replace('_', '-')} " in flags
    for verb in {line.split()[0] for line in flags.splitlines()} - {"dflashctl"}:
        assert f"`dflashctl {verb}" in guide or f"\ndflashctl {verb}" in guide or f"    dflashctl {verb}" in guide


# ---- imports, read from the sources


def sources(package: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.AST) -> set[str]:
    """Every module that is named in an import, with `from a import b` as `a.b` where a is one of our packages."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [alias.name for alias in node.names]
            found |= {f"{node.module}.{name}" for name in names} if node.module in OURS else {str(node.module)}
    return found


def of(package: str, modules: set[str]) -> set[str]:
    """The modules of one of our packages among those, one level deep."""
    return {m.split(".")[1] for m in modules if m.startswith(package + ".")}


def tops(modules: set[str]) -> set[str]:
    return {module.split(".")[0] for module in modules}


def test_the_command_line_knows_contracts_alone() -> None:
    for path, tree in sources("dflashctl"):
        found = imports(tree)
        assert of("tokenizer", found) <= {"job", "shard", "store"}, path
        assert of("trainer", found) <= {"job"}, path
        assert not tops(found) & {"torch", "transformers", "datasets", "boto3", "botocore", "dflash", "numpy"}, path
        assert "kubernetes" not in tops(found) or path.name == "kube.py", path


def test_the_trainer_knows_contracts_alone() -> None:
    for path, tree in sources("trainer"):
        found = imports(tree)
        more = {"read", "chat", "encode", "dialects"} if path.name == "evaluate.py" else set()
        assert of("tokenizer", found) <= {"job", "shard", "store"} | more, path
        assert not tops(found) & {"dflashctl", "kubernetes", "typer", "dflash"}, path


def test_the_tokenizer_knows_nobody() -> None:
    forbidden = {"dflashctl", "trainer", "torch", "transformers", "datasets", "pandas", "typer", "kubernetes", "dflash"}
    for path, tree in sources("tokenizer"):
        assert not tops(imports(tree)) & forbidden, path


def test_boto3_is_imported_in_functions_of_the_store_alone() -> None:
    for package in OURS:
        for path, tree in sources(package):
            at_import = set().union(*(imports(node) for node in tree.body if not _is_deferred(node)), set())
            assert not tops(at_import) & {"boto3", "botocore"}, path
            assert not tops(imports(tree)) & {"boto3", "botocore"} or path.name in ("store.py", "s3.py"), path


def _is_deferred(node: ast.stmt) -> bool:
    """A function, a class (its body's imports are in methods), or a block that only a type checker runs."""
    checked = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    return checked or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def test_package_files_are_empty() -> None:
    for package in (*OURS, "k8s"):
        for path in (ROOT / package).rglob("__init__.py"):
            assert path.read_text() == "", path


def loaded(code: str) -> set[str]:
    """Top-level modules that are there after `code` has run in a fresh interpreter."""
    script = f"import sys\nbefore = set(sys.modules)\n{code}\nimport json\nprint(json.dumps(sorted(set(sys.modules) - before)))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    return tops(set(json.loads(done.stdout.splitlines()[-1])))


@pytest.mark.parametrize("module", ["tokenizer.job", "trainer.job"])
def test_contracts_need_the_standard_library_alone(module: str) -> None:
    assert loaded(f"import {module}") <= {*sys.stdlib_module_names, "tokenizer", "trainer"}


def test_the_shard_needs_arrow_and_nothing_more() -> None:
    found = loaded("import tokenizer.shard")
    assert not found & {"boto3", "botocore", "tokenizers", "fastokens", "orjson", "pandas", "datasets", "torch"}
    assert not loaded("import tokenizer.store") & {"boto3", "botocore", "pyarrow", "numpy"}


@pytest.mark.parametrize("args", [["--help"], ["status", "--help"], ["tokenize", "--help"], ["eval", "--help"]])
def test_help_loads_nothing_heavy(args: list[str]) -> None:
    code = f"import io, contextlib\nfrom dflashctl.__main__ import main\nsys.argv[1:] = {args!r}\n"
    code += "with contextlib.redirect_stdout(io.StringIO()): assert main() == 0"
    assert not loaded(code) & HEAVY


def cpu(command: list[str]) -> float:
    """CPU seconds of one command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_costs_at_most_twelve_bare_interpreters() -> None:
    bare, helped = zip(
        *((cpu([sys.executable, "-c", "pass"]), cpu([sys.executable, "-m", "dflashctl", "--help"])) for _ in range(7)),
        strict=True,
    )
    assert min(helped) <= 12 * min(bare), f"help {min(helped):.3f} s, bare {min(bare):.3f} s"


# ---- as it is installed


def test_without_its_packages_the_script_names_the_extra(tmp_path: Path) -> None:
    code = "import sys; sys.modules['typer'] = None\nfrom dflashctl.__main__ import main\nsys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and "typer" in done.stderr and "dflashctl[cli]" in done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of a built wheel, away from the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"  # a build writes beside its sources: it gets a copy of what is packaged
    for name in (*OURS, "k8s"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    (tree / "README.md").write_text("dflashctl\n")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(tree),
    ]
    subprocess.run(build, check=True, timeout=300)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_a_wheel_holds_every_module_and_what_they_read(wheel: Path) -> None:
    for package in OURS:
        there = {str(p.relative_to(ROOT)) for p in (ROOT / package).rglob("*.py")}
        assert there <= {str(p.relative_to(wheel)) for p in (wheel / package).rglob("*.py")}
    for path in (ROOT / "k8s").rglob("*.yaml"):
        assert (wheel / "dflashctl" / "k8s" / path.relative_to(ROOT / "k8s")).read_bytes() == path.read_bytes()
    assert not (wheel / "tests").exists() and not (wheel / "benchmarks").exists()


@pytest.mark.parametrize("how", ["wheel", "editable"])
def test_outside_the_checkout_it_works_as_installed(how: str, wheel: Path, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if how == "wheel":
        env["PYTHONPATH"] = str(wheel)
    code = "import dflashctl.cli, sys; print(dflashctl.cli.__file__); from dflashctl.__main__ import main; sys.exit(main())"
    args = [
        "tokenize",
        "s3://b/in",
        "--out",
        "s3://b/out",
        "--model",
        "m",
        "--shards",
        "2",
        "--dry-run",
        "--backend",
        "local",
    ]
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *args, "-o", "json"], cwd=tmp_path, env=env, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    place, _, document = done.stdout.partition("\n")
    assert place.startswith(str(wheel if how == "wheel" else ROOT))
    assert json.loads(document)["job"]["indexes"] == [0, 1]


def test_the_same_manifest_from_a_wheel_and_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"KUBECONFIG": "none"}
    code = "import sys; from dflashctl.__main__ import main; sys.exit(main())"
    args = ["s3://b/in", "--out", "s3://b/out", "--model", "m", "--shards", "64", "--parallelism", "64", "--image", "i"]
    shown = []
    for place in (wheel, ROOT):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, "tokenize", *args, "--backend", "kube", "--dry-run"], cwd=tmp_path,
            env={**env, "PYTHONPATH": str(place)}, capture_output=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        shown.append(done.stdout)
    assert shown[0] == shown[1] and b"kind: Job" in shown[0]
