"""What OUT itself says: its plan, its runs, its commits, and how it ended. OUT is the truth, above any local state.

Reads are few and bounded: `status` may ask every second. Commit records never change once they are there, so each is
read once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dflashctl.backends.base import LogLine
from dflashctl.errors import ApiError, PreflightError, TakenError, UsageError
from dflashctl.model import Model
from tokenizer.job import (
    COMMITS_DIR,
    CONTRACT,
    DATASET,
    LOGS_DIR,
    PLAN,
    REFUSED,
    RUNS_DIR,
    TOKENIZER_DIR,
    Exit,
    JobError,
    Plan,
    RunRecord,
    commit_name,
    in_order,
    run_name,
)
from tokenizer.store import NotFound, Options, Store, StoreError, open_store

THREADS = 16
#: `status` says within about ten seconds that a store is not there; a submit may try for longer.
QUICK = Options(patience=6.0, on_retry=lambda line: None)
PATIENT = Options(patience=30.0)


class Out:
    """The records below one OUT."""

    def __init__(self, uri: str, options: Options = QUICK) -> None:
        try:
            self.store: Store = open_store(uri, options)
        except ValueError as error:
            raise UsageError(f"OUT {error}") from None
        self.uri = self.store.uri()
        self._options = options
        self._plan: Plan | None = None
        self._commits: dict[int, dict[str, Any]] = {}

    def plan(self) -> Plan | None:
        """The plan, None where OUT has none; raises JobError for another contract version."""
        if self._plan is None and (data := self._read(PLAN)) is not None:
            self._plan = Plan.from_json(data)
        return self._plan

    def cached_plan(self) -> Plan | None:
        """The plan if it was read before; asks nobody."""
        return self._plan

    def runs(self) -> list[RunRecord]:
        """The records of every Job that was started on OUT, oldest first."""
        keys = [stat.key for stat in self.store.list(f"{RUNS_DIR}/") if stat.key.endswith(".json")]
        return in_order(RunRecord.from_json(data) for data in self._read_all(keys).values())

    def dataset(self) -> dict[str, Any] | None:
        """dataset.json: its presence is completeness. JobError for what is no record of this contract version."""
        return self._record(DATASET)

    def refused(self) -> dict[str, Any] | None:
        """refused.json of the newest refusal; raises as `dataset` does."""
        return self._record(REFUSED)

    def committed(self) -> set[int]:
        """Indexes that have a commit record."""
        names = (re.fullmatch(rf"{COMMITS_DIR}/([0-9]{{5,}})\.json", s.key) for s in self.store.list(f"{COMMITS_DIR}/"))
        return {int(match[1]) for match in names if match}

    def commits(self, indexes: Iterable[int]) -> dict[int, dict[str, Any]]:
        """The commit records of those indexes; one that is not there is left out."""
        wanted = [index for index in indexes if index not in self._commits]
        for key, data in self._read_all([commit_name(index) for index in wanted]).items():
            commit = _parse(key, data)
            if commit.get("index") != int(key.rpartition("/")[2].removesuffix(".json")):
                raise ApiError(f"`{key}` of OUT is not its commit record", "OUT was written to by something else")
            self._commits[commit["index"]] = commit
        return {index: self._commits[index] for index in sorted(self._commits)}

    def summary(self) -> dict[str, Any]:
        """The figures of what is committed so far, in the words of dataset.json; raises ApiError without a plan.

        `complete` is false, and that is the only reason given: what is not all there cannot be called degenerate.
        """
        from tokenizer.shard import summary

        plan = self.plan()
        if plan is None:
            raise ApiError(f"`{self.uri}` has no plan", "start it with `dflashctl tokenize`")
        commits = list(self.commits(self.committed()).values())
        verdict = f"not complete ({len(commits)} of {len(plan.batches)} indexes)"
        return {**summary(plan, commits), "degenerate": False, "reasons": [verdict], "complete": False}  # type: ignore[arg-type]

    def kept_logs(self, job: str, indexes: list[int] | None, previous: bool) -> Iterator[LogLine]:
        """The last 64 KiB of the newest failed try of each index (or the one before it), as its pod stored them."""
        tries: dict[int, list[tuple[int, str]]] = {}
        for stat in self.store.list(f"{LOGS_DIR}/{job}/"):
            if match := re.fullmatch(r".*/([0-9]+)-([0-9]+)\.txt", stat.key):
                tries.setdefault(int(match[1]), []).append((int(match[2]), stat.key))
        back = 2 if previous else 1
        for index, found in sorted(tries.items()):
            if len(found) >= back and (indexes is None or index in indexes):
                data = self._read(sorted(found)[-back][1]) or b""
                yield from (LogLine(index, text) for text in data.decode("utf-8", "replace").splitlines())

    def settle(self) -> None:
        """Finalise or refuse, if every index has a commit and nobody has done it; idempotent.

        Raises StoreError where OUT cannot be written.
        """
        from tokenizer.shard import close

        close(self.store)

    # ---- writes of a submit

    def lock(self, plan: Plan) -> Plan:
        """PUT plan.json if OUT has none: who writes it owns OUT. Returns the plan that holds, mine or another's."""
        try:
            created = self.store.put_bytes(PLAN, plan.to_json(), if_none_match=True).created
        except StoreError as error:
            raise PreflightError(f"OUT cannot be written: {error.message}", error.hint) from None
        if created:
            self._plan = plan
            return plan
        there = self.plan()
        if there is None:
            raise ApiError(f"`{self.uri}/{PLAN}` was removed while it was read", "run the command again")
        return there

    def put_tokenizer(self, model: Model) -> None:
        """Upload the tokenizer files, and repair what another write has broken."""
        for name, data in sorted(model.files.items()):
            key = f"{TOKENIZER_DIR}/{name}"
            if self._read(key) != data:
                self.store.put_bytes(key, data)

    def put_run(self, record: RunRecord) -> None:
        """PUT runs/<job>.json before its Job; raises TakenError when another submit was faster."""
        if not self.store.put_bytes(run_name(record.run), record.to_json(), if_none_match=True).created:
            raise TakenError(
                f"run `{record.run}` was started by someone else just now", "look at it with `dflashctl status`"
            )

    # ---- reading

    def _read(self, key: str) -> bytes | None:
        try:
            return self.store.get_bytes(key)
        except NotFound:
            return None

    def _record(self, key: str) -> dict[str, Any] | None:
        value = self._json(key)
        if value is None or value.get("contract") == CONTRACT:
            return value
        version = value.get("contract")
        what = "is not a record of this tool" if version is None else f"has contract version {version}"
        raise JobError(
            Exit.CONFIG,
            f"`{self.store.uri(key)}` {what}, expected {CONTRACT}",
            "use the release that wrote this dataset",
        )

    def _json(self, key: str) -> dict[str, Any] | None:
        data = self._read(key)
        return None if data is None else _parse(key, data)

    def _read_all(self, keys: list[str]) -> Mapping[str, bytes]:
        """The objects of those keys; few one by one, many by several threads with a store each."""
        if len(keys) < THREADS:
            return {key: data for key in keys if (data := self._read(key)) is not None}

        def some(part: list[str]) -> dict[str, bytes]:
            other = Out(self.uri, self._options)
            return {key: data for key in part if (data := other._read(key)) is not None}

        with ThreadPoolExecutor(THREADS) as pool:
            parts = list(pool.map(some, [keys[i::THREADS] for i in range(THREADS)]))
        found = {key: data for part in parts for key, data in part.items()}
        return {key: found[key] for key in keys if key in found}


def _parse(key: str, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ApiError(f"`{key}` of OUT is not a JSON object", "OUT was written to by something else")
    return value
