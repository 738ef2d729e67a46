"""Exit codes of both images, the reasons a line can be rejected for, and the two exceptions that carry them."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of both images; the renderer's podFailurePolicy is generated from them."""

    OK = 0
    USAGE = 64
    DATA = 65  # bad or refused data: this index cannot end, the others can
    SELF_CHECK = 70
    RANK_DIED = 71
    DISK_FULL = 73
    RETRY = 75
    DIVERGED = 76
    CONFIG = 78  # what every pod would hit: contract, credentials, tokenizer files
    SIGTERM = 143


MALFORMED = frozenset(
    {
        "invalid_json", "lone_surrogate", "unknown_dialect", "no_completion", "no_prompt", "bad_tool_arguments",
        "bad_finish_reason", "template_error", "foreign_token_ids", "reasoning_lost", "multimodal", "invalid_utf8",
        "line_too_long",
    }
)  # fmt: skip
FILTERED = frozenset({"unstable_boundary", "no_supervised_tokens", "too_few_loss_tokens", "truncated_away"})


class Reject(Exception):
    """One line or turn that is not taken; `reason` is a member of MALFORMED or FILTERED."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class JobError(Exception):
    """Ends a pod with `code`: one clear line for the user, with the remedy as `hint`."""

    def __init__(self, code: Exit, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
