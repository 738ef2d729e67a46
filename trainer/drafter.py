"""The drafter: a small Qwen3-style decoder whose keys and values start with the target's own hidden states.

A block is the anchor token followed by mask tokens; one pass predicts the token of every slot, slot k the token at
position anchor + k. The target's tap states, projected once (`fc`, `hidden_norm`), give every layer its context keys
and values with that layer's own weights; the context has no queries, no MLP and no residual stream. Embedding and
output head are the target's and stay outside.

Parameter names are those of the published checkpoints: 11 a layer and 3 more, without a prefix.

Shapes: B rows, S row positions, C context positions, K taps, H hidden size, A anchors a row, T = A * block_size block
tokens, N heads, M key-value heads, D head width, I intermediate size, R selected tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.attention import Blocks, Kind
from trainer.config import Choice, DrafterConfig, Specials, derive

__all__ = ["Choice", "Drafter", "DrafterConfig", "Specials", "derive", "noise_ids"]

Context = list[tuple[Tensor, Tensor]]  # a layer's keys (normed, rotated) and values, each [B, M, C, D]


class _Norm(torch.autograd.Function):
    """RMS norm computed in float32, keeping only its input and one figure a row for the backward pass."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return weight * (wide * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors  # type: ignore[attr-defined]
        unit = x.float() * scale
        wide = grad.float()
        grad_weight = (wide * unit).flatten(0, -2).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:  # type: ignore[attr-defined]
            return None, grad_weight, None
        wide = wide * weight.float()
        grad_x = wide.sub_(unit.mul_((wide * unit).mean(-1, keepdim=True))).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)  # one kernel there
        out: Tensor = _Norm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return out


class _Gate(torch.autograd.Function):
    """silu(gate) * up, keeping its two inputs alone: two tensors of [R, I] a layer less than plain autograd."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        gate, up = ctx.saved_tensors  # type: ignore[attr-defined]
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


class MLP(nn.Module):
    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gated = _Gate.apply(self.gate_proj(x), self.up_proj(x))  # type: ignore[no-untyped-call]
        out: Tensor = self.down_proj(gated)
        return out


def rotary(positions: Tensor, c: DrafterConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [..., 1, P, D] of positions [..., P]: default rotary over the whole head, angles in float32."""
    steps = torch.arange(0, c.head_dim, 2, dtype=torch.int64, device=positions.device).float()
    angles = positions[..., None].float() * (1.0 / c.rope_theta ** (steps / c.head_dim))
    angles = torch.cat([angles, angles], -1).unsqueeze(-3)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary to x [..., P, D]."""
    half = x.shape[-1] // 2
    return x * turn[0] + torch.cat([-x[..., half:], x[..., :half]], -1) * turn[1]


class Attention(nn.Module):
    def __init__(self, c: DrafterConfig, kind: Kind) -> None:
        super().__init__()
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.kind = kind
        self.width = c.head_dim

    def heads(self, x: Tensor) -> Tensor:
        """[B, P, heads * D] -> [B, heads, P, D]."""
        return self._split(x).transpose(1, 2)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.width)

    def keys_values(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys, normed and rotated, and values, each [B, M, P, D], of states [B, P, H]."""
        keys = self.k_norm(self._split(self.k_proj(x))).transpose(1, 2)
        return rotate(keys, turn), self.heads(self.v_proj(x))

    def forward(
        self, x_BTH: Tensor, context: tuple[Tensor, Tensor], blocks: Blocks, turn: tuple[Tensor, Tensor]
    ) -> Tensor:
        """[B, T, N * D]: what the block tokens read, before the output projection."""
        q_BNTD = rotate(self.q_norm(self._split(self.q_proj(x_BTH))).transpose(1, 2), turn)
        out_BNTD = blocks.attend(q_BNTD, context, self.keys_values(x_BTH, turn), self.kind)
        return out_BNTD.transpose(1, 2).flatten(2)


class Layer(nn.Module):
    def __init__(self, c: DrafterConfig, kind: Kind) -> None:
        super().__init__()
        self.self_attn = Attention(c, kind)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(
        self,
        x_BTH: Tensor,
        context: tuple[Tensor, Tensor],
        blocks: Blocks,
        turn: tuple[Tensor, Tensor],
        rows_R: Tensor | None = None,
    ) -> Tensor:
        """[B, T, H], or [R, H] of the selected tokens: only attention mixes tokens, the others need no MLP."""
        read = self.self_attn(self.input_layernorm(x_BTH), context, blocks, turn)
        if rows_R is not None:
            x_BTH, read = x_BTH.flatten(0, 1)[rows_R], read.flatten(0, 1)[rows_R]
        x = x_BTH + self.self_attn.o_proj(read)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Drafter(nn.Module):
    """The trainable part. `state_dict()` holds exactly the tensors of a checkpoint."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        kinds = [Kind(config.window(i), config.causal(i)) for i in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(Layer(config, kind) for kind in kinds)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @torch.no_grad()
    def init(self, seed: int) -> Drafter:
        """Draw every matrix from N(0, initializer_range) with a generator of its own; norms are ones."""
        generator = torch.Generator().manual_seed(seed)
        for _, parameter in sorted(self.named_parameters()):
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            drawn = torch.empty(parameter.shape, device="cpu").normal_(
                0.0, self.config.initializer_range, generator=generator
            )
            parameter.copy_(drawn)
        return self

    def context(self, taps_BCX: Tensor, start: int = 0) -> Context:
        """Every layer's keys and values of C positions from `start`. taps_BCX: [B, C, K * H], taps in their order."""
        states_BCH = self.hidden_norm(self.fc(taps_BCX))
        positions = torch.arange(start, start + states_BCH.shape[1], device=states_BCH.device)
        turn = rotary(positions, self.config, states_BCH.dtype)
        return [layer.self_attn.keys_values(states_BCH, turn) for layer in self._layers()]

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def forward(self, noise_BTH: Tensor, context: Context, anchors_BA: Tensor, rows_R: Tensor | None = None) -> Tensor:
        """Final hidden states of block tokens, after the last norm: what the target's output head takes.

        noise_BTH: embeddings of `noise_ids`, times `input_embedding_scale`; T / A is the block's length, since a server
        cuts its last block short. context: from `context`, at least as long as the last anchor. anchors_BA: int64,
        ascending a row, padded behind with 0. rows_R: indices into the B * T block tokens to compute, all of them if
        None. Returns [B, T, H], or [R, H].
        """
        blocks = Blocks.of(anchors_BA, noise_BTH.shape[1] // anchors_BA.shape[1], context[0][0].shape[2])
        turn = rotary(blocks.positions_BT, self.config, noise_BTH.dtype)
        x = noise_BTH
        last = len(self.layers) - 1
        for i, (layer, keys_values) in enumerate(zip(self._layers(), context, strict=True)):
            x = layer(x, keys_values, blocks, turn, rows_R if i == last else None)
        out: Tensor = self.norm(x)
        return out

    def logits(self, hidden: Tensor, head_VH: Tensor) -> Tensor:
        """Logits [..., V] of final hidden states under the target's output head, scaled and capped as configured."""
        logits = F.linear(hidden, head_VH) * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return torch.tanh(logits / cap) * cap if cap else logits

    def embed(self, ids: Tensor, embed_VH: Tensor) -> Tensor:
        """Raw rows of the target's embedding, times `input_embedding_scale`: [..., H]."""
        return F.embedding(ids, embed_VH) * self.config.input_embedding_scale


def noise_ids(tokens_BA: Tensor, config: DrafterConfig) -> Tensor:
    """Input tokens of blocks, int64 [B, T]: the token at each anchor, then mask tokens."""
    ids = tokens_BA.new_full((*tokens_BA.shape, config.block_size), config.mask_token_id)
    ids[..., 0] = tokens_BA
    return ids.flatten(1)
