"""One parsed JSON row of any known dialect -> one Conversation, or a Reject that names why not.

docs/dialects.md is the table of the dialects; `_take_apart` is the one order in which they are told apart. What is none
of them is refused with the keys that were seen, never half-read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

import orjson

from tokenizer.fields import (
    REASONING,
    SETTINGS,
    TOKEN_IDS,
    Json,
    kind,
    no_media,
    short,
    unknown,
    wrap_tools,
)
from tokenizer.job import Reject
from tokenizer.messages import ROLES, Builder, Conversation, Reply
from tokenizer.rollouts import Parts, batch, completion, ids_only, read_facts, responses, thinks

__all__ = ["Conversation", "Lookup", "Reply", "loads", "parse"]

Lookup = Callable[[str], Json | None]

REQUEST_ALONE = "a batch request without its response: it is read for --batch-input alone"
_BOM = b"\xef\xbb\xbf"
_LISTS = ("messages", "conversations", "message_log")
_ANSWERS = ("completion", "response", "output")
_SOURCE_IDS = ("custom_id", "id", "uid", "uuid", "prompt_id", "conversation_id", "question_id", "instance_id")
_PREFERENCE = frozenset(
    ("preferred_output", "non_preferred_output", "chosen", "rejected", "rejected_response", "rejected_messages")
)
# A row with no other key holds nothing beside its messages: the common case, told by one comparison.
_PLAIN = frozenset(("messages", "conversations", "id"))


def loads(line: bytes) -> object:
    """One line of JSONL -> its value. A byte order mark and a trailing CR are not part of the value.

    Raises Reject invalid_utf8, lone_surrogate or invalid_json with the place. NaN and infinities are not JSON; of a
    key given twice the last one counts; integers beyond 64 bits become floats.
    """
    if line.startswith(_BOM):
        line = line[len(_BOM) :]
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as e:
        _explain(line, e)


def _explain(line: bytes, error: orjson.JSONDecodeError) -> NoReturn:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as e:
        raise Reject("invalid_utf8", f"byte {e.start} of the line is not UTF-8 ({e.reason})") from None
    try:
        # The one thing that orjson refuses and this pair of calls tells from broken JSON.
        json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise Reject("lone_surrogate", f"half of a surrogate pair at character {error.pos} of the line") from None
    except (ValueError, RecursionError):
        pass
    raise Reject("invalid_json", f"{error.msg} (character {error.pos} of the line)".replace("\n", " "))


def parse(row: object, lookup: Lookup | None = None) -> Conversation:
    """Normalises one row.

    lookup: custom_id -> the line (or body) of the OpenAI batch request, for rows of batch output.
    Raises Reject for a line that cannot be taken; a turn that cannot be taken carries its Reject in `replies`.
    """
    if type(row) is not dict:
        unknown(f"a row must be a JSON object, not {kind(row)}")
    source_id = ""
    for name in _SOURCE_IDS:
        value = row.get(name)
        if type(value) is str or type(value) is int:
            source_id = str(value)
            break
    if row.keys() <= _PLAIN and len(row) - ("id" in row) == 1:
        parts = Parts([], row["messages"] if "messages" in row else row["conversations"])
        if type(parts.turns) is not list:
            unknown(f"{next(k for k in row if k != 'id')} is {kind(parts.turns)}, not a list")
    else:
        taken = _take_apart(row, lookup)
        if isinstance(taken, str):
            return _rendered(row, taken, source_id)
        parts = taken

    build = Builder()
    if parts.requests:
        _add_system(parts)
    for message in parts.context:
        build.add(message, learnt=False)
    start = len(build.messages)
    for message in parts.turns:
        build.add(message)
    conv = Conversation(build.messages, build.replies, source_id=source_id, asked=start)
    if parts.requests:
        _read_request(conv, parts.requests)
    last = max(conv.replies, default=-1)
    if parts.thought and last >= start and not thinks(conv, last):
        conv.replies[last].reject = conv.replies[last].reject or Reject(
            "reasoning_lost", f"reasoning in {parts.thought!r} beside the messages: put it into the message it is of"
        )
    if last < start and (not parts.facts or not ids_only(conv, parts.facts)):
        raise Reject("no_completion", "no assistant turn that was generated")
    if parts.facts:
        read_facts(conv, start, parts.facts)
    first = conv.messages[0]
    if first["role"] == "assistant":
        reply = conv.replies[0]
        if reply.prompt_token_ids is None:
            raise Reject("no_prompt", "the first message is the assistant's: nothing stands before it")
    elif first["role"] == "developer":
        first["role"] = "system"  # the newer name of the same thing; a later one is left to the template
    return conv


def _take_apart(row: Json, lookup: Lookup | None) -> Parts | str:
    """Tells the dialect, in this order; a str is a text that is already rendered."""
    if row.keys() & _PREFERENCE:
        unknown(f"a preference pair ({', '.join(sorted(row.keys() & _PREFERENCE))}): which side to learn is not said")
    no_media(row, "the row")
    metadata = row.get("metadata")
    more = [metadata] if type(metadata) is dict else []
    beside = [row, *more]

    if type(row.get("responses_create_params")) is dict:
        if type(row.get("response")) is not dict:
            raise Reject("no_completion", "a Responses-API request without its response")
        return _beside(responses(row["responses_create_params"], row["response"]), beside)
    if "custom_id" in row and (_is_batch(row.get("response")) or type(row.get("body")) is dict or row.get("error")):
        return _batch(row, lookup)
    if row.get("error") and isinstance(row["error"], (str, dict)):
        raise Reject("bad_finish_reason", f"the record is one of an error: {short(row['error'])}")
    if _holds_logs(row.get("expected_output")):
        raise Reject("no_completion", "message_log records of an environment test: token ids of prompts, no completion")
    for name in ("request", "body"):  # a logged exchange
        request = row.get(name)
        if type(request) is dict and type(row.get("response")) is dict:
            return _beside(_answered(request, row["response"]), beside)
    if row.get("object") == "response" and type(row.get("output")) is list:
        return _beside(responses(row, row), beside)
    if "choices" in row:
        return _beside(completion(row, row), beside)

    names = [name for name in _LISTS if row.get(name) is not None]
    if len(names) > 1 or (names and type(row[names[0]]) is not list):
        unknown(f"{' and '.join(names)}: one list of messages is needed, not {kind(row[names[-1]])}")
    if names:
        return _conversation(row, names[0], beside)
    served = any(row.get(key) for key in ("prompt_token_ids", "outputs", "meta_info", *TOKEN_IDS))
    text = type(row.get("text")) is str
    if served or ("prompt" in row and (not text or any(row.get(key) is not None for key in _ANSWERS))):
        return _prompted(row, row.get("prompt"), beside)
    if text:
        return str(row["text"])
    if "input_ids" in row or "labels" in row:
        unknown("already tokenised (input_ids) with no text to rebuild it from: its mask cannot be checked")
    unknown(f"none of the known dialects; keys: {', '.join(map(short, sorted(row)[:20])) or 'none'}")


def _beside(parts: Parts, beside: list[Json]) -> Parts:
    parts.facts = [*parts.facts, *beside]
    parts.requests = [*parts.requests, *beside]
    return parts


def _is_batch(response: object) -> bool:
    return type(response) is dict and ("body" in response or "status_code" in response)


def _batch(row: Json, lookup: Lookup | None) -> Parts:
    if row.get("response") is None and not row.get("error"):
        raise Reject("no_completion", REQUEST_ALONE)
    name = row["custom_id"]
    asked = lookup(name) if lookup is not None and type(name) is str else None
    parts = batch(row, asked)
    parts.requests.append(row)
    return parts


def _holds_logs(value: object) -> bool:
    return type(value) is list and any(type(v) is dict and "message_log" in v for v in value)


def _answered(request: Json, response: Json) -> Parts:
    request = request["body"] if type(request.get("body")) is dict else request
    response = response["body"] if type(response.get("body")) is dict else response
    if type(response.get("output")) is list:
        return responses(request, response)
    return completion(response, request)


def _conversation(row: Json, name: str, beside: list[Json]) -> Parts:
    messages = row[name]
    status = row.get("status")
    if name == "conversations" and status not in (None, "success"):
        why = f": {short(row['error'])}" if row.get("error") else ""
        raise Reject("bad_finish_reason", f"the record's status is {short(status)}, not success{why}")
    answers = [key for key in _ANSWERS if row.get(key) is not None]
    last = messages[-1] if messages else None
    role = last.get("role", last.get("from")) if type(last) is dict else None
    if name == "message_log" and not any(map(_answers, messages)):
        raise Reject("no_completion", "a message_log whose assistant turns have no content")
    if type(role) is str and ROLES.get(role) in ("user", "tool"):
        if answers or any(row.get(key) for key in (*TOKEN_IDS, "outputs", "meta_info")):
            return _prompted(row, messages, beside)
        return Parts([], messages, beside, beside)
    thought = next((name for name in REASONING if _is_thought(row.get(name))), "")
    for key in answers:
        said = row[key]
        other = type(said) is str and type(last) is dict and said not in (last.get("content"), last.get("value"))
        if other or (type(said) is dict and ("choices" in said or "output" in said)):
            unknown(f"{name} ends in an assistant turn and {key!r} says something else: which was generated?")
    return Parts([], messages, beside, beside, thought)


def _is_thought(value: object) -> bool:
    """Whether a field of that name holds text, and not how much was to be thought."""
    return type(value) is str and bool(value.strip()) and value.strip().lower() not in SETTINGS


def _answers(message: object) -> bool:
    return type(message) is dict and message.get("role") == "assistant" and bool(message.get("content"))


def _prompted(row: Json, prompt: object, beside: list[Json]) -> Parts:
    """`prompt` (text, a message or messages) and the completion of it under one of several names."""
    meta = row.get("meta_info")
    facts = [*([meta] if type(meta) is dict else []), *beside]
    given = [(key, row[key]) for key in _ANSWERS if row.get(key) is not None]
    name, answer = given[0] if given else ("", None)
    for key, other in given[1:]:
        if type(answer) is str and type(other) is str and answer and other and answer != other:
            unknown(f"{name} and {key} are two different answers: which was generated?")
    raw = False  # the server was given text, not a chat: a string prompt is not one user message then
    if answer is None and any(row.get(key) for key in ("text", "outputs", *TOKEN_IDS)):
        raw = True
        name, answer = "text", row.get("text")
        if "outputs" in row:
            chosen = row["outputs"]
            if type(chosen) is not list or len(chosen) != 1 or type(chosen[0]) is not dict:
                unknown("outputs must be a list of one object: write one line per completion")
            name, answer = "outputs[0].text", chosen[0].get("text")
            facts = [chosen[0], *facts]
    context = _prompt(prompt)
    if type(prompt) is str and (raw or any(f.get("prompt_token_ids") for f in facts)):
        context = []  # the text of the prompt is a rendering; its ids are what counts
        if not any(f.get("prompt_token_ids") for f in facts):
            unknown("a raw text completion: its prompt is no chat; only with prompt_token_ids")
    if type(answer) is dict:
        if "choices" in answer or type(answer.get("output")) is list:
            return _beside(_answered({**row, "messages": context, "input": context}, answer), beside)
        facts = [answer, *facts]
    return Parts(context, _answer(row, name, answer), facts, beside)


def _prompt(prompt: object) -> list[Any]:
    if type(prompt) is str:
        return [{"role": "user", "content": prompt}]
    if type(prompt) is dict:
        prompt = prompt.get("messages", [prompt])
    if prompt is None:
        return []
    if type(prompt) is not list:
        unknown(f"prompt is {kind(prompt)}, not text or messages")
    return prompt


def _answer(row: Json, name: str, answer: Any) -> list[Any]:
    if answer is None:
        return []
    if type(answer) is list:
        if not answer or type(answer[0]) is not dict:
            unknown(f"{name} is a list of {kind(answer[0]) if answer else 'nothing'}, not of messages")
        return answer if "role" in answer[0] or "from" in answer[0] else [{"role": "assistant", "content": answer}]
    if type(answer) is dict:
        if type(answer.get("message")) is dict:
            answer = answer["message"]
        if "content" not in answer and "tool_calls" not in answer:
            unknown(f"{name} is an object with keys {short(sorted(answer))}, not a message")
        return [answer if "role" in answer else {**answer, "role": "assistant"}]
    if type(answer) is not str:
        unknown(f"{name} is {kind(answer)}, not a completion")
    message: Json = {"role": "assistant", "content": answer}
    for key in (*REASONING, "tool_calls"):
        if row.get(key) is not None and (key == "tool_calls" or type(row[key]) is not str or _is_thought(row[key])):
            message[key] = row[key]
    return [message]


def _rendered(row: Json, text: str, source_id: str) -> Conversation:
    """A `text` row. Ids and masks that a peer put beside it are not used: they cannot be checked turn by turn."""
    conv = Conversation([], {0: Reply()}, source_id=source_id, text=text)
    if not text.strip():
        raise Reject("no_completion", "text is empty")
    metadata = row.get("metadata")
    beside = [row, *([metadata] if type(metadata) is dict else [])]
    _read_request(conv, beside)
    read_facts(conv, 0, beside)
    return conv


def _read_request(conv: Conversation, requests: list[Json]) -> None:
    """Tools and template arguments."""
    for request in requests:
        tools = wrap_tools(request.get("tools")) or _functions(request.get("functions"))
        if tools:
            conv.tools = tools
            break
    for request in requests:
        extra = request.get("extra_body")
        body = request.get("body")
        for holder in (request, extra, body):
            kwargs = holder.get("chat_template_kwargs") if type(holder) is dict else None
            if kwargs is not None:
                if type(kwargs) is not dict:
                    unknown(f"chat_template_kwargs is {kind(kwargs)}, not an object")
                conv.kwargs = {**kwargs, **conv.kwargs}


def _add_system(parts: Parts) -> None:
    """A system prompt kept beside the messages is part of what the server saw."""
    for name in ("system", "system_prompt"):
        system = parts.requests[0].get(name)
        if not system:
            continue
        if type(system) is not str:
            unknown(f"{name} is {kind(system)}, not a string")
        first = next(iter([*parts.context[:1], *parts.turns[:1]]), None)
        if type(first) is dict and first.get("role", first.get("from")) in ("system", "developer"):
            if system not in (first.get("content"), first.get("value")):
                unknown(f"{name} differs from the system message")
        else:
            parts.context = [{"role": "system", "content": system}, *parts.context]
        return


def _functions(value: object) -> list[Json] | None:
    """OpenAI's old name of tools; other lists of that name mean other things."""
    if type(value) is list and all(type(f) is dict and {"name", "parameters"} <= f.keys() for f in value):
        return wrap_tools(value, "functions")
    return None
