"""JSONL on disk -> Arrow on disk, side by side with SpecForge and with `tokenizers` in our own pipeline, on one core.

    python benchmarks/tokenize.py            4,500 chats, about 10 M tokens, three rounds; some ten minutes
    python benchmarks/tokenize.py --small    500 chats, one round: whole processes with imports and load

Every measurement is a fresh process pinned to one core, the contenders alternate, and what counts is CPU seconds, so
that a busy machine spoils little. The vocabulary is the real one of Qwen3.6. Ours is what a pod runs, to its commit
record and the finished dataset; SpecForge's is `load_dataset` + `build_eagle3_dataset` as its trainer calls them.
`benchmarks/peers.sh` installs the peers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# this folder must leave the path: there the name of this file hides the standard library's `tokenize`
sys.path[:] = [str(ROOT), str(ROOT / "tests"), *(p for p in sys.path if Path(p).resolve() != ROOT / "benchmarks")]

ORIGIN_TOKENS = 1.87e9
ORIGIN_MINUTES, ORIGIN_WORKERS = 6.5, 128
BARS = {"specforge": 60.0, "tokenizers": 18.0, "whole process": 4.0}


class Run(NamedTuple):
    """One process: CPU seconds in all and of its load, MB, tokens it wrote."""

    cpu: float
    load: float
    rss: float
    tokens: int


def measured(argv: list[str], cores: int = 1, log: Path | None = None) -> tuple[float, float, str]:
    """CPU seconds (descendants included), peak RSS in MB and the last line of stdout of a process on so many cores."""
    allowed = sorted(os.sched_getaffinity(0))[:cores]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            argv,
            stdout=out,
            stderr=err,
            env=environment,
            preexec_fn=lambda: os.sched_setaffinity(0, allowed),
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        lines = out.read().decode().splitlines()
        if process.returncode:
            sys.exit(
                f"{argv} ended with {process.returncode}:\n{err.read().decode()[-3000:]}\n" + "\n".join(lines[-5:])
            )
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, lines[-1] if lines else ""


def ours(corpus: Path, tokenizer: Path, workers: int = 1, engine: str = "") -> Run:
    """The process of a pod on a plan of one index. engine: "" is `python -P -m tokenizer run` as it stands; "fast" and
    "tokenizers" load the cross-check's engine beforehand and tell how much of the time was load.
    """
    from job_fixtures import prepare

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        _, args, _ = prepare(str(out), str(corpus), shards=1, tokenizer=tokenizer)
        command = ["-m", "tokenizer", "run"] if not engine else [__file__, "--child", "pod", engine]
        argv = [*args.to_argv(), "--index", "0", "--workers", str(workers)]
        cpu, rss, line = measured([sys.executable, "-P", *command, *argv], workers)
        tokens = json.loads((out / "commits" / "00000.json").read_bytes())["tokens"]
        if not (out / "dataset.json").exists():
            sys.exit(f"{out}: the dataset was not finished")
    return Run(cpu, json.loads(line)["load"] if engine else 0.0, rss, tokens)


def specforge(corpus: Path, tokenizer: Path) -> Run:
    """SpecForge's preprocessing in a process of its own, one worker, nothing cut."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, __file__, "--child", "specforge", str(corpus), str(tokenizer), folder]
        cpu, rss, line = measured(argv)
    return Run(cpu, json.loads(line)["load"], rss, json.loads(line)["tokens"])


def child_pod(engine: str, *argv: str) -> None:
    """A pod that says at its end when it had loaded; with engine "tokenizers" no layout counts as proven."""
    from tokenizer import engines, pod
    from tokenizer.index import Model

    if engine == "tokenizers":
        engines.unproven = lambda data: "measured with the reference"
    load_model, loaded = pod.load_model, 0.0
    kept = []  # what is loaded is not freed: that would be the load's other half

    def timed(*arguments: Any) -> Model:
        nonlocal loaded
        model = load_model(*arguments)
        kept.append((model, model.encoder.reference))
        loaded = time.process_time()
        return model

    pod.load_model = timed
    code = pod.main(list(argv))
    print(json.dumps({"load": loaded}), flush=True)
    os._exit(code)


def child_specforge(corpus: str, tokenizer: str, folder: str) -> None:
    os.environ["HF_HOME"] = folder
    from datasets import load_dataset
    from specforge.data.preprocessing import build_eagle3_dataset
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    load = time.process_time()
    rows = load_dataset("json", data_files=sorted(map(str, Path(corpus).glob("*.jsonl"))), split="train")
    out = build_eagle3_dataset(
        rows, loaded, chat_template="qwen3.5", max_length=1 << 20, num_proc=None, cache_dir=folder, cache_key="rows"
    )
    out.set_format("arrow")
    tokens = sum(len(column[0]) for column in (row["input_ids"].to_pylist()[0] for row in out.select(range(20)))) / 20
    print(json.dumps({"load": load, "tokens": int(tokens * len(out))}))


CHILDREN: dict[str, Callable[..., None]] = {"pod": child_pod, "specforge": child_specforge}


def median(runs: list[Run]) -> Run:
    return Run(*(statistics.median(values) for values in zip(*runs, strict=True)))


def whole_process(corpus: Path, tokenizer: Path, rounds: int) -> None:
    contenders: dict[str, list[Run]] = {"ours": [], "specforge": []}
    for _ in range(rounds):
        contenders["ours"].append(ours(corpus, tokenizer))
        contenders["specforge"].append(specforge(corpus, tokenizer))
    mine, theirs = median(contenders["ours"]), median(contenders["specforge"])
    print(f"\n500 chats, whole processes with imports and load ({mine.tokens:,} tokens)")
    print(f"  ours       {mine.cpu:7.2f} CPU s   {mine.rss:5.0f} MB")
    print(f"  SpecForge  {theirs.cpu:7.2f} CPU s   {theirs.rss:5.0f} MB")
    verdict("SpecForge / ours", theirs.cpu / mine.cpu, BARS["whole process"])


def without_load(corpus: Path, tokenizer: Path, rounds: int) -> None:
    runs: dict[str, list[Run]] = {"ours": [], "two workers": [], "tokenizers": [], "specforge": []}
    for _ in range(rounds):
        runs["ours"].append(ours(corpus, tokenizer, engine="fast"))
        runs["specforge"].append(specforge(corpus, tokenizer))
        runs["tokenizers"].append(ours(corpus, tokenizer, engine="tokenizers"))
        runs["two workers"].append(ours(corpus, tokenizer, workers=2, engine="fast"))
    middle = {name: median(found) for name, found in runs.items()}
    size = sum(path.stat().st_size for path in corpus.glob("*.jsonl"))
    print(f"\n{size / 1e6:.1f} MB of chats, one core, medians of {rounds}; net = without imports and load")
    for name, run in middle.items():
        net = run.cpu - run.load
        print(
            f"  {name:12} {net:7.2f} net CPU s  {run.load:5.2f} load  {run.rss:5.0f} MB  "
            f"{run.tokens / 1e6:6.2f} M tokens  {run.tokens / net / 1e6:7.3f} M tok/s  {size / net / 1e6:6.2f} MB/s"
        )
    mine = middle["ours"]
    net = mine.cpu - mine.load
    for peer in ("specforge", "tokenizers"):
        theirs = middle[peer].cpu - middle[peer].load
        verdict(f"{peer} / ours, same chats", theirs / net, BARS[peer])
        print(f"  the same by the token: {theirs / middle[peer].tokens / (net / mine.tokens):.2f}")
    two = middle["two workers"]
    verdict("CPU a token of two workers / one, load included", two.cpu / mine.cpu, 1.1, at_most=True)
    print(f"  the same without load: {(two.cpu - two.load) / net:.2f} (each worker fills its own cache of words)")
    verdict("peak RSS of ours, MB", mine.rss, 700, at_most=True)
    minutes = (ORIGIN_TOKENS / (mine.tokens / net) / ORIGIN_WORKERS + mine.load) / 60
    print(
        f"  {ORIGIN_TOKENS / 1e9:.2f} B tokens on {ORIGIN_WORKERS} such workers: {minutes:.2f} minutes with load, "
        f"without S3; the run that this project was born from took {ORIGIN_MINUTES} minutes on as many"
    )


def verdict(what: str, value: float, bar: float, at_most: bool = False) -> None:
    met = value <= bar if at_most else value >= bar
    print(f"  {what}: {value:.2f} (bar: {'<=' if at_most else '>='} {bar:g}, {'met' if met else 'NOT met'})")


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        CHILDREN[sys.argv[2]](*sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description="Measure JSONL -> Arrow beside the peers")
    parser.add_argument("--small", action="store_true", help="500 chats, one round, whole processes alone")
    parser.add_argument("--chats", type=int, default=4500)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    from vocab import qwen36_dir

    from benchmarks import chats

    tokenizer = qwen36_dir()
    rounds = 1 if arguments.small else arguments.rounds
    print(f"{os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        few, many = Path(folder) / "few", Path(folder) / "many"
        chats.write(few, 500)
        whole_process(few, tokenizer, rounds)
        if not arguments.small:
            chats.write(many, arguments.chats)
            without_load(many, tokenizer, rounds)


if __name__ == "__main__":
    main()
