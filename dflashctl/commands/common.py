"""What every verb shares: the global options, before or after the verb, and the settings they lead to."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashctl import show
from dflashctl.errors import UsageError

if TYPE_CHECKING:  # help must not wait for what only a verb needs
    from dflashctl.backends.base import Backend, Known
    from dflashctl.config import Settings
    from dflashctl.records import Out

GLOBALS: dict[str, Any] = {
    "backend": Annotated[str | None, typer.Option("--backend", metavar="NAME", help="Where runs go: local or kube.")],
    "context": Annotated[str | None, typer.Option("--context", metavar="NAME", help="Kubeconfig context.")],
    "namespace": Annotated[str | None, typer.Option("--namespace", "-n", metavar="NS", help="Default: the context's.")],
    "config_file": Annotated[str | None, typer.Option("--config", metavar="FILE", help="Default: ./dflash.toml.")],
    "output": Annotated[
        str | None, typer.Option("--output", "-o", metavar="FORMAT", help="table, wide, json, yaml or name.")
    ],
}

LONG_NAMESPACE = Annotated[str | None, typer.Option("--namespace", metavar="NS", help="Default: the context's.")]

LATEST = "@latest"
RunRef = Annotated[str, typer.Argument(metavar="RUN", help="A run's name, @latest, or the URI of its OUT.")]


@dataclass(frozen=True, slots=True)
class Session:
    """One invocation: its settings, and how its result is printed."""

    settings: Settings
    output: str

    def backend(self, kind: str = "tokenize", flags: Mapping[str, Any] | None = None) -> Backend:
        """The chosen backend, said first. flags: those of a verb that submits a Job of that kind.

        Nothing is asked of a cluster yet; a context that is not in the kubeconfig is a UsageError.
        """
        from dflashctl.backends.choice import choose

        backend = choose(self.settings, kind, flags or {})
        show.say(backend.words)
        if backend.name == "local" and (unused := unused_here(flags or {})):
            show.say(f"{', '.join(unused)}: not used by the local backend")
        return backend


def version(asked: bool) -> None:
    """Print the release and leave, before any verb is looked at."""
    if asked:
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as installed

        try:
            show.out(f"dflashctl {installed('dflashctl')}")
        except PackageNotFoundError:
            show.out("dflashctl, not installed: run from its sources")
        raise typer.Exit


def root(
    ctx: typer.Context,
    backend: str | None = None,
    context: str | None = None,
    namespace: str | None = None,
    config_file: str | None = None,
    output: str | None = None,
    version_: bool = False,
) -> None:
    """Keep the global options that stand before the verb."""
    ctx.obj = {
        "backend": backend,
        "context": context,
        "namespace": namespace,
        "config_file": config_file,
        "output": output,
    }
    if ctx.invoked_subcommand is None:
        show.out(ctx.get_help())


root.__annotations__.update(GLOBALS)
root.__annotations__["version_"] = Annotated[
    bool, typer.Option("--version", help="Print the release.", is_eager=True, callback=version)
]


def verb(app: typer.Typer, **settings: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register a function of (session, own parameters) as a verb that also takes the global options.

    The function returns the exit code. A global option after the verb wins over the same one before it.
    """

    def register(function: Callable[..., int]) -> Callable[..., int]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        # in Annotated, typer keeps the first spelling of an option as its default
        infos = [info for p in own for info in getattr(p.annotation, "__metadata__", ())]
        taken = {spelling for info in infos for spelling in (info.default, *(info.param_decls or ()))}
        known = GLOBALS | ({"namespace": LONG_NAMESPACE} if "-n" in taken else {})
        extra = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in known.items()
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


def unused_here(flags: Mapping[str, Any]) -> list[str]:
    """The given flags that only say where pods go."""
    from dflashctl.config import PLACE

    return [f"--{key.replace('_', '-')}" for key in PLACE if flags.get(key)]


def opened(session: Session, reference: str) -> tuple[Backend, Known, Out]:
    """The backend, the run that is meant, and its OUT."""
    from dflashctl.records import QUICK, Out
    from dflashctl.runs import find

    backend = session.backend()
    known = find(reference, backend, session.settings)
    return keeper(backend, known), known, Out(known.out, QUICK)


def keeper(backend: Backend, known: Known) -> Backend:
    """The backend that keeps a run: those of this machine are also found from other directories."""
    if not known.home:
        return backend
    from pathlib import Path

    from dflashctl.backends.local import LocalBackend

    show.say(f"run {known.run} was started in {Path(known.home).parent}")
    return LocalBackend(Path(known.home))


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
