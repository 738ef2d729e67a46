"""Where every setting comes from: flag, then environment, then dflash.toml, then the default.

Each value keeps its origin, so that `doctor -v` can answer "why is it that". Unknown keys are refused by name: a
misspelt key that is silently ignored costs a run.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflashctl.errors import UsageError

FILE = "dflash.toml"
PREFIX = "DFLASH_"


@dataclass(frozen=True, slots=True)
class Key:
    """One setting: its type in dflash.toml and in the environment, and its default."""

    kind: str  # "str" | "int" | "float" | "bool" | "list" | "json" | "tables"
    default: Any
    help: str


#: What a Job on a cluster needs beside its work; the same for `tokenize` and `train`.
PLACE: dict[str, Key] = {
    "image": Key("str", None, "image of the pods, by digest; default: that of the node profile, else of the registry"),
    "node": Key("str", None, "node profile, a section [node.NAME]"),
    "queue": Key("str", None, "Kueue queue"),
    "env": Key("json", {}, "variables of the pods, never a secret"),
    "s3_secret": Key("str", None, "Secret with the S3 credentials; default: workload identity"),
    "service_account": Key("str", None, "service account of the pods"),
    "set": Key("list", [], "single fields of the Job, FIELD=VALUE"),
}

#: One node profile, [node.NAME]: what one pod asks for, in Kubernetes quantities.
NODE: dict[str, Key] = {
    "cpu": Key("str", None, "cores"),
    "memory": Key("str", None, "memory, /dev/shm included"),
    "gpus": Key("int", None, "GPUs"),
    "shm": Key("str", None, "size of /dev/shm"),
    "selector": Key("json", None, "labels of the nodes"),
    "tolerations": Key("tables", None, "taints that are tolerated"),
    "volumes": Key("json", None, "volume -> its size, or pvc:CLAIM"),
    "split": Key("str", None, "default of train's --split"),
    "image": Key("str", None, "image of the pods, by digest"),
}

# The settings of each section; `""` is the top of the file. The flags of the verbs take their defaults from here.
SCHEMA: dict[str, dict[str, Key]] = {
    "": {
        "backend": Key("str", None, "where runs go: local or kube; default: kube if there is a current context"),
        "context": Key("str", None, "kubeconfig context; default: the current one"),
        "namespace": Key("str", None, "namespace; default: the context's"),
        "registry": Key("str", None, "of images that are not named: REGISTRY/dflash-tokenizer and -trainer"),
        "output": Key("str", "table", "format of stdout: table, wide, json, yaml, name"),
    },
    "tokenize": {
        "input": Key("list", None, "files, directories, globs or prefixes of completions"),
        "out": Key("str", None, "where the dataset goes: a path, file:// or s3://"),
        "model": Key("str", None, "directory, s3:// prefix or hub id with the tokenizer and template"),
        "parallelism": Key("int", 1, "how many indexes run at once"),
        "shards": Key("int", None, "number of shards; default: about 96 MiB of input each"),
        "workers": Key("int", None, "processes of one index; default: the CPUs it may use"),
        "max_length": Key("int", None, "cut rows to this many tokens; default: no cut"),
        "loss_on": Key("str", "all", "what is learnt: all the model emitted, or the response after its thinking"),
        "preserve_thinking": Key("bool", False, "render with preserve_thinking, so that a conversation is one row"),
        "min_loss_tokens": Key("int", 16, "rows with fewer learnt tokens are filtered"),
        "template_kwargs": Key("json", {}, "chat_template_kwargs for rows that bring none"),
        "generator": Key("str", "", "NAME@REV of the model that wrote the completions"),
        "max_reject": Key("float", 0.01, "largest share of malformed lines before the dataset is refused"),
        "batch_input": Key("list", [], "request files that OpenAI batch outputs are joined with"),
        **PLACE,
    },
    "train": {
        "dataset": Key("str", None, "OUT of a tokenize"),
        "out": Key("str", None, "where checkpoints go: s3:// or a path"),
        "target": Key("str", None, "the target: a path on the model volume, an s3:// prefix or hub-id@revision"),
        "split": Key("str", None, "target ranks + drafter ranks, or colocated; default: the node profile's"),
        "steps": Key("int", None, "optimiser steps"),
        "epochs": Key("int", None, "passes over the dataset"),
        "layers": Key("int", None, "decoder layers of the drafter"),
        "block_size": Key("int", None, "tokens of a block, the anchor included"),
        "taps": Key("str", None, "target layers whose hidden states are shipped, e.g. 1,16,31,46,61"),
        "mask_token_id": Key("int", None, "the mask token"),
        "anchors": Key("int", None, "anchors of a row"),
        "max_length": Key("int", None, "rows are cut to this many tokens"),
        "batch_rows": Key("int", None, "rows of a micro-batch"),
        "accumulate": Key("int", None, "micro-batches of a step"),
        "lr": Key("float", None, "peak learning rate"),
        "schedule": Key("str", None, "cosine or wsd"),
        "seed": Key("int", None, "seed of order, anchors and start"),
        "init_from": Key("str", None, "z-lab drafter to start from"),
        "checkpoint_every": Key("str", None, "steps or time between checkpoints"),
        "held_out": Key("float", None, "share of input lines that are measured, never trained"),
        "allow_degenerate": Key("bool", False, "train on a dataset that the gate calls degenerate"),
        **PLACE,
    },
}


@dataclass(frozen=True, slots=True)
class Value:
    """A setting and where it came from, in words."""

    value: Any
    origin: str


def load_file(path: Path | None, cwd: Path) -> tuple[dict[str, dict[str, Any]], str]:
    """The settings of dflash.toml by section, and the file's name (empty: there is none).

    `path` is the file the user named, which must exist; else `cwd`/dflash.toml, which may not.
    """
    file = path or cwd / FILE
    if path is None and not file.exists():
        return {}, ""
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"`{file}` does not exist", "name another file with `--config`") from None
    except OSError as error:
        raise UsageError(f"`{file}` cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"`{file}` is not valid TOML: {error}") from None
    sections: dict[str, dict[str, Any]] = {"": {}}
    for name, entry in raw.items():
        if name == "node":
            sections |= _profiles(file, entry)
        elif isinstance(entry, dict):
            if name not in SCHEMA:
                raise UsageError(
                    f"`{file}` has an unknown section `[{name}]`", _nearest(name, {**SCHEMA, "node": None})
                )
            sections[name] = {key: _typed(file, name, key, value) for key, value in entry.items()}
        else:
            sections[""][name] = _typed(file, "", name, entry)
    return sections, str(file)


def _profiles(file: Path, entry: Any) -> dict[str, dict[str, Any]]:
    """`node.NAME` -> the typed keys of that profile."""
    found: dict[str, dict[str, Any]] = {}
    if not isinstance(entry, dict):
        raise UsageError(f"`node` in `{file}` is {entry!r}, not profiles", "a profile is a section: [node.NAME]")
    for profile, keys in entry.items():
        if not isinstance(keys, dict):
            raise UsageError(f"`{file}` has an unknown key `node.{profile}`", "a profile is a section: [node.NAME]")
        section = f"node.{profile}"
        found[section] = {key: _typed(file, section, key, value) for key, value in keys.items()}
    return found


def _typed(file: Path, section: str, key: str, value: Any) -> Any:
    where = f"{section}.{key}" if section else key
    known = NODE if section.startswith("node.") else SCHEMA[section]
    if key not in known:
        raise UsageError(f"`{file}` has an unknown key `{where}`", _nearest(key, known))
    kind = known[key].kind
    if kind == "list":
        value = [value] if isinstance(value, str) else value
        fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
    elif kind == "float":
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        value = float(value) if fits else value
    elif kind == "int":
        fits = isinstance(value, int) and not isinstance(value, bool)
    elif kind == "tables":
        fits = isinstance(value, list) and all(isinstance(item, dict) for item in value)
    else:
        fits = isinstance(value, {"str": str, "bool": bool, "json": dict}[kind])
    if not fits:  # a table may hold what was meant to be a secret: it is not repeated
        raise UsageError(f"`{where}` in `{file}` is {'' if kind == 'json' else f'{value!r}, '}not {_A_KIND[kind]}")
    return value


_A_KIND = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a string or a list of strings",
    "json": "a table",
    "tables": "a list of tables",
}


def _nearest(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, [key for key in known if key], n=1)
    return f"did you mean `{close[0]}`?" if close else f"known are {', '.join(f'`{key}`' for key in known if key)}"


def variable(section: str, key: str) -> str:
    """The environment variable of a setting, e.g. `DFLASH_TOKENIZE_OUT`."""
    return PREFIX + (f"{section}_{key}" if section else key).upper()


def parse_text(kind: str, text: str, name: str) -> Any:
    """A value from a flag or a variable; raises UsageError naming `name`."""
    import json

    try:
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text)
        if kind == "bool":
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
        if kind == "list":
            return text.split()
        if kind == "json":
            value = json.loads(text)
            if not isinstance(value, dict):
                raise ValueError
            return value
    except (ValueError, KeyError):
        if kind == "json":
            raise UsageError(f"`{name}` is not a JSON object") from None
        raise UsageError(f"`{name}` is {text!r}, not {_A_KIND[kind]}") from None
    return text


def resolve(
    section: str, flags: Mapping[str, Any], env: Mapping[str, str], sections: Mapping[str, dict[str, Any]], file: str
) -> dict[str, Value]:
    """Every setting of `section` with its origin; a flag that is None (or an empty list) was not given."""
    values: dict[str, Value] = {}
    for key, spec in SCHEMA[section].items():
        flag, name = flags.get(key), variable(section, key)
        if flag is not None and flag != []:
            values[key] = Value(flag, "argument" if key == "input" else f"--{key.replace('_', '-')}")
        elif env.get(name):
            values[key] = Value(parse_text(spec.kind, env[name], name), f"environment {name}")
        elif key in sections.get(section, {}):
            values[key] = Value(sections[section][key], file)
        else:
            values[key] = Value(spec.default, "default")
    return values


def unknown_variables(env: Mapping[str, str]) -> list[str]:
    """DFLASH_* variables that no setting reads; `doctor` shows them, since other tools may own them."""
    known = {variable(section, key) for section, keys in SCHEMA.items() for key in keys}
    known |= {PREFIX + "CONFIG", PREFIX + "SCRATCH"}
    return sorted(name for name in env if name.startswith(PREFIX) and name not in known)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings file and environment of one invocation; verbs ask it for a section."""

    sections: Mapping[str, dict[str, Any]]
    file: str
    env: Mapping[str, str]
    flags: Mapping[str, Any]  # global flags

    def section(self, name: str, flags: Mapping[str, Any] | None = None) -> dict[str, Value]:
        """Resolved settings of one section; `flags` are those of the verb."""
        return resolve(name, flags if flags is not None else self.flags, self.env, self.sections, self.file)


def load(config: str | None, flags: Mapping[str, Any]) -> Settings:
    """Settings from the process environment and `config`, DFLASH_CONFIG or ./dflash.toml."""
    named = config or os.environ.get(PREFIX + "CONFIG")
    sections, file = load_file(Path(named) if named else None, Path.cwd())
    return Settings(sections, file, dict(os.environ), flags)
