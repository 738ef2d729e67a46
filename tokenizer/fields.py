"""Readers of single fields of a row: calls, tools, token ids, finish reasons, weights. Strict: a value or a Reject."""

from __future__ import annotations

import json
from math import inf
from typing import Any, NoReturn

from tokenizer.job import Reject

Json = dict[str, Any]

STOP = frozenset(
    ("stop", "eos", "eos_token", "end_turn", "tool_calls", "tool_call", "tool_use", "function_call", "completed")
)
CUT = frozenset(
    ("length", "max_tokens", "max_output_tokens", "max_length", "model_length", "incomplete", "stop_sequence")
)
REASONING = ("reasoning_content", "reasoning", "thinking", "thinking_content")
WEIGHTS = ("loss_weight", "weight", "train", "mask")
TOKEN_IDS = ("token_ids", "generation_token_ids", "output_ids", "completion_token_ids")
MEDIA = ("image", "video", "audio", "file")  # a part type that names one of them, input_image and image_url included
MEDIA_KEYS = frozenset((*MEDIA[:3], *(f"{m}s" for m in MEDIA[:3])))  # of a row or a message
SETTINGS = frozenset(("on", "off", "true", "false", "none", "minimal", "low", "medium", "high"))  # no reasoning's text
MISSING: Any = object()


def unknown(detail: str) -> NoReturn:
    raise Reject("unknown_dialect", detail)


def kind(value: object) -> str:
    """What JSON calls the value, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def short(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not -inf < value < inf:
        raise ValueError(f"{short(text)} is beyond what a number holds")
    return value


# Not orjson: it would turn an integer beyond 64 bits into a float, and the arguments are rendered again as text.
_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)


def decode_json(text: str, what: str, reason: str) -> Any:
    """JSON inside a string of the row; raises Reject(reason)."""
    try:
        value = _DECODER.decode(text)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Reject(reason, f"{what}: half of a surrogate pair: {short(text)}") from None
    except (ValueError, RecursionError) as e:
        raise Reject(reason, f"{what}: not JSON ({short(str(e))}): {short(text)}") from None
    return value


def _exact(value: object) -> bool:
    """False where the JSON reader has turned an integer beyond 64 bits into a float."""
    if type(value) is float:
        return not (value.is_integer() and abs(value) >= 2.0**63)
    if type(value) is dict:
        return all(map(_exact, value.values()))
    return not isinstance(value, list) or all(map(_exact, value))


def arguments(value: object, name: str) -> Json:
    """The arguments of one call as the mapping that templates iterate; raises Reject bad_tool_arguments."""
    if value is None or value == "":
        return {}
    if type(value) is str:
        value = decode_json(value, f"arguments of {name}", "bad_tool_arguments") if value.strip() else {}
        if value is None:
            return {}
    elif type(value) is dict:
        try:
            exact = _exact(value)
        except RecursionError:
            raise Reject("bad_tool_arguments", f"arguments of {name} are nested too deep") from None
        if not exact:
            raise Reject("bad_tool_arguments", f"arguments of {name} hold a number beyond 64 bits; store them as text")
    if type(value) is not dict:
        raise Reject("bad_tool_arguments", f"arguments of {name} are {kind(value)}, not an object: {short(value)}")
    return value


def wrap_call(call: object) -> tuple[Json, Reject | None]:
    """One tool call, flat or wrapped, in the wrapped form; with the reject if its arguments cannot be used."""
    inner = call.get("function", call) if type(call) is dict else None
    if type(inner) is not dict or type(inner.get("name")) is not str:
        unknown(f"a tool call without a name: {short(call)}")
    name = inner["name"]
    raw = inner.get("arguments", inner.get("parameters"))
    try:
        return {"type": "function", "function": {"name": name, "arguments": arguments(raw, name)}}, None
    except Reject as e:
        return {"type": "function", "function": {"name": name, "arguments": raw}}, e


def wrap_tools(tools: object, where: str = "tools") -> list[Json] | None:
    """The row's tools for the template: a JSON string is parsed, flat definitions are wrapped, key order is kept."""
    if type(tools) is str:
        tools = decode_json(tools, where, "unknown_dialect") if tools.strip() else None
    if tools is None or tools == [] or tools == {}:
        return None
    if type(tools) is not list:
        unknown(f"{where} is {kind(tools)}, not a list")
    wrapped = []
    for tool in tools:
        if type(tool) is dict and type(tool.get("function")) is dict and type(tool["function"].get("name")) is str:
            wrapped.append(tool)
        elif type(tool) is dict and type(tool.get("name")) is str and tool.get("type", "function") == "function":
            wrapped.append({"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}})
        else:
            unknown(f"{where} holds {short(tool)}, which is not a function definition")
    return wrapped


def token_ids(value: object, name: str) -> list[int] | None:
    """Ids as reported; empty = absent. Raises Reject foreign_token_ids for what is no list of integers."""
    if value is None or value == []:
        return None
    if type(value) is not list or set(map(type, value)) != {int}:
        raise Reject("foreign_token_ids", f"{name} is not a list of integers")
    return value


def finish(value: object) -> tuple[str, Reject | None]:
    """A reported finish reason -> ("stop" | "length", reject of the turn)."""
    if type(value) is dict:  # SGLang: {"type": "stop", "matched": id or string}; Responses: {"reason": ...}
        matched = value.get("matched")
        value = value.get("type", value.get("reason", value))
        if type(matched) is str and value == "stop":
            return "length", None  # ended by a stop string: the end-of-turn token was never emitted
    if value is None:
        return "stop", None
    if type(value) is str:
        low = value.lower()
        if low in STOP:
            return "stop", None
        if low in CUT:
            return "length", None
    return "stop", Reject("bad_finish_reason", f"finish_reason {short(value)} is neither a stop nor a cut")


def weight(message: Json) -> float:
    for name in WEIGHTS:
        value = message.get(name)
        if value is not None:
            if not isinstance(value, (bool, int, float)) or not 0 <= value < inf:
                unknown(f"{name} of a message must be a number >= 0 or a boolean, not {short(value)}")
            return float(value)
    return 1.0


def no_media(holder: Json, what: str) -> None:
    """Raises Reject multimodal for images, audio or video beside the text."""
    for name in holder.keys() & MEDIA_KEYS:
        if holder[name]:
            raise Reject("multimodal", f"{what} has {name}; text only")


def part_text(part: Json, name: str) -> str:
    """The text of one content part of the type `name`: under `text` or `value`, or under the name of its type."""
    for key in ("text", "value", name):
        value = part.get(key)
        if type(value) is str:
            return value
    return unknown(f"a content part of type {name!r} without text (keys {short(sorted(part))})")
