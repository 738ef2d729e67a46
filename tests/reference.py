"""What rows must be, by other means: Transformers renders and encodes, the format of each model family is written by hand.

Shares no code with the product, and works otherwise: prompts come from `apply_chat_template`, completions from the
plain rules below (what the model of that family emits), nothing is read off a rendering with stand-ins. It takes the
rows of corpus.py as they are, and is slow.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

Message = dict[str, Any]


class Refused(Exception):
    """A turn that cannot be taken; the message is the reason."""


@dataclass
class Family:
    """How the model of one template speaks.

    thinks: "open", the prompt opens the think tag; "self", the model does; "no", the template knows no thinking.
    calls: how tool calls are written; "" where the template cannot write them.
    """

    end: str
    thinks: str = "no"
    calls: str = ""


FAMILIES = {
    "qwen36": Family("<|im_end|>", "open", "xml"),
    "qwen3": Family("<|im_end|>", "self", "json"),
    "chatml": Family("<|im_end|>"),
    "llama3": Family("<|eot_id|>"),
    "gemma": Family("<end_of_turn>"),
}


@dataclass
class Turn:
    number: int
    prompt: str
    ids: list[int]
    mask: list[int]


class Reference:
    """The reference of one model directory."""

    def __init__(self, directory: Path, family: str, template: str | None = None) -> None:
        config = json.loads((directory / "tokenizer_config.json").read_text())
        named = {k: config[k] for k in ("bos_token", "eos_token", "pad_token") if isinstance(config.get(k), str)}
        self.hf = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), **named)
        self.hf.chat_template = template or (directory / "chat_template.jinja").read_text()
        self.family = FAMILIES[family]
        self.end_id = self.hf.convert_tokens_to_ids(self.family.end)

    def render(self, messages: list[Message], tools: Any, kwargs: Message, prompt: bool) -> str:
        try:
            text = self.hf.apply_chat_template(
                messages, tools=tools, add_generation_prompt=prompt, tokenize=False, **kwargs
            )
        except Exception as error:
            raise Refused("template_error") from error
        return str(text)

    def prompt_ids(self, text: str) -> list[int]:
        return list(self.hf(text, add_special_tokens=False)["input_ids"])

    def reply_ids(self, text: str) -> list[int]:
        """Control tokens are ordinary text, as a server would have stripped real ones."""
        return list(self.hf(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def rows(self, row: Message, **options: Any) -> tuple[list[Turn], list[tuple[int, str]]]:
        """The rows of one corpus row and its rejected turns; options are template kwargs of the run."""
        messages, tools = row["messages"], row.get("tools")
        kwargs = {**options, **row.get("chat_template_kwargs", {})}
        stored = messages
        messages = [self.as_history(m) for m in stored]
        positions = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        rows: list[Turn] = []
        refused: list[tuple[int, str]] = []
        open_row: tuple[int, str, bool] | None = None  # position, completion, cut: of the last turn in the last row
        for number, i in enumerate(positions):
            last_turn = i == positions[-1]
            cut = last_turn and row.get("finish_reason") in ("length", "max_tokens")
            if messages[i].get("weight") == 0:
                continue
            try:
                prompt = self.render(messages[:i], tools, kwargs, True)
                plain = [*messages[:i], {"role": "assistant", "content": "x"}]
                if not self.render(plain, tools, kwargs, False).startswith(prompt):
                    raise Refused("unstable_boundary")  # the messages before it look otherwise once a reply follows
                reply = self.completion(stored[i], prompt, cut)
                if not reply and cut:
                    raise Refused("no_supervised_tokens")
            except Refused as error:
                refused.append((number, str(error)))
                continue
            ids = self.reply_ids(reply) + [self.end_id] * (not cut)
            before = self.continues(messages, tools, kwargs, open_row, prompt)
            if before is None:
                context = self.prompt_ids(prompt)
                rows.append(Turn(number, prompt, context + ids, [0] * len(context) + [1] * len(ids)))
            else:
                context = self.prompt_ids(before)
                rows[-1].ids += context + ids
                rows[-1].mask += [0] * len(context) + [1] * len(ids)
            open_row = (i, reply, cut)
        return rows, refused

    def as_history(self, message: Message) -> Message:
        """An earlier reply is stored with its end token or without: later prompts show one."""
        if message["role"] != "assistant" or message.get("tool_calls"):
            return message
        return {**message, "content": self.unended(message["content"])}

    def continues(
        self, messages: list[Message], tools: Any, kwargs: Message, last: tuple[int, str, bool] | None, prompt: str
    ) -> str | None:
        """The context between the last turn's end token and this prompt's end, where this prompt extends that turn."""
        if last is None:
            return None
        past = self.render(messages[: last[0] + 1], tools, kwargs, False)
        start = self.render(messages[: last[0]], tools, kwargs, True)
        if not (past.startswith(start) and prompt.startswith(past)):
            return None
        return prompt[past.rindex(self.family.end) + len(self.family.end) :]

    def completion(self, message: Message, prompt: str, cut: bool) -> str:
        """What the model emitted after the prompt, without its end token."""
        content, thought, calls = (
            message["content"],
            message.get("reasoning_content", ""),
            message.get("tool_calls", []),
        )
        family = self.family
        if family.thinks == "no":
            if re.sub(r"^\s*<think>\n?", "", thought).strip():  # a tag alone says nothing that could be lost
                raise Refused("reasoning_lost")
            if calls:
                raise Refused("unstable_boundary")
            return self.unended(content)
        if calls and not family.calls:
            raise Refused("unstable_boundary")
        opened, closed = prompt.endswith("<think>\n"), prompt.endswith("<think>\n\n</think>\n\n")
        if calls and not content.strip():
            content = ""
        if closed:
            if thought.strip():
                raise Refused("unstable_boundary")
            content = re.sub(r"^\s*<think>\s*</think>\s*", "", content)
            if re.match(r"\s*<think>", content) and "</think>" in content:
                raise Refused("unstable_boundary")
            return self.with_calls(content, calls)
        if not thought and (re.match(r"\s*<think>", content) or "</think>" in content or (cut and not calls)):
            if opened and (doubled := re.match(r"\s*<think>\n?", content)):
                content = content[doubled.end() :]
            return self.with_calls(content, calls)
        if opened:
            head = ""
            doubled = re.match(r"\s*<think>\n?", thought)
        else:
            head = "<think>" if thought.startswith("\n") else "<think>\n"
            doubled = re.match(r"\s*<think>\n?", thought)
        if doubled:
            thought = thought[doubled.end() :]
            head = "" if opened else "<think>" if thought.startswith("\n") else "<think>\n"
        if thought and cut and not content and not calls:
            return head + self.unended(thought)
        if not thought:
            thought_part = "\n</think>" if opened else "<think>\n\n</think>"
        elif thought.rstrip().endswith("</think>"):
            thought_part = head + thought
        else:
            thought_part = head + thought + ("</think>" if thought.endswith("\n") else "\n</think>")
        gap = "\n\n"
        if thought_part.endswith("\n"):  # the reasoning closed itself and went on
            gap = gap[len(thought_part) - len(thought_part.rstrip("\n")) :]
        for held in ("\n\n", "\n"):
            if content.startswith(held):
                gap = gap[: max(0, len(gap) - len(held))]
                break
        return thought_part + gap + self.with_calls(content, calls)

    def with_calls(self, content: str, calls: list[Message]) -> str:
        if not calls:
            return self.unended(content)
        functions = [call["function"] for call in calls]
        if self.family.calls == "xml":
            written = "\n".join(map(xml_call, functions))
            gap = "\n\n" if content else ""
        else:
            written = "\n".join(map(json_call, functions))
            gap = "\n" if content else ""
        while gap and not content.endswith(gap):
            if content.endswith("\n") and len(gap) == 2:
                return content + "\n" + written
            return content + gap + written
        return content + written

    def unended(self, text: str) -> str:
        return text.removesuffix(self.family.end)


def xml_call(function: Message) -> str:
    lines = [f"<tool_call>\n<function={function['name']}>\n"]
    for name, value in function["arguments"].items():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f"<parameter={name}>\n{shown}\n</parameter>\n")
    return "".join(lines) + "</function>\n</tool_call>"


def json_call(function: Message) -> str:
    body = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"
