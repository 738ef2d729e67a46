"""The drafter's shape: derived from a target's config.json, every value shown and overridable, checked before weights.

Standard library alone, so that an impossible choice is refused in milliseconds. Field names are those of the
checkpoint's config.json, as inference engines read it. The draft never takes over the target's rotary details (partial
factor, mrope, scaling): it rotates its whole head by the default rule, at training and when served.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizer.job import Exit, JobError

FULL, SLIDING = "full_attention", "sliding_attention"
HYBRID = frozenset({"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})  # Qwen3.5 and 3.6
FAMILIES = HYBRID | {"qwen3", "qwen3_moe", "qwen2", "llama", "mistral"}
HYBRID_MASK_ID = 248070  # what the published Qwen3.5 and 3.6 drafters use
HYBRID_WINDOW = 2048
TAPS = 5
COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "num_target_layers",
    "max_position_embeddings",
)
POSITIVE = (
    "rope_theta",
    "rms_norm_eps",
    "initializer_range",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
)
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "</s>")


def _refuse(name: str, why: str, hint: str = "") -> JobError:
    return JobError(Exit.CONFIG, f"{name}: {why}", hint)


@dataclass(frozen=True, slots=True)
class Specials:
    """What the choice of a mask token needs to know of a tokenizer.

    size: highest token id + 1. added: ids of added tokens. named: role (pad, eos, bos, end of turn) -> its ids.
    """

    size: int
    added: tuple[int, ...] = ()
    named: Mapping[str, frozenset[int]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Specials:
        """From `tokenizer.json` and, where it is there, `tokenizer_config.json` of a directory."""
        data = json.loads((folder / "tokenizer.json").read_bytes())
        ids = {token["content"]: int(token["id"]) for token in data.get("added_tokens", ())}
        vocab = data["model"]["vocab"]
        plain = vocab if isinstance(vocab, dict) else {piece: i for i, (piece, _) in enumerate(vocab)}
        top = max([*plain.values(), *ids.values()])
        named = {"end of turn": frozenset(ids[text] for text in END_OF_TURN if text in ids)}
        extra = folder / "tokenizer_config.json"
        told = json.loads(extra.read_bytes()) if extra.is_file() else {}
        for role in ("pad", "eos", "bos"):
            token = told.get(f"{role}_token")
            text = token.get("content") if isinstance(token, dict) else token
            found = ids.get(text, plain.get(text)) if isinstance(text, str) else None
            if found is not None:
                named[role] = frozenset({found})
        return cls(top + 1, tuple(sorted(ids.values())), named)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """Architecture of one drafter. Raises JobError(78), naming the field, for a value that cannot work.

    target_layer_ids: taps; tap L is the output of the target's decoder layer L. block_size counts the anchor.
    sliding_window: keys visible to one query of a sliding layer, itself included. is_causal: None = sliding layers
    are causal inside the block and full ones are not, else it holds for every layer.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    is_causal: bool | None = None
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    dtype: str = "bfloat16"
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise _refuse(name, f"{value!r} is not a positive whole number")
        for name in POSITIVE:
            value = getattr(self, name)
            if value is None and name == "final_logit_softcapping":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise _refuse(name, f"{value!r} is not a positive number")
        if self.head_dim % 2:
            raise _refuse("head_dim", f"{self.head_dim} is odd, and rotary pairs its halves")
        if self.num_attention_heads % self.num_key_value_heads:
            raise _refuse(
                "num_key_value_heads",
                f"{self.num_key_value_heads} does not divide num_attention_heads {self.num_attention_heads}",
            )
        if isinstance(self.block_size, bool) or not isinstance(self.block_size, int) or self.block_size < 2:
            raise _refuse("block_size", f"{self.block_size!r}: a block is the anchor and at least one drafted token")
        if self.dtype not in ("bfloat16", "float32"):
            raise _refuse("dtype", f"{self.dtype} is refused: hidden states overflow float16", "use bfloat16")
        self._check_layers()
        self._check_taps()
        mask = self.mask_token_id
        if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < self.vocab_size:
            raise _refuse(
                "mask_token_id",
                f"{'null' if mask is None else mask} is not one of the target's {self.vocab_size} embedding rows",
                "name an unused row; a row added afterwards is neither trained nor exported",
            )

    def _check_layers(self) -> None:
        if not isinstance(self.layer_types, tuple):
            raise _refuse("layer_types", f"{self.layer_types!r} is not a list of names")
        if len(self.layer_types) != self.num_hidden_layers:
            raise _refuse("layer_types", f"{len(self.layer_types)} names for {self.num_hidden_layers} layers")
        for kind in self.layer_types:
            if kind not in (FULL, SLIDING):
                raise _refuse("layer_types", f"`{kind}` is neither {FULL} nor {SLIDING}")
        window = self.sliding_window
        if SLIDING in self.layer_types and (type(window) is not int or window < 1):
            raise _refuse("sliding_window", f"{window} keys, but layer_types has {SLIDING}", "give a positive window")
        if self.is_causal not in (None, True, False):
            raise _refuse("is_causal", f"{self.is_causal!r} is neither true nor false")

    def _check_taps(self) -> None:
        taps, layers = self.target_layer_ids, self.num_target_layers
        if not isinstance(taps, tuple) or not all(type(tap) is int for tap in taps):
            raise _refuse("target_layer_ids", f"{taps!r} is not a list of layer numbers")
        if not taps:
            raise _refuse("target_layer_ids", "no tap", "name at least one target layer")
        if not all(a < b for a, b in pairwise(taps)):
            raise _refuse("target_layer_ids", f"{list(taps)} is not strictly ascending")
        if taps[0] < 0 or taps[-1] >= layers - 1:
            raise _refuse(
                "target_layer_ids",
                f"{list(taps)} leaves 0..{layers - 2} of a target of {layers} layers",
                "some engines read the last layer's output before the final norm, others after: it is never a tap",
            )

    def window(self, layer: int) -> int | None:
        """Keys that a query of draft layer `layer` sees, or None for all."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def causal(self, layer: int) -> bool:
        """Whether a slot of draft layer `layer` sees only earlier slots of its own block."""
        return self.layer_types[layer] == SLIDING if self.is_causal is None else self.is_causal

    def to_dict(self) -> dict[str, Any]:
        """The checkpoint's config.json: a superset that z-lab's package, SpecForge, SGLang and vLLM all read."""
        shape = asdict(self)
        nested = {"block_size": self.block_size} | {k: shape.pop(k) for k in ("mask_token_id", "target_layer_ids")}
        neutral = {"input_embedding_scale": 1.0, "output_multiplier": 1.0}
        for name in (*neutral, "final_logit_softcapping", "is_causal"):
            if shape[name] == neutral.get(name):  # optional keys, absent where they change nothing
                del shape[name]
        return shape | {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": SLIDING in self.layer_types,
            "max_window_layers": self.num_hidden_layers,
            "layer_types": list(self.layer_types),
            "dflash_config": nested | {"target_layer_ids": list(self.target_layer_ids)},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DrafterConfig:
        """Read a z-lab config.json; keys nested in `dflash_config` win. Raises JobError(78) naming a missing field."""
        nested = _mapping(data, "dflash_config")
        values = {f.name: data[f.name] for f in fields(cls) if data.get(f.name) is not None}
        values |= {f.name: nested[f.name] for f in fields(cls) if nested.get(f.name) is not None}
        for name, only in (("attention_bias", False), ("hidden_act", "silu")):
            if data.get(name) not in (None, only):
                raise _refuse(name, f"{data[name]!r}, where only {only!r} can be read")
        rope = _mapping(data, "rope_parameters") or _mapping(data, "rope_scaling")
        if rope.get("rope_type", "default") != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise _refuse("rope_parameters", f"{rope}: only default rotary over the whole head can be read")
        values.setdefault("rope_theta", rope.get("rope_theta", 10000.0))
        values.setdefault("dtype", data.get("torch_dtype", "bfloat16"))  # its name in transformers 4
        hidden, heads, layers = (
            values.get(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            values.setdefault("head_dim", hidden // heads)
        values.setdefault("layer_types", (FULL,) * (layers if isinstance(layers, int) else 0))
        values.setdefault("block_size", 16)
        values.setdefault("mask_token_id", None)
        return cls.build(values)

    @classmethod
    def build(cls, values: Mapping[str, Any]) -> DrafterConfig:
        """From plain JSON values, as `dataclasses.asdict` gives them. Raises JobError(78) naming a missing field."""
        for entry in fields(cls):
            if entry.name not in values and entry.default is MISSING:
                raise _refuse(entry.name, "is missing from the drafter's config.json")
        plain: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        return cls(**plain)


def _mapping(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name) or {}
    if not isinstance(found, Mapping):
        raise _refuse(name, f"{found!r} is not a JSON object")
    return found


def default_taps(layers: int, count: int = TAPS) -> tuple[int, ...]:
    """`count` target layers spread evenly from the second to the third from the end; fewer where they do not fit."""
    count = min(count, max(1, layers - 3))
    if count == 1:
        return (max(0, min(layers // 2, layers - 2)),)
    return tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))


def default_mask_id(
    model_type: str, vocab_size: int, specials: Specials, used: Collection[int] = ()
) -> tuple[int, str]:
    """The mask token and why it: an embedding row that no text needs. `used`: ids that occur in training rows.

    Raises JobError(78) where the target has neither a spare row nor a spare added token.
    """
    if model_type in HYBRID and vocab_size > HYBRID_MASK_ID:
        return HYBRID_MASK_ID, "as the published Qwen3.5 and 3.6 drafters"
    if specials.size < vocab_size:
        return specials.size, "first unused embedding row"
    taken = frozenset(used).union(*specials.named.values())
    spare = [token for token in specials.added if token < vocab_size and token not in taken]
    if spare:
        return max(spare), "highest added token with no role and no use in the data"
    raise _refuse("mask_token_id", "the target has no unused embedding row and no spare added token", "name one")


@dataclass(frozen=True, slots=True)
class Choice:
    """A drafter's config and, for every field of it, where its value comes from."""

    config: DrafterConfig
    origin: Mapping[str, str]

    def lines(self) -> list[str]:
        """`field = value  (origin)`, one a field, for a dry run."""
        return [f"{name} = {getattr(self.config, name)}  ({why})" for name, why in self.origin.items()]


def derive(
    target: Mapping[str, Any],
    specials: Specials,
    overrides: Mapping[str, Any] | None = None,
    used: Collection[int] = (),
) -> Choice:
    """Choose a drafter for a target.

    target: its config.json as a mapping, a vision-language one with its nested `text_config`. overrides: field ->
    value, None for "not given", `sliding_window` 0 for no window. used: token ids that occur in training rows.
    Raises JobError(78), naming the field, for an unknown family, an unknown override or an impossible value.
    """
    text: Mapping[str, Any] = target.get("text_config") or target
    family = str(text.get("model_type") or target.get("model_type"))
    if family not in FAMILIES:
        raise _refuse("model_type", f"`{family}` is none of {', '.join(sorted(FAMILIES))}")
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    known = [entry.name for entry in fields(DrafterConfig)]
    for name in given:
        if name not in known:
            raise _refuse(name, "is not a field of a drafter", f"fields: {', '.join(known)}")
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}

    def choose(name: str, value: Any, why: str = "default") -> Any:
        values[name], origin[name] = (given[name], "given") if name in given else (value, why)
        return values[name]

    def own(name: str) -> Any:
        if text.get(name) is None and name not in given:
            raise _refuse(name, "is not in the target's config.json", f"give {name}")
        return choose(name, text.get(name), "the target's")

    hidden = own("hidden_size")
    if text.get("intermediate_size") is None and text.get("moe_intermediate_size"):
        choose("intermediate_size", 3 * hidden, "3 x hidden_size: the target's MLP is experts")
    else:
        own("intermediate_size")
    for name in ("vocab_size", "max_position_embeddings", "rms_norm_eps"):
        own(name)
    heads = int(text.get("num_attention_heads") or 0)
    head_dim = text.get("head_dim") or (int(hidden) // heads if heads else 0)
    if head_dim > 128:  # 256-wide gated heads: the published drafters use 32 heads and 8 key heads of 128 instead
        shape, why = (32, 8, 128), f"the target's heads are {head_dim} wide"
    else:
        shape, why = (heads, int(text.get("num_key_value_heads") or heads), head_dim), "the target's"
    for name, size in zip(("num_attention_heads", "num_key_value_heads", "head_dim"), shape, strict=True):
        choose(name, size, why)
    depth = choose("num_target_layers", text.get("num_hidden_layers"), "the target's")
    if not depth:
        raise _refuse("num_target_layers", "num_hidden_layers is not in the target's config.json")
    choose("target_layer_ids", default_taps(depth), "spread evenly")
    layers = choose("num_hidden_layers", 5)
    if type(layers) is not int:
        raise _refuse("num_hidden_layers", f"{layers!r} is not a positive whole number")
    choose("block_size", 16)
    window = choose("sliding_window", HYBRID_WINDOW if family in HYBRID else None, "by family")
    values["sliding_window"] = window or None
    kinds = (SLIDING,) * (layers - 1) + (FULL,) if window else (FULL,) * layers
    choose("layer_types", kinds, "all but the last slide" if window else "no window")
    rope: Mapping[str, Any] = text.get("rope_parameters") or {}
    choose("rope_theta", text.get("rope_theta") or rope.get("rope_theta") or 10000.0, "the target's")
    choose("final_logit_softcapping", text.get("final_logit_softcapping"), "the target's")
    for entry in fields(DrafterConfig):
        if entry.name not in values and entry.default is not MISSING:
            choose(entry.name, entry.default)
    if "mask_token_id" in given:
        choose("mask_token_id", None)
    else:
        choose("mask_token_id", *default_mask_id(family, values["vocab_size"], specials, used))
    config = DrafterConfig.build(values)
    check_mask(config.mask_token_id, target, specials)
    return Choice(config, {name: origin[name] for name in known})


def check_mask(mask: int, target: Mapping[str, Any], specials: Specials) -> None:
    """Raises JobError(78) for a mask token that text uses: its embedding would mean two things.

    target: config.json, a vision-language one with its nested `text_config`.
    """
    text: Mapping[str, Any] = target.get("text_config") or target
    roles = {role: set(ids) for role, ids in specials.named.items()}
    for role in ("pad", "eos", "bos"):
        told = text.get(f"{role}_token_id")
        roles.setdefault(role, set()).update(told if isinstance(told, list) else [] if told is None else [told])
    for role, ids in roles.items():
        if mask in ids:
            raise _refuse("mask_token_id", f"{mask} is the {role} token", "name a row that no text uses")
