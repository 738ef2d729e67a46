"""`python -P -m tokenizer VERB`: `run` is what a pod does, `pool` the local backend, `preview` rows for human eyes,
`check` whether a model's files can be used.
"""

from __future__ import annotations

import sys

from tokenizer.job import Exit

VERBS = ("run", "pool", "preview", "check")


def main(argv: list[str]) -> int:
    """Exit code of one verb; imports only what that verb needs."""
    verb, *rest = argv or [""]
    if verb == "run":
        from tokenizer import pod

        return pod.main(rest)
    if verb == "pool":
        from tokenizer import pool

        return pool.main(rest)
    if verb == "preview":
        from tokenizer import preview

        return preview.main(rest)
    if verb == "check":
        from tokenizer import check

        return check.main(rest)
    print(f"error: unknown verb `{verb}`, expected one of {', '.join(VERBS)}", file=sys.stderr)
    return int(Exit.USAGE)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
