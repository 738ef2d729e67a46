"""Records of a server's answer beside its request: Responses-API rollouts and chat completions.

Both are put into `Parts`: the request's messages, which the model did not generate here, and the answer's, which it
did. What the server said about the answer (why it ended, its ids, its usage) is read last, for its last turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenizer.fields import TOKEN_IDS, Json, finish, kind, short, token_ids, unknown
from tokenizer.job import Reject
from tokenizer.messages import Conversation, Reply

_IDS = frozenset(("prompt_token_ids", *TOKEN_IDS))
_USAGE = frozenset(("usage", "completion_tokens"))


@dataclass(slots=True)
class Parts:
    """A row taken apart, all messages in an OpenAI-like form."""

    context: list[Any]  # messages of the request; assistant turns in it are not learnt
    turns: list[Any]  # messages whose assistant turns are learnt
    facts: list[Json] = field(default_factory=list)  # nearest first: finish reason, usage, ids of the last reply
    requests: list[Json] = field(default_factory=list)  # nearest first: tools, system prompt, template kwargs
    thought: str = ""  # the field beside the messages that holds a reasoning


def only_choice(choices: object) -> Json:
    """The one choice of a chat completion."""
    if type(choices) is not list or not choices:
        raise Reject("no_completion", "the response has no choices")
    if len(choices) > 1:
        unknown(f"{len(choices)} choices in one line: write one line per choice")
    choice = choices[0]
    if type(choice) is not dict:
        unknown(f"choices[0] is {kind(choice)}, not an object")
    if "turns" in choice:
        raise Reject("no_prompt", "an MT-bench answer (choices[0].turns): its prompts are in question.jsonl")
    return choice


def completion(body: Json, request: Json) -> Parts:
    """A chat.completion object and the request that it answers."""
    choice = only_choice(body.get("choices"))
    message = choice.get("message")
    facts = [choice, body]
    prompt_ids = choice.get("prompt_token_ids") or body.get("prompt_token_ids")
    if type(message) is not dict:
        if type(choice.get("text")) is not str:
            unknown(f"choices[0] has no message (keys {short(sorted(choice))})")
        if not prompt_ids:
            unknown("a raw text completion (choices[0].text): its prompt is no chat; only with prompt_token_ids")
        return Parts([], [{"role": "assistant", "content": choice["text"]}], facts)
    if message.get("role") is None:
        message = {**message, "role": "assistant"}
    messages = request.get("messages", request.get("prompt"))
    if type(messages) is str:
        messages = [{"role": "user", "content": messages}]
    if type(messages) is not list:
        if not prompt_ids:
            raise Reject("no_prompt", "a chat completion without its request: put `messages` beside it")
        messages = []
    if messages and type(messages[-1]) is dict and messages[-1].get("role") == "assistant":
        unknown("the request already ends in an assistant turn, so what was generated is not clear")
    return Parts(messages, [message], facts, [request])


def responses(request: Json, response: Json) -> Parts:
    """A Responses-API rollout: items until the next tool result are one assistant turn."""
    given = request.get("input")
    output = response.get("output")
    if type(output) is not list:
        raise Reject("no_completion", f"response.output is {kind(output)}")
    if response.get("error"):
        raise Reject("bad_finish_reason", f"the response failed: {short(response['error'])}")
    context = [{"role": "user", "content": given}] if type(given) is str else turns(given, "input")
    if not context:
        raise Reject("no_prompt", "a response without the input it answers")
    instructions = request.get("instructions") or response.get("instructions")
    if instructions:
        context.insert(0, {"role": "system", "content": instructions})
    answer = turns(output, "response.output")
    chains = sum(_ends(answer, n) for n in range(len(answer)))
    if chains > 1 and all(m["role"] != "user" for m in answer):
        context, answer = _interleave(context, answer, chains)
    ended = response.get("incomplete_details") or response.get("status")
    return Parts(context, answer, [{"finish_reason": ended, "usage": response.get("usage")}], [request, response])


def _ends(messages: list[Json], n: int) -> bool:
    """True for an assistant turn that no tool result follows."""
    return messages[n]["role"] == "assistant" and (n + 1 == len(messages) or messages[n + 1]["role"] != "tool")


def _interleave(context: list[Json], answer: list[Json], chains: int) -> tuple[list[Json], list[Json]]:
    """A rollout with all user turns in `input` and all answers in `output`: one user turn before each answer."""
    users = 0
    while users < len(context) and context[-1 - users]["role"] == "user":
        users += 1
    if users != chains:
        unknown(f"response.output holds {chains} answers, but the input ends in {users} user turns")
    waiting = context[len(context) - users :]
    mixed = [waiting.pop(0)]
    for n, message in enumerate(answer):
        mixed.append(message)
        if _ends(answer, n) and waiting:
            mixed.append(waiting.pop(0))
    return context[: len(context) - users], mixed


def turns(items: object, where: str) -> list[Json]:
    """Responses-API items -> OpenAI-like messages."""
    if type(items) is not list:
        unknown(f"{where} is {kind(items)}, not a list")
    out: list[Json] = []
    turn: Json | None = None  # the assistant turn that is being put together
    for item in items:
        if type(item) is not dict:
            unknown(f"{where} holds {kind(item)}, not an item")
        name = item.get("type", "message")
        if name == "function_call_output":
            turn = None
            out.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
            continue
        if name == "message" and item.get("role") != "assistant":
            if type(item.get("role")) is not str:
                unknown(f"{where} holds a message without a role (keys {short(sorted(item))})")
            turn = None
            out.append(item)
            continue
        if name not in ("message", "reasoning", "function_call"):
            unknown(f"{where} holds an item of type {short(name)}")
        # After an answer, a further answer or thought is another turn; calls go on the turn they follow.
        if turn is None or (name != "function_call" and ("content" in turn or "tool_calls" in turn)):
            turn = {"role": "assistant"}
            out.append(turn)
        _join(turn, item, name)
    return out


def _join(turn: Json, item: Json, name: str) -> None:
    if name == "message":
        turn["content"] = item.get("content")
        for key in ("reasoning_content", "reasoning", "tool_calls", "refusal"):
            if item.get(key):
                turn[key] = item[key]
    elif name == "function_call":
        call = {"function": {"name": item.get("name"), "arguments": item.get("arguments")}}
        turn["tool_calls"] = [*turn.get("tool_calls", ()), call]
    else:
        text = _reasoning(item)
        if "reasoning_content" in turn:
            text = turn["reasoning_content"] + text
        turn["reasoning_content"] = text
    if item.get("status") is not None:
        turn["finish_reason"] = item["status"]
    for key in ("prompt_token_ids", *TOKEN_IDS):
        if item.get(key) and turn.setdefault(key, item[key]) != item[key]:
            raise Reject("foreign_token_ids", f"two items of one turn bring different {key}")


def _reasoning(item: Json) -> str:
    """The text of a reasoning item: its `content`, else its `summary`."""
    for key in ("content", "summary"):
        parts = item.get(key)
        if type(parts) is str:
            return parts
        if type(parts) is list and parts:
            if not all(type(p) is dict and type(p.get("text")) is str for p in parts):
                unknown(f"{key} of a reasoning item holds {short(parts)}")
            return "".join(p["text"] for p in parts)
    raise Reject("reasoning_lost", "a reasoning item without text: what the model thought is not in the file")


def batch(row: Json, asked: Json | None) -> Parts:
    """One line of OpenAI batch output, joined with its request body."""
    response = row.get("response")
    failed = row.get("error")
    if type(response) is not dict or failed:
        raise Reject("no_completion", f"the batch request failed: {short(failed or response)}")
    status = response.get("status_code", 200)
    if status != 200:
        raise Reject("no_completion", f"the batch request failed with status {short(status)}")
    body = response.get("body")
    if type(body) is not dict:
        unknown(f"response.body of a batch line is {kind(body)}")
    source = row if type(row.get("body")) is dict or "messages" in row else asked
    if source is None:
        raise Reject(
            "no_prompt",
            f"batch output without its request (custom_id {short(row.get('custom_id'))}): name the request file with "
            "--batch-input or put it among the inputs",
        )
    request = source.get("body", source)
    if type(request) is not dict:
        unknown(f"body of the batch request is {kind(request)}")
    if type(body.get("output")) is list:
        return responses(request, body)
    return completion(body, request)


def ids_only(conv: Conversation, facts: list[Json]) -> bool:
    """Adds the reply of a row that brings its ids and no text."""
    if not any(fact.get(name) for fact in facts for name in TOKEN_IDS):
        return False
    conv.replies[len(conv.messages)] = Reply()
    conv.messages.append({"role": "assistant"})
    return True


def read_facts(conv: Conversation, start: int, facts: list[Json]) -> None:
    """What is said beside the messages of the reply that was generated last."""
    last = max(conv.replies)
    reply = conv.replies[last]
    ended = _first(facts, "finish_reason")
    matched = _first(facts, "stop_reason")
    if ended is None:
        ended = _first(facts, "incomplete_details") or (matched if type(matched) is str else None)
    elif type(matched) is str and ended == "stop":
        ended = "stop_sequence"  # vLLM: the string that ended the reply in place of the end-of-turn token
    if reply.finish == "stop":
        reply.finish, bad = finish(ended)
        reply.reject = reply.reject or bad
    if any(not _IDS.isdisjoint(fact) for fact in facts):
        try:
            prompt_ids = token_ids(_first(facts, "prompt_token_ids"), "prompt_token_ids")
            reply.prompt_token_ids = reply.prompt_token_ids or prompt_ids
            for name in TOKEN_IDS:
                reply.token_ids = reply.token_ids or token_ids(_first(facts, name), name)
            prompt = _first(facts, "prompt")
            if not last and reply.prompt_token_ids and type(prompt) is str:
                reply.prompt_text = prompt
        except Reject as e:
            reply.reject = reply.reject or e
    if any(not _USAGE.isdisjoint(fact) for fact in facts):
        _read_usage(conv, [n for n in conv.replies if n >= start], facts)


def _first(facts: list[Json], name: str) -> Any:
    for fact in facts:
        value = fact.get(name)
        if value is not None:
            return value
    return None


def _read_usage(conv: Conversation, learnt: list[int], facts: list[Json]) -> None:
    usage = _first(facts, "usage")
    usage = usage if type(usage) is dict else {}
    counts = [usage.get("completion_tokens"), usage.get("output_tokens"), _first(facts, "completion_tokens")]
    count = next((c for c in counts if type(c) is int and c > 0), None)
    if count is not None and len(learnt) == 1:
        conv.replies[learnt[0]].output_tokens = count
    thought = usage.get("reasoning_tokens")
    for name in ("completion_tokens_details", "output_tokens_details"):
        if type(usage.get(name)) is dict:
            thought = thought or usage[name].get("reasoning_tokens")
    if type(thought) is int and thought > 0 and conv.messages and not any(thinks(conv, n) for n in learnt):
        raise Reject("reasoning_lost", f"the server counted {thought} reasoning tokens, and the row holds no reasoning")


def thinks(conv: Conversation, n: int) -> bool:
    """Whether a reply brings its thinking, in a field, in its text or among its ids."""
    message = conv.messages[n]
    text = message.get("content", "")
    inline = "</think>" in text or "<think>" in text
    return inline or bool(message.get("reasoning_content") or conv.replies[n].token_ids)
