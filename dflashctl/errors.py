"""One tree of exceptions, so that every way to end has one exit code and one look.

A message is one line in plain words, without a full stop, names in backticks; `hint` names the remedy. The codes are
part of the command line's contract: scripts branch on them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from dflashctl import interrupt

_SECRET_NAME = re.compile(
    r"(?:^|_)(?:SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIALS?|PRIVATE_KEY|API_KEY|ACCESS_KEY)(?:_|$)(?!.*(?:FILE|URI)$)"
)
#: `user:password@` of a URL, and what a client library quotes of a header that it could not send.
_SHOWN = re.compile(r"(?<=://)[^/\s@:]+:[^/\s@]+(?=@)|(?<=[Bb]earer )[^\s'\"]+(?:\\n[^\s'\"]*)*")
_HIDDEN = "[hidden]"


class CliError(Exception):
    """Something the user can act on; `code` is the exit code of the process."""

    code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ApiError(CliError):
    """The backend, the store or this program could not answer (exit 1)."""


class UsageError(CliError):
    """A flag, a variable or a key of dflash.toml is wrong (exit 2)."""

    code = 2


class RunFailed(CliError):
    """The run failed or its dataset was refused (exit 3)."""

    code = 3


class PreflightError(CliError):
    """Model, input, credentials or permissions are not there; nothing was started (exit 4)."""

    code = 4


class TakenError(CliError):
    """OUT or the name belongs to another spec (exit 5)."""

    code = 5


class TimedOut(CliError):
    """`wait --timeout` ran out; the run goes on (exit 124)."""

    code = 124


class Detached(CliError):
    """Ctrl-C; the run goes on (exit 130)."""

    code = 130


def secrets_of(env: Mapping[str, str]) -> list[str]:
    """Values of variables whose names speak of secrets, longest first; short ones are words, not secrets."""
    found = {value for name, value in env.items() if _SECRET_NAME.search(name.upper()) and len(value) >= 8}
    return sorted(found, key=len, reverse=True)


def redact(text: str, secrets: list[str]) -> str:
    """`text` without the given values, without `user:password@` in URLs and without tokens of headers."""
    for secret in secrets:
        text = text.replace(secret, _HIDDEN)
    return _SHOWN.sub(_HIDDEN, text)


def describe(error: BaseException) -> tuple[int, str, str]:
    """(exit code, message, hint) of whatever ended the program; never a stack trace, never a secret."""
    from tokenizer.job import Exit, JobError  # here: the help text must not wait for it

    if isinstance(error, CliError):
        code, message, hint = error.code, error.message, error.hint
    elif isinstance(error, JobError):
        # The store and the contract raise these: what no pod could use either is a preflight that failed.
        known = {Exit.CONFIG: 4, Exit.DATA: 4, Exit.USAGE: 2}
        code, message, hint = known.get(error.code, 1), error.message, error.hint
        if getattr(error, "kind", "") in ("credentials", "denied", "bucket", "endpoint"):
            code = 4
    elif isinstance(error, KeyboardInterrupt):
        code, message, hint = interrupt.CODE, interrupt.WORDS, ""
    elif isinstance(error, OSError):
        where = f"`{error.filename}`: " if error.filename else ""
        code, message, hint = 1, f"{where}{error.strerror or error}", ""
    else:
        import traceback

        frames = traceback.extract_tb(error.__traceback__)
        place = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
        code, message = 1, f"internal error: {type(error).__name__}: {error}{place}"
        hint = "this is a defect of dflashctl, please report the line above"
    secrets = secrets_of(os.environ)
    return code, redact(message, secrets), redact(hint, secrets)
