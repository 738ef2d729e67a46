"""The frozen target: its tap states for training, its logits for evaluation.

Tap `L` is the output of decoder layer `L`, read by a forward hook on `layers[L]`: transformers' `hidden_states[L + 1]`.
The last layer is never tapped: some engines read it after the final norm, others before.

Batches are padded on the right and carry no mask: everything in a decoder-only model is causal, so a real position
never sees padding, and packing, which leaks recurrent state between documents, is not needed.

Shapes: B rows, S positions, K taps, H hidden size, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from tokenizer.job import Exit, JobError

FETCH = "the files are of two models, or not all there: fetch it again"
RECURRENT = frozenset({"linear_attention", "mamba", "recurrent"})  # layer types whose state cannot be rolled back


def text_config(config: Any) -> Any:
    """The language model's part of a transformers config; a vision-language config nests it."""
    return config.get_text_config(decoder=True)


def is_hybrid(config: Any) -> bool:
    """Whether some layer keeps a running state, so that a cache cannot be cut back to fewer tokens."""
    return bool(RECURRENT & set(getattr(text_config(config), "layer_types", None) or ()))


def check_taps(taps: Sequence[int], layers: int) -> None:
    """Raises JobError(78) unless `taps` is strictly ascending and within `layers`, the last layer excluded."""
    rising = all(a < b for a, b in pairwise(taps))
    if not taps or not rising or taps[0] < 0 or taps[-1] >= layers - 1:
        raise JobError(
            Exit.CONFIG,
            f"taps {list(taps)} do not fit a target of {layers} layers",
            f"name strictly ascending layer numbers from 0 to {layers - 2}",
        )


def resolve(name: str) -> tuple[str, dict[str, str]]:
    """`PATH`, `FILE.gguf` or `HUB-ID@REVISION` -> what from_pretrained takes."""
    path = Path(name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise JobError(Exit.CONFIG, f"target `{name}` is not a file", "name a GGUF file or a model directory")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").is_file():
            found = sorted(path.glob("*.gguf"))
            if len(found) == 1:
                return str(path), {"gguf_file": found[0].name}
            raise JobError(
                Exit.CONFIG,
                f"target directory `{name}` has no config.json and {len(found)} GGUF files",
                "name a transformers directory or one GGUF file",
            )
        return str(path), {}
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise JobError(Exit.CONFIG, f"target `{name}` does not exist", "name a model directory, a GGUF file or an id")
    hub, _, revision = name.partition("@")
    return hub, {"revision": revision} if revision else {}


def read_config(name: str) -> Any:
    """The target's transformers config, without its weights. Raises JobError(78) where there is none."""
    from transformers import AutoConfig

    source, where = resolve(name)
    try:
        return AutoConfig.from_pretrained(source, **where)
    except (OSError, ValueError) as error:
        raise JobError(Exit.CONFIG, f"target `{name}`: {_first_line(error)}", "check --target") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _refuse_noise(name: str, told: Mapping[str, Any]) -> None:
    """JobError(78) for tensors of the model that its files do not hold: transformers fills them with random numbers.

    told: the loading info of `from_pretrained`.
    """
    wrong = [f"`{key}` is {tuple(found)}, not {tuple(due)}" for key, found, due in sorted(told["mismatched_keys"])]
    wrong += [f"`{key}` is missing" for key in sorted(told["missing_keys"])]
    if wrong:
        more = f"; {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise JobError(
            Exit.CONFIG, f"target `{name}`: weights do not fit its config.json: {'; '.join(wrong[:3])}{more}", FETCH
        )


@dataclass(slots=True)
class Target:
    """A frozen causal language model and the taps read from it.

    model: transformers causal LM in eval mode, without gradients. body: its decoder, owner of `.layers`.
    `truncated`: the layers after the last tap are gone, so only `states` works.
    """

    model: nn.Module
    body: nn.Module
    taps: tuple[int, ...]
    truncated: bool

    @classmethod
    def load(
        cls,
        name: str,
        taps: Sequence[int],
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
        truncate: bool = True,
    ) -> Target:
        """Read a directory, a GGUF file or a hub id. `truncate` frees what lies behind the last tap (training).

        Raises JobError(78): no such model, taps out of range, float16 (hidden states overflow it).
        """
        if dtype == torch.float16:
            raise JobError(Exit.CONFIG, "dtype float16 is refused: hidden states overflow it", "use bfloat16")
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import set_verbosity_error

        set_verbosity_error()  # its table of tensors is said below, in a line
        check_taps(taps, int(text_config(read_config(name)).num_hidden_layers))
        source, where = resolve(name)
        try:
            model, told = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **where
            )
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise JobError(Exit.CONFIG, f"target `{name}`: {_first_line(error)}", "check --target") from error
        _refuse_noise(name, told)
        return cls.wrap(model.to(device), taps, truncate=truncate)

    @classmethod
    def wrap(cls, model: Any, taps: Sequence[int], *, truncate: bool = False) -> Target:
        """Freeze a transformers causal LM that is in memory already; `truncate` changes it."""
        body = model.get_decoder()
        check_taps(taps, len(body.layers))
        model.requires_grad_(False).eval()
        if truncate:
            body.layers = body.layers[: taps[-1] + 1]
            body.norm = nn.Identity()
        return cls(model, body, tuple(taps), truncate)

    @property
    def config(self) -> Any:
        """The text part of the model's config."""
        return text_config(self.model.config)

    @property
    def device(self) -> torch.device:
        return self.embed_VH.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_VH.dtype

    @property
    def embed_VH(self) -> Tensor:
        """Input embedding [V, H], frozen: the drafter's noise embedding."""
        weight: Tensor = self.model.get_input_embeddings().weight  # type: ignore[operator]
        return weight.detach()

    @property
    def head_VH(self) -> Tensor:
        """Output projection [V, H], frozen and possibly the embedding itself: the drafter's head."""
        weight: Tensor = self.model.get_output_embeddings().weight  # type: ignore[operator]
        return weight.detach()

    @contextmanager
    def recorded(self) -> Iterator[list[Tensor]]:
        """While open, a forward pass fills the list with the K tap outputs [B, S, H] in tap order."""
        found: list[Tensor] = []

        def record(_module: nn.Module, _args: object, output: Any) -> None:
            found.append(output[0] if isinstance(output, tuple) else output)

        layers: Any = self.body.layers
        hooks = [layers[tap].register_forward_hook(record) for tap in self.taps]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def states(self, ids_BS: Tensor) -> Tensor:
        """Tap states [B, S, K * H] of right-padded token ids [B, S]; what lies behind a row's end is garbage.

        Runs the decoder without its head, and without the layers behind the last tap if truncated.
        """
        with self.recorded() as found:
            self.body(input_ids=ids_BS.to(self.device), use_cache=False)
        return torch.cat(found, dim=-1)
