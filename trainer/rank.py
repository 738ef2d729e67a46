"""One rank, from its flags to its exit code: load, train, measure, save, export.

A target rank serves until no drafter wants any more. Drafter ranks hold the same parameters at every step; the first of
them, the leader, also logs, saves and exports. SIGTERM ends a step at its end, and a walk between two micro-batches;
the last step is saved, and the exit code is 143.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from tokenizer.job import Exit, JobError
from tokenizer.store import Store, open_store
from trainer import checkpoint
from trainer.board import Board, Phase
from trainer.cache import check_unchanged
from trainer.checkpoint import Snapshot, Writer
from trainer.config import DrafterConfig
from trainer.data import Dataset, Index
from trainer.drafter import Drafter
from trainer.export import load_drafter, write_speculators, write_zlab
from trainer.job import TrainArgs, parse_cadence
from trainer.link import Groups, World, meet
from trainer.loop import Learner, Rank, Rules, Step, acceptance, run_target, source_for
from trainer.loss import Objective, default_gamma
from trainer.metrics import NOTHING, Metrics, cut_back
from trainer.optim import AdamW
from trainer.prepare import INDEX, PROVENANCE, STORE, Ready, schedule
from trainer.target import Target

PROGRESS_SECONDS = 10.0  # between two progress lines
EXPORT, SPECULATORS = "export", "export-speculators"
SERVED_TOLERANCE = 0.10  # share by which the exported drafter's tau may lie below the trained one's, beside chance

Tell = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Place:
    """A rank of a training: who it is and what it was given. tell: sends an event to the supervisor."""

    args: TrainArgs
    ready: Ready
    world: World
    number: int
    board: Board
    work: Path
    tell: Tell


class Stop:
    """Remembers a SIGTERM."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor passes it on as a SIGTERM

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True


def run(place: Place) -> int:
    """The whole life of a rank; its exit code. Raises JobError."""
    world, number, board, args = place.world, place.number, place.board, place.args
    stop = Stop()
    torch.set_num_threads(max(1, torch.get_num_threads() // world.size))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    board.beat(number, Phase.LOAD)
    config = DrafterConfig.from_dict(place.ready.config)
    index = Index.load(place.work / INDEX)
    dataset = Dataset([Path(path) for path in place.ready.paths], args.max_length)
    target = None
    if world.colocated or world.is_target(number):
        disable_progress_bar()
        target = Target.load(place.ready.target, config.target_layer_ids, dtype=dtype, device=device)
    store = dist.FileStore(str(place.work / "ranks"), world.size)  # type: ignore[attr-defined]
    with board.waiting(number):
        groups = Groups(world, device, store, number)
    plan = schedule(args, index)
    rank = Rank(world, groups, board, dataset, index, plan, finals=2)
    with board.waiting(number):
        embed, head = frozen(groups, target, config, device, dtype)
    if target is not None and not world.colocated:
        run_target(rank, target, place.ready.start)
        with board.waiting(number):
            groups.close()
        return int(Exit.OK)
    learner, counts = make_learner(rank, place, target, config, embed, head)
    code = Student(place, rank, learner, stop, counts).run()
    with board.waiting(number):
        groups.close()
    return code


def frozen(
    groups: Groups, target: Target | None, config: DrafterConfig, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The target's embedding and head [V, H]; from rank 0 where this rank has no target."""
    if groups.world.colocated and target is not None:
        return target.embed_VH, target.head_VH
    if groups.heads is None:
        return torch.empty(0), torch.empty(0)
    tied = torch.zeros(1, dtype=torch.int32)
    if target is not None:
        embed, head = target.embed_VH.contiguous(), target.head_VH.contiguous()
        tied[0] = embed.data_ptr() == head.data_ptr()
    else:
        embed = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        head = embed
    dist.broadcast(tied, 0, group=groups.heads)
    dist.broadcast(embed, 0, group=groups.heads)
    if not tied.item():
        head = head if target is not None else torch.empty_like(embed)
        dist.broadcast(head, 0, group=groups.heads)
    return embed, head


def make_learner(
    rank: Rank, place: Place, target: Target | None, config: DrafterConfig, embed: Tensor, head: Tensor
) -> tuple[Learner, dict[str, int]]:
    """Drafter and optimiser, from the checkpoint, from --init-from, or from the seed; and what was trained so far."""
    args, ready = place.args, place.ready
    if args.init_from and not ready.checkpoint:
        drafter = load_drafter(Path(args.init_from), dtype=torch.float32)
    else:
        drafter = Drafter(config).init(args.seed)
    optimizer = AdamW(drafter.to(device=embed.device, dtype=embed.dtype))
    counts = dict(NOTHING)
    if ready.checkpoint:
        snapshot = checkpoint.read(Path(ready.checkpoint))
        optimizer.restore(snapshot.state, snapshot.updates)
        counts |= snapshot.counters
    rules = Rules(args.seed, args.anchors, args.lr, args.schedule, Objective(default_gamma(config.block_size)))
    width = len(config.target_layer_ids) * config.hidden_size
    source = source_for(rank, target, ready.start, width, embed.dtype)
    return Learner(rank, drafter, optimizer, rules, source, embed, head), counts


class Student:
    """A drafter rank's way through the steps."""

    def __init__(self, place: Place, rank: Rank, learner: Learner, stop: Stop, counts: dict[str, int]) -> None:
        """counts: what has been trained so far, counted on."""
        self.place, self.rank, self.learner, self.stop, self.counts = place, rank, learner, stop, counts
        self.leads = rank.me == rank.world.leader
        self.every, self.seconds = parse_cadence(place.args.checkpoint_every)
        self.saved_at = self.said_at = time.monotonic()
        self.kept = place.ready.start  # the step that was saved last
        self.local = Path(place.ready.local)
        self.writer: Writer | None = None
        self.metrics: Metrics | None = None

    def run(self) -> int:
        ready, plan = self.place.ready, self.rank.plan
        if self.leads:
            lost = cut_back(self.local, ready.start)
            if ready.start:
                self._say(f"goes on after step {ready.start} of {plan.total}; {lost} steps are done again")
            config = self.learner.drafter.config
            self.writer = Writer(
                self._store(), self.local, config, ready.identity, self._say, ready.remote, ready.start
            )
            self.metrics = Metrics(self.local, self.rank.world, self.rank.board, plan.total, self.counts)
        for number in range(ready.start, plan.total):
            if plan.measured_after(number) and not self._measured(number):
                return self._stopped(number)
            found = self.learner.step(number, stop=self.stop.asked, save=self._due(number + 1))
            self._after(found)
            if found.stop:
                self.learner.source.close()
                return self._stopped(number + 1)
        return int(Exit.OK) if self._finish() else self._stopped(plan.total)

    def _measured(self, steps: int) -> bool:
        """Walk the held-out rows after so many steps, apart from any step's time; False where a stop broke it off."""
        with self.metrics.apart() if self.metrics else nullcontext():
            counts = self.learner.measure(self.learner.drafter, steps, self._asked)
        if self.metrics and counts is not None:
            self.metrics.measured(steps, counts)
        return counts is not None

    def _asked(self) -> bool:
        return self.stop.asked

    def _store(self) -> Store:
        return open_store(self.place.args.out, STORE)

    def _say(self, text: str) -> None:
        self.place.tell({"event": "note", "message": text})

    def _due(self, steps: int) -> bool:
        """Whether the leader wants a checkpoint after so many steps."""
        if not self.leads:
            return False
        if self.every:
            return steps % self.every == 0
        return time.monotonic() - self.saved_at >= self.seconds

    def _after(self, found: Step) -> None:
        if not (self.metrics and self.writer):
            return
        self.metrics.step(found)
        self.writer.check()
        if found.save or found.stop or found.number + 1 == self.rank.plan.total:
            self._save(found.number + 1)
        ends = found.number in (self.place.ready.start, self.rank.plan.total - 1)
        if ends or time.monotonic() - self.said_at >= PROGRESS_SECONDS:
            self.said_at = time.monotonic()
            self.progress()

    def progress(self) -> None:
        if self.metrics and self.writer:
            self.place.tell({"event": "progress", **self.metrics.last, "saved_step": self.writer.saved})

    def _save(self, steps: int) -> None:
        assert self.writer
        check_unchanged(self.place.ready.shards)
        self.saved_at, self.kept = time.monotonic(), steps
        optimizer = self.learner.optimizer
        state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in optimizer.state().items()}
        self.writer.submit(Snapshot(steps, optimizer.updates, state, dict(self.counts)))

    def _close_writer(self) -> None:
        if self.writer:
            self.rank.board.beat(self.rank.me, Phase.SAVE)
            self.writer.close()
            self.progress()
        if self.metrics:
            self.metrics.close()

    def _stopped(self, steps: int) -> int:
        if self.leads and self.kept != steps:
            self._save(steps)
        self._close_writer()
        if self.leads:
            self._say(f"stopped after step {steps} of {self.rank.plan.total}, which is saved")
        return int(Exit.SIGTERM)

    def _finish(self) -> bool:
        """Measure, save, export, and measure what was exported; False where a stop broke off one of the walks."""
        plan, learner = self.rank.plan, self.learner
        if self.leads:
            self._say("every step is done: measuring, exporting, measuring what was exported")
        trained = learner.measure(learner.drafter, plan.total, self._asked)
        if trained is None:
            return False
        if self.metrics:
            self.metrics.measured(plan.total, trained)
        if self.leads:
            self._export(acceptance(trained))
        with self.rank.board.waiting(self.rank.me):
            meet(self.rank.groups.drafters)
        exported = load_drafter(
            self.local / EXPORT, dtype=learner.embed_VH.dtype, device=learner.embed_VH.device
        ).eval()
        served = learner.measure(exported, plan.total, self._asked)
        if served is None:
            return False
        if self.metrics:
            self.metrics.measured(plan.total, served, "exported_tau")
        compare(trained, served)
        self._close_writer()
        if self.leads:
            self._conclude(acceptance(trained), acceptance(served))
        return True

    def _export(self, tau: float | None) -> None:
        self.rank.board.beat(self.rank.me, Phase.EXPORT)
        for left in self.local.glob(f".{EXPORT}*"):  # half an export, by a try that was killed
            shutil.rmtree(left, ignore_errors=True)
        drafter, story = self.learner.drafter, {**self.place.ready.story, "held_out_tau": tau}
        write_zlab(drafter, self.local / EXPORT, story)
        here, told = self.place.ready.target, self.place.args.target
        known_as = "" if here == told else told.partition("@")[0]
        try:
            write_speculators(drafter, self.local / SPECULATORS, here, story, known_as)
        except JobError as error:
            if error.code != Exit.CONFIG:
                raise
            self._say(f"no {SPECULATORS}: {error.message}")

    def _conclude(self, tau: float | None, served: float | None) -> None:
        """Send what is not in OUT yet; provenance.json last: with it the training is complete."""
        store, ready = self._store(), self.place.ready
        if ready.remote:
            for folder in (EXPORT, SPECULATORS):
                for path in sorted((self.local / folder).glob("*")):
                    store.upload_file(path, f"{folder}/{path.name}")
            checkpoint.push_figures(store, self.local)
        story = {**ready.story, "finished": True, "steps": self.rank.plan.total}
        story |= {"held_out_tau": tau, "exported_tau": served}
        text = json.dumps(story, indent=2, sort_keys=True) + "\n"
        store.put_bytes(PROVENANCE, text.encode())
        self.place.tell({"event": "finished", "steps": self.rank.plan.total, "held_out_tau": tau})


def compare(trained: list[int], served: list[int]) -> None:
    """Raises JobError(70) where the exported drafter is clearly worse on held-out rows than the trained one."""
    before, after = acceptance(trained), acceptance(served)
    if before is None or after is None:
        return
    blocks = sum(served)
    spread = math.sqrt(sum(count * (size - after) ** 2 for size, count in enumerate(served)) / blocks)
    if after < before * (1 - SERVED_TOLERANCE) - 3 * spread / math.sqrt(blocks):
        raise JobError(
            Exit.SELF_CHECK,
            f"held-out acceptance is {before:.2f} in training and {after:.2f} with the exported files",
            "the files do not hold the drafter that was trained",
        )
