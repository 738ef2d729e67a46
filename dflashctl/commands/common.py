"""What every verb shares: the global options, before or after the verb, and the settings they lead to."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashctl import show
from dflashctl.errors import UsageError

if TYPE_CHECKING:  # help must not wait for what only a verb needs
    from dflashctl.backends.base import Backend
    from dflashctl.config import Settings

GLOBALS: dict[str, Any] = {
    "backend": Annotated[str | None, typer.Option("--backend", metavar="NAME", help="Where runs go: local.")],
    "config_file": Annotated[str | None, typer.Option("--config", metavar="FILE", help="Default: ./dflash.toml.")],
    "output": Annotated[
        str | None, typer.Option("--output", "-o", metavar="FORMAT", help="table, wide, json, yaml or name.")
    ],
}

LATEST = "@latest"
RunRef = Annotated[str, typer.Argument(metavar="RUN", help="A run's name, @latest, or the URI of its OUT.")]


@dataclass(frozen=True, slots=True)
class Session:
    """One invocation: its settings, and how its result is printed."""

    settings: Settings
    output: str

    def backend(self) -> Backend:
        """The chosen backend; its name is the first thing that is said."""
        from dflashctl.backends.base import open_backend

        chosen = self.settings.section("")["backend"]
        backend = open_backend(str(chosen.value or "local"))
        show.say(f"backend {backend.name}")
        return backend


def root(
    ctx: typer.Context, backend: str | None = None, config_file: str | None = None, output: str | None = None
) -> None:
    """Keep the global options that stand before the verb."""
    ctx.obj = {"backend": backend, "config_file": config_file, "output": output}
    if ctx.invoked_subcommand is None:
        show.out(ctx.get_help())


root.__annotations__.update(GLOBALS)


def verb(app: typer.Typer, **settings: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register a function of (session, own parameters) as a verb that also takes the global options.

    The function returns the exit code. A global option after the verb wins over the same one before it.
    """

    def register(function: Callable[..., int]) -> Callable[..., int]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        extra = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in GLOBALS.items()
        ]
        context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        parameters = [context, *own, *extra]

        @functools.wraps(function)
        def run(ctx: typer.Context, **given: Any) -> int:
            after = {name: given.pop(name) for name in GLOBALS}
            return function(open_session({k: v if v is not None else ctx.obj[k] for k, v in after.items()}), **given)

        # typer reads the signature and the annotations of what it is given, not of what that wraps.
        del run.__wrapped__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(**settings)(run)
        return function

    return register


def open_session(flags: dict[str, Any]) -> Session:
    """Settings and output format of one invocation; raises UsageError."""
    from dflashctl import config

    settings = config.load(flags.pop("config_file"), flags)
    chosen = settings.section("")["output"]
    if chosen.value not in show.FORMATS:
        raise UsageError(
            f"output format {chosen.value!r} ({chosen.origin}) is not known", f"known are {', '.join(show.FORMATS)}"
        )
    return Session(settings, str(chosen.value))


def seconds(text: str, name: str) -> float:
    """A duration such as `90s`, `10m`, `2h` or plain seconds; raises UsageError naming the flag."""
    unit = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    number, factor = (text[:-1], unit[text[-1]]) if text[-1:] in unit else (text, 1)
    try:
        value = float(number) * factor
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UsageError(f"`{name}` is {text!r}, not a duration", "write it as 90s, 10m or 2h")
    return value
