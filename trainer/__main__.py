"""`python -P -m trainer VERB`: what the CLI's child processes and the self-check run."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tokenizer.job import Exit, JobError
from trainer.job import EvalArgs, ExportArgs, TrainArgs


def _run(verb: str, argv: list[str]) -> int:
    """Exit code of a verb, whose module is imported only once its flags are right."""
    if verb == "eval":
        args = EvalArgs.from_argv(argv)
        from trainer.evaluate import run as evaluate

        evaluate(args)
    elif verb == "export":
        export_args = ExportArgs.from_argv(argv)
        from trainer.export import run as export

        export(export_args)
    elif verb == "train":
        train_args = TrainArgs.from_argv(argv)
        # The first process of a container never gets a signal that it does not handle, and the imports take seconds.
        signal.signal(signal.SIGTERM, _leave)
        from trainer.supervisor import Supervisor

        return Supervisor(train_args).run()
    elif verb == "check":
        from trainer.check import main as check

        return check(argv)
    elif verb == "pool":
        from trainer.pool import main as pool

        return pool(argv)
    elif verb == "selfcheck" and len(argv) == 2:
        from trainer.selfcheck import compare

        compare(Path(argv[0]), Path(argv[1]))
    else:
        raise JobError(
            Exit.USAGE, f"`{verb}` is no verb of the trainer", "train, check, pool, eval, export or selfcheck"
        )
    return int(Exit.OK)


def _leave(number: int, frame: object) -> None:
    """Nothing has begun yet."""
    os._exit(int(Exit.SIGTERM))


def main(argv: list[str]) -> int:
    """Exit code of a verb; a refusal is one line and its hint on stderr."""
    try:
        return _run(argv[0] if argv else "", argv[1:])
    except JobError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return int(error.code)
    return int(Exit.OK)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
