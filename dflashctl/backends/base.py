"""What a place that runs Jobs must be able to do; the verbs know no more about it than this.

A *run* has one name for ever; its Jobs are `<run>`, `<run>-r2`, ... and only the newest one counts. Every index here is
the plan's index. A backend knows processes (or pods), never datasets: what OUT holds is read by `dflashctl.records`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from dflashctl.progress import Snapshot
from dflashctl.why import Cause

BACKENDS = ("local", "kube")


@dataclass(frozen=True, slots=True)
class Submission:
    """One Job to start: the plan's indexes `indexes` of OUT, of which `parallelism` run at once.

    argv is the container's (`TokenizeArgs.to_argv`); job is the name of the Job, run the name that people use.
    spec_sha256: digest of the declaration; flags: what of `Backend.flags` this Job is started with.
    """

    run: str
    job: str
    out: str
    argv: tuple[str, ...]
    indexes: tuple[int, ...]
    parallelism: int
    kind: str = "tokenize"
    model: str = ""
    spec_sha256: str = ""
    flags: Mapping[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """What `--dry-run` shows and what a backend keeps."""
        return {**asdict(self), "argv": list(self.argv), "indexes": list(self.indexes)}


@dataclass(frozen=True, slots=True)
class Known:
    """A run that a backend remembers; `created` is Unix seconds. home: where another directory keeps its state; away:
    in words, where it was last started if that cannot be asked from here.
    """

    run: str
    kind: str
    out: str
    job: str
    created: float
    home: str = ""
    away: str = ""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One whole line of what an index printed, without its newline."""

    index: int
    text: str


class Backend(Protocol):
    """Effects, all of them; raises CliError with a remedy when it cannot."""

    @property
    def name(self) -> str:
        """As `--backend` spells it."""

    @property
    def words(self) -> str:
        """What is said of it first."""

    @property
    def pauses(self) -> Sequence[float]:
        """Seconds between two looks: soon for a run of seconds, calm for one of hours."""

    def flags(self, last: Mapping[str, Any]) -> dict[str, Any]:
        """The operational settings of the next Job, given those of the run's last one; kept in the run record."""

    def exclusive(self) -> AbstractContextManager[None]:
        """From the look at what runs to the start of the next Job: of two commands the second sees the first's Job."""

    def check(self, submission: Submission) -> None:
        """Refuse what could not be submitted, before anything is written anywhere; raises CliError."""

    def submit(self, submission: Submission) -> None:
        """Start the Job and return at once; the Job outlives the caller."""

    def render(self, submission: Submission) -> dict[str, Any]:
        """What `submit` would start, as a document; nothing is sent."""

    def runs(self) -> list[Known]:
        """Every run this backend remembers, newest first."""

    def snapshot(self, run: str) -> Snapshot | None:
        """Where the newest Job of the run stands; None: this backend does not know the run."""

    def logs(self, run: str, indexes: Sequence[int] | None, previous: bool, follow: bool) -> Iterator[LogLine]:
        """What the indexes (None: all) printed in their newest try, or in the one before it (`previous`).

        With `follow` it goes on until the Job has ended.
        """

    def stop(self, run: str) -> None:
        """Suspend the Job: its processes get SIGTERM; returns when they have ended."""

    def unsuspend(self, run: str) -> None:
        """Let a suspended Job go on where it stopped; returns at once."""

    def scale(self, run: str, parallelism: int) -> int:
        """Change how many indexes of the running Job run at once; returns how many that Job can use of them."""

    def remove(self, run: str) -> None:
        """Forget the run, its Jobs and their pods or processes; OUT is never touched."""

    def why(self, run: str) -> list[Cause]:
        """Why the newest Job stands still or failed, most weighty first."""

    def bundle(self, run: str) -> dict[str, Any]:
        """Everything `why` looks at, for a report of a defect."""
