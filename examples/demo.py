"""`make demo`: real completions, the real Qwen3.6 vocabulary and template, a real S3 server, several worker processes.

Everything it makes lies in .cache/demo (started anew every time). Each command is printed before it runs, as you would
type it; the S3 server and its credentials are the only thing the demo brings.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
sys.path.insert(0, str(ROOT))

from dflashctl.embedded import EmbeddedError, EmbeddedS3  # noqa: E402

SHOW_DATASET = """
import os, datasets
options = {"key": os.environ["AWS_ACCESS_KEY_ID"], "secret": os.environ["AWS_SECRET_ACCESS_KEY"],
           "endpoint_url": os.environ["AWS_ENDPOINT_URL_S3"]}
data = datasets.load_from_disk("s3://dflash-demo/dataset", storage_options=options)
print(data)
print(f"row {data[0]['id']}: {len(data[0]['input_ids'])} tokens, {data[0]['n_loss']} of them learnt")
"""


def run(arguments: list[str], env: dict[str, str], cwd: Path) -> None:
    print(f"\n$ {shlex.join(arguments)}", flush=True)
    program = [sys.executable, "-m", "dflashctl", *arguments[1:]] if arguments[0] == "dflashctl" else arguments
    code = subprocess.run(program, env=env, cwd=cwd).returncode
    if code:
        sys.exit(f"error: the command above ended with exit code {code}")


def main() -> None:
    home, vocabulary = CACHE / "demo", CACHE / "qwen36"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    if subprocess.run([sys.executable, str(ROOT / "examples" / "build_qwen36.py"), str(vocabulary)]).returncode:
        sys.exit("error: the Qwen3.6 vocabulary could not be built")
    try:
        with EmbeddedS3(home / "s3", buckets=["dflash-demo"]) as server:
            env = {**os.environ, **server.env(), "PYTHONPATH": str(ROOT)}
            env.pop("DFLASH_CONFIG", None)
            print(f"S3 server at {server.endpoint}, bucket dflash-demo")
            upload(sorted((ROOT / "examples" / "completions").glob("*.jsonl")), env)
            given = ["s3://dflash-demo/raw/", "--out", "s3://dflash-demo/dataset", "--model", str(vocabulary)]
            local = ["--backend", "local"]
            run(["dflashctl", "tokenize", *given, "--preview", "2", *local], env, home)
            run(["dflashctl", "tokenize", *given, "--shards", "4", "--parallelism", "2", *local], env, home)
            run(["dflashctl", "status", *local], env, home)
            run(["dflashctl", "inspect", "s3://dflash-demo/dataset"], env, home)
            print("\n$ python: datasets.load_from_disk('s3://dflash-demo/dataset', storage_options=...)", flush=True)
            subprocess.run([sys.executable, "-c", SHOW_DATASET], env=env, check=True)
    except EmbeddedError as error:
        sys.exit(f"error: {error}")
    print("\nnext: dflashctl tokenize YOUR/*.jsonl --out YOUR/dataset --model YOUR/model --backend local")


def upload(files: list[Path], env: dict[str, str]) -> None:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=env["AWS_ENDPOINT_URL_S3"],
        aws_access_key_id=env["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
        region_name=env.get("AWS_REGION", "us-east-1"),
    )
    for file in files:
        client.upload_file(str(file), "dflash-demo", f"raw/{file.name}")
    print(f"uploaded {len(files)} files of completions to s3://dflash-demo/raw/")


if __name__ == "__main__":
    main()
