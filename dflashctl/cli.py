"""The command line: parse, call, print. Every verb lives in `dflashctl.commands`; every end goes through `main`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer

from dflashctl import interrupt, show
from dflashctl.commands import balance, common, data, logs, models, report, steer, submit, train, watch
from dflashctl.errors import Detached, describe

EPILOG = (
    "Exit codes: 0 ok, 1 API or internal, 2 usage, 3 run failed or refused, 4 preflight, 5 OUT or name taken by "
    "another spec, 124 timeout, 130 Ctrl-C (the run goes on)."
)


def build() -> typer.Typer:
    """The application with all its verbs."""
    app = typer.Typer(
        name="dflashctl",
        help="Train DFlash drafters on your own target.",
        epilog=EPILOG,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        invoke_without_command=True,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(common.root)
    submit.add(app)
    train.add(app)
    watch.add(app)
    logs.add(app)
    steer.add(app)
    data.add(app)
    report.add(app)
    balance.add(app)
    models.add(app)
    return app


def normalise(argv: Sequence[str]) -> list[str]:
    """`--dry-run` alone means `--dry-run=client`: an option with an optional value takes it after `=` only."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    return ["--dry-run=client" if arg == "--dry-run" and i < end else arg for i, arg in enumerate(argv)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Nothing but data goes to stdout, and no stack trace anywhere."""
    arguments = normalise(sys.argv[1:] if argv is None else argv)
    try:
        code: Any = build()(arguments, prog_name="dflashctl", standalone_mode=False)
    except BrokenPipeError:
        # The reader of stdout has gone (`| head`): nobody is left to tell.
        sys.stdout = None  # type: ignore[assignment]
        return 1
    except (Exception, KeyboardInterrupt) as error:
        told = getattr(error, "format_message", None)
        if callable(told):  # what the parser refuses; its class is not public
            context = getattr(error, "ctx", None)
            path = getattr(context, "command_path", "dflashctl") or "dflashctl"
            show.fail(told().rstrip("."), f"see `{path} --help`")
            return 2
        code, message, hint = describe(error)
        if isinstance(error, Detached | KeyboardInterrupt):  # what was asked for
            show.say(message + (f"; {hint}" if hint else ""))
        else:
            show.fail(message, hint)
        return int(code)
    if code == interrupt.CODE:  # the parser takes Ctrl-C for an exit of its own, without a word
        show.say(interrupt.WORDS)
    return int(code or 0)
