"""The model's chat template, rendered exactly as Transformers (and so vLLM and SGLang) renders it for text.

Jinja is the rule: an immutable sandbox, `trim_blocks`, `lstrip_blocks`, loop controls, a `tojson` that escapes neither
Unicode nor HTML, and the named special tokens of tokenizer_config.json as variables. It is imported only when needed:
the one template whose direct renderer is proven equal (tokenizer.qwen) never pays for it.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizer import qwen
from tokenizer.job import RESERVED_KWARGS, Exit, JobError, Reject
from tokenizer.view import Message, Shape, View

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Stand-ins in a rendering: noncharacters, which no text holds and no template trims or tests for.
REASONING, CONTENT, SHIELD = "\ufdd0r\ufdd1", "\ufdd0c\ufdd1", "\ufdd2{}\ufdd3"


class Markers(NamedTuple):
    """How a rendered text shows an assistant turn: before + header + [opened + reply] + end."""

    before: str  # what ends the message before it
    header: str
    opening: str  # what the generation prompt has after the header
    end: str


class Renderer:
    """A chat template with the added tokens that it speaks of."""

    def __init__(
        self,
        template: str,
        named_tokens: Mapping[str, str],
        added: Mapping[str, tuple[int, bool]],
        tool_template: str | None = None,
    ) -> None:
        """added: content -> (id, special). tool_template: the one for rows with tools, where the model has two.

        Raises JobError(CONFIG) where the template is no Jinja.
        """
        self.template = template
        self.tool_template = tool_template
        self.sha256 = hashlib.sha256(template.encode()).hexdigest()
        self.named_tokens = dict(named_tokens)
        self.ids = {content: number for content, (number, _) in added.items()}
        self.special = [content for content, (_, special) in added.items() if special]
        self._added = _alternation(list(added))
        self._special = _alternation(self.special)
        self._direct = self.sha256 == qwen.TEMPLATE_SHA256 and tool_template is None
        self._compiled: dict[str, Any] = {}
        self._markers: dict[str, Markers] = {}
        if not self._direct:
            for source in filter(None, (template, tool_template)):
                self._compile(source)

    @classmethod
    def load(cls, tokenizer_dir: Path) -> Renderer:
        """Reads chat_template.jinja (or the template in tokenizer_config.json) and the added tokens of a directory."""
        config_path = tokenizer_dir / "tokenizer_config.json"
        config = json.loads(config_path.read_bytes()) if config_path.is_file() else {}
        file = tokenizer_dir / "chat_template.jinja"
        template = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}
        tool_template = None
        if isinstance(template, dict):
            tool_template = template.get("tool_use")
            template = template.get("default")
        if not isinstance(template, str):
            raise JobError(Exit.CONFIG, f"{tokenizer_dir} has no chat template", "add a chat_template.jinja")
        named = {}
        for name in NAMED_TOKENS:
            value = config.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                named[name] = value
        return cls(template, named, added_tokens(tokenizer_dir / "tokenizer.json"), tool_template)

    def render(
        self, messages: list[Message], tools: list[Any] | None, add_generation_prompt: bool, kwargs: Mapping[str, Any]
    ) -> str:
        """The text of a conversation; raises Reject("template_error")."""
        if self._direct and (view := qwen.view(messages, tools, kwargs)) is not None:
            return view.render(add_generation_prompt)
        return self.render_jinja(messages, tools, add_generation_prompt, kwargs)

    def render_jinja(
        self, messages: list[Message], tools: list[Any] | None, add_generation_prompt: bool, kwargs: Mapping[str, Any]
    ) -> str:
        """The same, by Jinja whatever the template."""
        for name in RESERVED_KWARGS:
            if name in kwargs:
                raise Reject("template_error", f"chat_template_kwargs may not set `{name}`")
        variables = {**self.named_tokens, **kwargs, "strftime_now": _clock(kwargs.get("strftime_now"))}
        source = self.tool_template if tools and self.tool_template else self.template
        try:
            text: str = self._compile(source).render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except Reject:
            raise
        except Exception as error:  # a template can raise anything that its expressions can
            raise Reject("template_error", f"{type(error).__name__}: {error}") from error
        return text

    def view(self, messages: list[Message], tools: list[Any] | None, kwargs: Mapping[str, Any]) -> View:
        """The conversation under this template, by the direct renderer where it is proven."""
        if self._direct and (view := qwen.view(messages, tools, kwargs)) is not None:
            return view
        return JinjaView(self, messages, tools, kwargs)

    def has_control(self, text: str) -> bool:
        """Whether a text holds a control token."""
        return self._special.search(text) is not None

    def split(self, seam: str) -> list[tuple[str, int | None]]:
        """A seam as texts and control tokens, literals in tool arguments put back as text."""
        parts = self._special.split(seam)
        return [
            (part, self.ids[part]) if odd % 2 else (self.unshield(part), None) for odd, part in enumerate(parts) if part
        ]

    def shield(self, value: Any) -> Any:
        """Tool calls with every literal of a control token replaced, so that the template's own stand out."""
        if isinstance(value, str):
            return self._special.sub(lambda m: SHIELD.format(self.ids[m.group()]), value)
        if isinstance(value, dict):
            return {self.shield(k): self.shield(v) for k, v in value.items()}
        return [self.shield(v) for v in value] if isinstance(value, list) else value

    def unshield(self, text: str) -> str:
        """Undoes `shield` in rendered text."""
        if SHIELD[0] not in text:
            return text
        for token in self.special:
            text = text.replace(SHIELD.format(self.ids[token]), token)
        return text

    def ending(self, tail: str, like: str | None = None) -> tuple[str, str, str]:
        """A tail cut at its end-of-turn token: what is before, the token, what is after.

        The token is the first added one (`like` None), else the last that equals `like`, else the last control token.
        """
        at = tail.rfind(like) if like else -1
        if like and at >= 0:
            return tail[:at], like, tail[at + len(like) :]
        found = list(self._special.finditer(tail))[-1:] if like else [m for m in [self._added.search(tail)] if m]
        if not found:
            raise Reject("unstable_boundary", "the template ends an assistant turn with no added token")
        return tail[: found[0].start()], found[0].group(), tail[found[0].end() :]

    def markers(self, kwargs: Mapping[str, Any]) -> Markers:
        """How assistant turns look in a text that this template rendered; raises Reject where that is not sure."""
        key = repr(sorted(kwargs.items()))
        if key not in self._markers:
            user = {"role": "user", "content": REASONING}
            reply = {"role": "assistant", "content": CONTENT}
            bare = self.render([user], None, False, kwargs)
            opened = self.render([user], None, True, kwargs)
            past = self.render([user, reply, user], None, False, kwargs)
            if not (opened.startswith(bare) and past.startswith(bare) and CONTENT in past and REASONING in bare):
                raise Reject("unstable_boundary", "the template shows no fixed start of an assistant turn")
            prompt, history = opened[len(bare) :], past[len(bare) : past.index(CONTENT)]
            header = prompt[: next((n for n, (a, b) in enumerate(zip(prompt, history, strict=False)) if a != b), None)]
            header = header[: min(len(prompt), len(history))]
            if not self._added.search(header):
                raise Reject("unstable_boundary", "an assistant turn starts with no added token, so it cannot be found")
            end = self.ending(past[past.index(CONTENT) + len(CONTENT) :])[1]
            before = bare[bare.index(REASONING) + len(REASONING) :]
            self._markers[key] = Markers(before, header, prompt[len(header) :], end)
        return self._markers[key]

    def _compile(self, source: str) -> Any:
        if source not in self._compiled:
            from jinja2 import TemplateSyntaxError

            try:
                self._compiled[source] = _environment().from_string(source)
            except TemplateSyntaxError as error:
                raise JobError(Exit.CONFIG, f"the chat template is no Jinja: line {error.lineno}: {error}") from error
        return self._compiled[source]


class JinjaView:
    """Any template: every question is answered by renderings and comparisons of text."""

    def __init__(
        self, renderer: Renderer, messages: list[Message], tools: list[Any] | None, kwargs: Mapping[str, Any]
    ) -> None:
        self._renderer, self._messages, self._tools, self._kwargs = renderer, messages, tools, kwargs
        self._prompts: dict[int, str] = {}

    def prompt(self, index: int) -> str:
        if index not in self._prompts:
            self._prompts[index] = self._render(self._messages[:index], True)
        return self._prompts[index]

    def opening(self, index: int) -> str:
        return self.prompt(index)[-64:]

    def shape(self, index: int, reasoned: bool, spoken: bool) -> Shape:
        message = dict(self._messages[index])
        message["content"] = CONTENT if spoken else ""
        if reasoned:
            message["reasoning_content"] = REASONING
        elif "reasoning_content" in message:
            message["reasoning_content"] = ""
        calls = message.get("tool_calls")
        like = None
        if calls or not spoken:  # then the first added token behind the reply need not be the end of the turn
            bare = {k: v for k, v in message.items() if k != "tool_calls"} | {"content": CONTENT}
            like = self._renderer.ending(self._own(index, bare).partition(CONTENT)[2])[1]
        if calls:
            message["tool_calls"] = calls = self._renderer.shield(calls)
        seams = [self._own(index, message)]
        if reasoned:
            seams = self._cut(seams[0], REASONING, "reasoning_lost", "the template does not render the reasoning")
        if spoken:
            why = "the template drops the reply's text" + (" beside tool calls" if calls else "")
            seams[-1:] = self._cut(seams[-1], CONTENT, "unstable_boundary", why)
        for call in calls or ():
            if call["function"]["name"] not in seams[-1]:
                raise Reject("unstable_boundary", "the template does not render tool calls")
        seams[-1], end, after = self._renderer.ending(seams[-1], like)
        lead = seams.pop(0)
        mid = seams.pop(0) if reasoned else ""
        tail = seams.pop(0) if spoken else ""
        if self._renderer.has_control(lead + mid + tail):
            return Shape(lead, mid, tail, end, after, self._renderer.split)
        unshield = self._renderer.unshield
        return Shape(unshield(lead), unshield(mid), unshield(tail), end, after)

    def history(self, last: int, index: int) -> tuple[str, str] | None:
        before, prompt = self.prompt(last), self.prompt(index)
        if not prompt.startswith(before):
            return None
        past = self._render(self._messages[: last + 1], False)
        if not (past.startswith(before) and prompt.startswith(past)):
            return None
        return past[len(before) :], prompt[len(past) :]

    def _own(self, index: int, message: Message) -> str:
        """What the template adds to the prompt for one reply."""
        full, prompt = self._render([*self._messages[:index], message], False), self.prompt(index)
        if not full.startswith(prompt):
            raise Reject("unstable_boundary", "the rendering with the reply does not start with the prompt's text")
        return full[len(prompt) :]

    def _cut(self, text: str, stand_in: str, reason: str, why: str) -> list[str]:
        parts = text.split(stand_in)
        if len(parts) == 1:
            raise Reject(reason, why)
        if len(parts) > 2:
            raise Reject("unstable_boundary", "the template renders a part of the reply more than once")
        return parts

    def _render(self, messages: list[Message], add_generation_prompt: bool) -> str:
        return self._renderer.render_jinja(messages, self._tools, add_generation_prompt, self._kwargs)


def added_tokens(path: Path) -> dict[str, tuple[int, bool]]:
    """The added tokens of a tokenizer.json: content -> (id, special), without parsing the vocabulary behind them."""
    if not path.is_file():
        raise JobError(Exit.CONFIG, f"{path} does not exist", "the model directory needs a tokenizer.json")
    text = path.read_text(encoding="utf-8")
    try:
        start = re.search(r'"added_tokens"\s*:\s*', text)
        entries = json.JSONDecoder().raw_decode(text, start.end())[0] if start else []
        return {entry["content"]: (entry["id"], bool(entry["special"])) for entry in entries}
    except (ValueError, KeyError, TypeError) as error:
        raise JobError(Exit.CONFIG, f"{path} cannot be read as a tokenizer: {error}") from error


def _alternation(tokens: list[str]) -> re.Pattern[str]:
    """Matches any of the tokens, the longest first; nothing where there is none."""
    ordered = sorted(tokens, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, ordered)) + ")" if ordered else r"((?!))")


def _clock(date: Any) -> Callable[[str], str]:
    """The template's clock: stopped at the kwarg `strftime_now` (an ISO date), since a dataset has no today."""

    def strftime_now(form: str) -> str:
        try:
            return datetime.date.fromisoformat(date).strftime(form)
        except (TypeError, ValueError):
            remedy = 'set it with --template-kwargs \'{"strftime_now": "2026-01-31"}\''
            raise Reject("template_error", f"the template asks for today's date: {remedy}") from None

    return strftime_now


def _environment() -> Any:
    """The Jinja environment of Transformers' `apply_chat_template`."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what a model generated; here it renders its body and marks nothing."""

        tags = {"generation"}  # noqa: RUF012  (jinja2 declares it a plain class attribute)

        def parse(self, parser: Any) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Callable[[], str]) -> str:
            return caller()

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment
