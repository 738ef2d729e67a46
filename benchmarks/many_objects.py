"""One pass of 1,805 objects x 500 small rows through the embedded S3 at 64 indexes: does it end right, what bounds it?

    python benchmarks/many_objects.py [--objects 1805] [--rows 500] [--shards 64] [--parallelism 2]

The rows are generated (no text repeats), the vocabulary and template are the real ones. It prints how long each stage
took, and checks every count against the generator's own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from vocab import qwen36_dir  # noqa: E402

from dflashctl.embedded import EmbeddedS3  # noqa: E402

WORDS = [
    "anchor",
    "block",
    "drafter",
    "target",
    "tap",
    "mask",
    "shard",
    "commit",
    "plan",
    "batch",
    "run",
    "index",
    "length",
    "token",
    "row",
    "state",
    "layer",
    "head",
]


def body(number: int, rows: int) -> bytes:
    rng = random.Random(number)
    lines = []
    for row in range(rows):
        text = " ".join(rng.choice(WORDS) + str(rng.randrange(100)) for _ in range(rng.randrange(20, 60)))
        messages = [{"role": "user", "content": f"Question {number}.{row}?"}, {"role": "assistant", "content": text}]
        lines.append(json.dumps({"id": f"{number}-{row}", "messages": messages}))
    return ("\n".join(lines) + "\n").encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("objects", 1805), ("rows", 500), ("shards", 64), ("parallelism", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="dflash-objects-"))
    took: dict[str, float] = {}
    try:
        with EmbeddedS3(folder / "s3", buckets=["dflash-bench"]) as server:
            env = {**os.environ, **server.env(), "PYTHONPATH": str(ROOT)}
            start = time.monotonic()
            upload(asked.objects, asked.rows, env)
            took["generate and upload the input (not ours)"] = time.monotonic() - start
            argv = [
                sys.executable,
                "-m",
                "dflashctl",
                "tokenize",
                "s3://dflash-bench/raw/",
                "--out",
                "s3://dflash-bench/out",
                "--model",
                str(qwen36_dir()),
            ]
            argv += [
                "--shards",
                str(asked.shards),
                "--parallelism",
                str(asked.parallelism),
                "--backend",
                "local",
                "-o",
                "json",
            ]
            times, start = os.times(), time.monotonic()
            done = subprocess.run(argv, env=env, cwd=folder, stdout=subprocess.PIPE, check=True)
            took["dflashctl tokenize, wall"] = time.monotonic() - start
            after = os.times()
            took["of it: CPU seconds of the command itself (the pool has its own below)"] = (
                after.children_user + after.children_system - times.children_user - times.children_system
            )
            result = json.loads(done.stdout)
            want = asked.objects * asked.rows
            assert result["state"] == "succeeded", result
            assert result["lines_seen"] == result["lines_kept"] == result["rows"] == want, result
            counts = f"{result['rows']:,} rows, {result['tokens']:,} tokens, {asked.shards} indexes"
            print(f"{asked.objects} objects, {counts}: right")
            stages(env, asked.shards, took)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, seconds in took.items():
        print(f"{seconds:10.1f} s  {name}")


def client(env: dict[str, str]):  # type: ignore[no-untyped-def]
    import boto3

    return boto3.client(
        "s3", endpoint_url=env["AWS_ENDPOINT_URL_S3"], region_name="us-east-1",
        aws_access_key_id=env["AWS_ACCESS_KEY_ID"], aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
    )  # fmt: skip


def upload(objects: int, rows: int, env: dict[str, str]) -> None:
    s3 = client(env)

    def put(number: int) -> None:
        s3.put_object(Bucket="dflash-bench", Key=f"raw/{number:05d}.jsonl", Body=body(number, rows))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, range(objects)))


def stages(env: dict[str, str], shards: int, took: dict[str, float]) -> None:
    """Sums over the indexes of what each pod wrote into stats/."""
    s3 = client(env)
    keys = [o["Key"] for o in s3.list_objects_v2(Bucket="dflash-bench", Prefix="out/stats/")["Contents"]]
    assert len(keys) == shards, keys
    stats = [json.loads(s3.get_object(Bucket="dflash-bench", Key=key)["Body"].read()) for key in keys]
    took["sum over indexes: seconds"] = sum(s["seconds"] for s in stats)
    took["sum over indexes: download, encode, write to scratch"] = sum(s["seconds_convert"] for s in stats)
    took["sum over indexes: upload, commit"] = sum(s["seconds"] - s["seconds_convert"] for s in stats)
    took["sum over indexes: CPU seconds"] = sum(s["cpu_seconds"] for s in stats)


if __name__ == "__main__":
    main()
