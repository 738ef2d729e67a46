"""The first rows that some inputs would give, as JSON lines on stdout for the CLI to colour; nothing is written."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizer import workers
from tokenizer.convert import Converter, spans
from tokenizer.index import load_model, name_all
from tokenizer.job import PREVIEW_REJECTS as REJECTS
from tokenizer.job import Exit, JobError, Obj, PreviewArgs, Spec
from tokenizer.read import Chunk, LineReader, Refused
from tokenizer.requests import Spool
from tokenizer.scratch import scratch
from tokenizer.store import Options, StoreError, locate

ONCE = Options(patience=20)


def rows(args: PreviewArgs) -> Iterator[dict[str, Any]]:
    """Kept rows, at most `args.rows`, and the rejects between them, in input order; see PreviewArgs.

    Ends at the REJECTS-th reject: input of which nothing is kept is not read to its end.
    """
    spec = Spec(
        tokenizer={},
        loss_on=args.loss_on,
        preserve_thinking=args.preserve_thinking,
        template_kwargs=args.template_kwargs or {},
        min_loss_tokens=args.min_loss_tokens,
        max_length=args.max_length,
    )
    model = load_model(Path(args.tokenizer), spec, 0)
    left, rejects = args.rows, REJECTS
    with scratch() as folder:
        lookup = None
        if args.batch_inputs:
            spool = Spool(folder / "requests.sqlite")
            _, refused = spool.fill([_obj(uri) for uri in args.batch_inputs], ONCE)
            if refused:
                name_all(refused[0], refused[0].key, {refusal.key: refusal for refusal in refused})
                raise refused[0]
            lookup = spool.lookup()
        for uri in args.objects:
            store, key = locate(uri, ONCE)
            converter = Converter(uri.rpartition("/")[2], model.encoder, model.renderer, model.options, spec, lookup)
            for chunk in LineReader(store.open_stream(key), uri):
                for number, raw in chunk.numbered():
                    for record in _records(converter, Chunk(number, [raw])):
                        yield record
                        left -= record["rejected"] is None
                        rejects -= record["rejected"] is not None
                        if not left or not rejects:
                            return


def _records(converter: Converter, line: Chunk) -> Iterator[dict[str, Any]]:
    for output in converter.chunk(line):
        for row in output.batch.to_pylist() if output.batch is not None else []:
            ids, mask = row["input_ids"], row["loss_mask"]
            segments = [{"text": converter.encoder.decode(ids[a:b]), "loss": learnt} for a, b, learnt in spans(mask)]
            yield {
                "id": row["id"],
                "source_id": row["source_id"],
                "tokens": len(ids),
                "loss_tokens": row["n_loss"],
                "segments": segments,
                "rejected": None,
            }
        for text in output.rejects.splitlines():
            reject = json.loads(text)
            turn = "" if reject["turn"] is None else f"#{reject['turn']}"
            yield {
                "id": f"{reject['object']}:{reject['line']}{turn}",
                "segments": [],
                "rejected": {"reason": reject["reason"], "detail": reject["detail"]},
            }


def _obj(uri: str) -> Obj:
    store, key = locate(uri, ONCE)
    stat = store.stat(key)
    if stat is None:
        raise JobError(Exit.DATA, f"{uri}: no such object", "check the spelling")
    return Obj(uri, stat.size, stat.etag, uri)


def main(argv: list[str]) -> int:
    """`python -m tokenizer preview`: rows on stdout, at most one line on stderr."""
    try:
        for record in rows(PreviewArgs.from_argv(argv)):
            print(json.dumps(record, ensure_ascii=False), flush=True)
    except BrokenPipeError:
        return int(Exit.OK)
    except (JobError, ValueError, OSError) as error:
        known = JobError(Exit.USAGE, str(error)) if isinstance(error, ValueError) else error
        code, text, hint, _ = workers.describe(known)
        if isinstance(error, Refused):  # there is no run that could leave it out
            hint = f"{error.mend}, or leave it out"
        elif isinstance(error, StoreError) and error.kind == "changed":
            hint = "run it again"
        print(f"error: {text}" + (f"\nhint: {hint}" if hint else ""), file=sys.stderr)
        return int(code)
    return int(Exit.OK)
