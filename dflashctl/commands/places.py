"""The flags that say where the pods of a Job go; the same for every verb that submits one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Image = Annotated[str | None, typer.Option("--image", metavar="REF", help="Image of the pods, REF@sha256:...")]
Node = Annotated[str | None, typer.Option("--node", metavar="NAME", help="Node profile, [node.NAME] of dflash.toml.")]
Queue = Annotated[str | None, typer.Option("--queue", metavar="NAME", help="Kueue queue.")]
Env = Annotated[list[str] | None, typer.Option("--env", metavar="K=V", help="Variable of the pods; no secrets.")]
S3Secret = Annotated[str | None, typer.Option("--s3-secret", metavar="NAME", help="Secret with the S3 credentials.")]
Account = Annotated[str | None, typer.Option("--service-account", metavar="NAME", help="Identity of the pods.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="One field of the Job; repeated.")]
DryRun = Annotated[
    str | None,
    typer.Option("--dry-run", metavar="[client|server]", help="Print what would be submitted; send nothing."),
]


def place_flags(
    image: str | None,
    node: str | None,
    queue: str | None,
    env: list[str] | None,
    s3_secret: str | None,
    service_account: str | None,
    set_: list[str] | None,
) -> dict[str, Any]:
    """By the names of the settings; raises UsageError for an --env that is not NAME=VALUE."""
    from dflashctl.place import parse_env

    return {
        "image": image,
        "node": node,
        "queue": queue,
        "env": parse_env(env) if env else None,
        "s3_secret": s3_secret,
        "service_account": service_account,
        "set": set_,
    }


def check_side(dry_run: str | None) -> None:
    """Raises UsageError unless the side of a dry run is known."""
    from dflashctl.errors import UsageError

    if dry_run not in (None, "client", "server"):
        raise UsageError(f"`--dry-run` is {dry_run!r}", "known are client, server")
