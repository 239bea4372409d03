"""
The DFlare drafter (arXiv 2606.02091), and with `fusion="shared_fc"` its predecessor DFlash (arXiv 2602.06036).

Read it top to bottom: rotary embedding and context cache, then fusion -> attention -> layer -> model. Shapes are named
by b (batch), n (new context tokens), s (block tokens), T (taps), D (draft layers), H (hidden size).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from .batches_dflare import decode_batch, gather_columns
from .candidates_dflare import DFlareCandidateGenerator, DraftRecord, record_drafts
from .checks_dflare import check_target
from .configuration_dflare import DFlareConfig
from .hook_dflare import attach_to, detach_from, install_hook
from .masks_dflare import masks_by_layer_type

# Start value of the fusion logit at a draft layer's depth-matched tap; all others start at 0 (published code).
FUSION_START = 2.0

KeyValue = tuple[torch.Tensor, ...]  # keys and values, or cos and sin


class DFlareRotaryEmbedding(Qwen3RotaryEmbedding):
    """
    Qwen3's rotary embedding, except that it honours `partial_rotary_factor` in the default type, and that the frequencies
    never change with the length seen (types `dynamic` and `longrope`): cached context would keep the old ones, and one
    call would change the next one's drafts.
    """

    @staticmethod
    def compute_default_rope_parameters(config: DFlareConfig, device=None, **kwargs) -> tuple[torch.Tensor, float]:
        rope = config.rope_parameters
        dim = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, dim, 2, dtype=torch.float, device=device) / dim
        return rope["rope_theta"] ** -exponents, 1.0

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> KeyValue:
        """cos and sin (b, s, rotary_dim) in the dtype of `x` for positions (b, s)."""
        angles = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        angles = torch.cat([angles, angles], dim=-1)
        return tuple((table * self.attention_scaling).to(x.dtype) for table in (angles.cos(), angles.sin()))


def rotate(states: torch.Tensor, position_embeddings: KeyValue) -> torch.Tensor:
    """Applies RoPE to (b, heads, s, head_dim); only the leading dimensions turn where cos is narrower than a head."""
    cos, sin = (table.unsqueeze(1) for table in position_embeddings)
    turned, kept = states[..., : cos.shape[-1]], states[..., cos.shape[-1] :]
    turned = turned * cos + rotate_half(turned) * sin
    return torch.cat([turned, kept], dim=-1) if kept.shape[-1] else turned


class ContextCache:
    """
    Keys and values of the committed context, per draft layer. The block's own lie behind them only while it is drafted,
    so nothing is copied and nothing has to be rolled back. Buffers are (b, kv_heads, capacity, head_dim).
    """

    def __init__(self, num_layers: int, headroom: int):
        self.length = 0
        self.headroom = headroom
        self.buffers: list[KeyValue | None] = [None] * num_layers

    def append(self, layer_idx: int, context: KeyValue) -> None:
        """Writes new context behind the committed one; `advance` commits it once all layers have done so."""
        self._write(layer_idx, self.length, context)

    def advance(self, count: int) -> None:
        """Commits the `count` tokens that every layer has appended."""
        self.length += count

    def with_block(self, layer_idx: int, block: KeyValue) -> KeyValue:
        """Views of the committed keys and values followed by the block's, which the next call overwrites."""
        buffers = self._write(layer_idx, self.length, block)
        end = self.length + block[0].shape[2]
        return tuple(buffer[:, :, :end] for buffer in buffers)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Keeps these sequences of the batch."""
        self._change(lambda states: states[rows.to(states.device)])

    def select_columns(self, columns: torch.Tensor) -> None:
        """Keeps, for each sequence, the committed tokens at these places, (b, n) ascending."""
        self._change(lambda states: gather_columns(states, columns))
        self.length = columns.shape[1]

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.buffers = [tuple(change(states) for states in buffers) if buffers else None for buffers in self.buffers]

    def _write(self, layer_idx: int, start: int, states: KeyValue) -> KeyValue:
        end = start + states[0].shape[2]
        buffers = self.buffers[layer_idx]
        if buffers is None or buffers[0].shape[2] < end:
            capacity = end + max(self.headroom, end // 4)
            grown = tuple(new.new_empty(*new.shape[:2], capacity, new.shape[3]) for new in states)
            for old, new in zip(buffers or (), grown, strict=False):
                new[:, :, :start] = old[:, :, :start]
            buffers = self.buffers[layer_idx] = grown
        for buffer, new in zip(buffers, states, strict=True):
            buffer[:, :, start:end] = new
        return buffers


class DFlareAttention(nn.Module):
    """
    Queries come from the block alone; keys and values are the context's, then the block's (paper, Method). So there are
    more keys than queries, and no query is causal: the context lies before the block, and the block sees all of itself.
    """

    def __init__(self, config: DFlareConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = False

        def linear(heads: int) -> nn.Linear:
            return nn.Linear(config.hidden_size, heads * self.head_dim, bias=config.attention_bias)

        self.q_proj = linear(config.num_attention_heads)
        self.k_proj = linear(config.num_key_value_heads)
        self.v_proj = linear(config.num_key_value_heads)
        if config.separate_context_kv:
            self.k_proj_target = linear(config.num_key_value_heads)
            self.v_proj_target = linear(config.num_key_value_heads)
        self.o_proj = nn.Linear(
            config.num_attention_heads * self.head_dim, config.hidden_size, bias=config.attention_bias
        )
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def project_context(self, context: torch.Tensor, position_embeddings: KeyValue) -> KeyValue:
        """Keys and values (b, kv_heads, n, head_dim) of the fused context (b, n, H)."""
        if self.config.separate_context_kv:
            return self._key_value(context, self.k_proj_target, self.v_proj_target, position_embeddings)
        return self._key_value(context, self.k_proj, self.v_proj, position_embeddings)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: KeyValue,
        attention_mask: torch.Tensor | None,
        join: Callable[[int, KeyValue], KeyValue],
        **kwargs,
    ) -> torch.Tensor:
        """
        Args:
            hidden_states: (b, s, H), the normalised draft stream.
            position_embeddings: cos and sin of the block, (b, s, rotary_dim) each.
            attention_mask: None where every query sees every key, else (b, 1, s, keys).
            join: puts this layer's context before the block's keys and values.
        """
        block = self._key_value(hidden_states, self.k_proj, self.v_proj, position_embeddings)
        keys, values = join(self.layer_idx, block)
        queries = rotate(self.q_norm(self._heads(self.q_proj(hidden_states))).transpose(1, 2), position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, _ = attend(
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))

    def _key_value(self, states, k_proj: nn.Linear, v_proj: nn.Linear, position_embeddings: KeyValue) -> KeyValue:
        keys = rotate(self.k_norm(self._heads(k_proj(states))).transpose(1, 2), position_embeddings)
        return keys, self._heads(v_proj(states)).transpose(1, 2)

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(-1, (states.shape[-1] // self.head_dim, self.head_dim))


class DFlareDecoderLayer(GradientCheckpointingLayer):
    """Pre-norm attention and MLP over the block, as in Qwen3."""

    def __init__(self, config: DFlareConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DFlareAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, **attention_kwargs) -> torch.Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **attention_kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DFlareForBlockDiffusion(PreTrainedModel):
    """
    Drafts a block of tokens in one pass from the target's tapped hidden states. It holds no embedding and no head: the
    block comes in as the target's embeddings and goes out as hidden states for the target's head.

    `target.generate(**inputs, assistant_model=drafter)` is all a user needs; see `attach` for use without the patch.
    """

    config_class = DFlareConfig
    config: DFlareConfig
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DFlareDecoderLayer"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: DFlareConfig):
        super().__init__(config)
        config.validate_drafter()  # again, since fields can be set after the config was built
        if config.fusion == "layerwise":
            self.layer_fusion_weights = nn.Parameter(torch.empty(config.num_hidden_layers, config.num_taps))
        if config.fusion == "shared_fc" or config.fusion_fc:
            inputs = config.num_taps if config.fusion == "shared_fc" else 1
            self.fc = nn.Linear(inputs * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([DFlareDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DFlareRotaryEmbedding(config)
        rows = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
        self.register_buffer("draft_token_ids", rows)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> None:
        """None: tokens are embedded by the target."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DFlareForBlockDiffusion) and self.config.fusion == "layerwise":
            init.copy_(module.layer_fusion_weights, fusion_start(self.config))
        if self.config.fusion_fc and module is self.fc:
            init.copy_(module.weight, torch.eye(self.config.hidden_size))
        if isinstance(module, DFlareForBlockDiffusion) and module.draft_token_ids is not None:
            init.copy_(module.draft_token_ids, torch.arange(len(module.draft_token_ids)))

    def set_draft_vocabulary(self, token_ids: Sequence[int] | torch.Tensor | None) -> None:
        """
        Restricts drafts to these tokens, so that only their rows of the target's head are computed; None lifts it. Output
        stays the target's own, since the target verifies; what is never drafted costs acceptance. Saved with the drafter.

        Raises:
            ValueError: for no tokens, one outside the vocabulary, or anything but whole numbers.
        """
        if token_ids is None:
            self.draft_token_ids = self.config.draft_vocab_size = None
            return
        ids = torch.as_tensor(token_ids if isinstance(token_ids, torch.Tensor) else list(token_ids), device=self.device)
        if ids.dim() != 1 or ids.is_floating_point() and len(ids):
            raise ValueError(f"token_ids is {token_ids!r}; a list or a tensor (n,) of whole numbers is expected")
        ids = ids.long().unique()
        if not len(ids) or ids[0] < 0 or ids[-1] >= self.config.vocab_size:
            span = f"{int(ids[0])}..{int(ids[-1])}" if len(ids) else "empty"
            raise ValueError(f"token_ids is {span}, but vocab_size is {self.config.vocab_size}")
        self.draft_token_ids, self.config.draft_vocab_size = ids, len(ids)

    # ------------------------------------------------------------------------------------------------- fusion

    def fuse(self, taps: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """
        The context each draft layer reads, one layer after the other so that no D copies live: for layer d
        RMSNorm(sum_t softmax(w_d)_t h_t) (paper, Method), mixture first, then the one shared norm (published code). With
        `fusion_fc` a linear layer stands between the two.

        Args:
            taps: T tensors (b, n, H), in `target_layer_ids` order.
        Yields:
            (b, n, H) for each draft layer.
        """
        if self.config.fusion == "shared_fc":
            context = self.hidden_norm(self.fc(torch.cat(list(taps), dim=-1)))
            for _ in self.layers:
                yield context
            return
        weights: torch.Tensor = self.layer_fusion_weights
        if self.config.fusion_softmax:
            weights = weights.float().softmax(dim=-1).to(weights.dtype)
        stacked = torch.stack(list(taps))
        for row in weights:
            mixture = (row @ stacked.flatten(1)).view_as(taps[0])
            yield self.hidden_norm(self.fc(mixture) if self.config.fusion_fc else mixture)

    def project_context(self, taps: Sequence[torch.Tensor], position_ids: torch.Tensor) -> Iterator[KeyValue]:
        """Context keys and values of each draft layer in turn; `position_ids` is (b, n)."""
        position_embeddings = self.rotary_emb(taps[0], position_ids)
        layer: Any
        for layer, context in zip(self.layers, self.fuse(taps), strict=True):
            yield layer.self_attn.project_context(context, position_embeddings)

    def extend_context(
        self,
        taps: Sequence[torch.Tensor],
        cache: ContextCache,
        position_ids: torch.Tensor | None = None,
        chunk: int = 256,
    ) -> None:
        """
        Commits newly accepted tokens to the context cache, in chunks so that a long prompt needs no large temporaries.

        Args:
            taps: T tensors (b, n, H) of the target's hidden states, in `target_layer_ids` order, of any float type.
            cache: from `new_context_cache`.
            position_ids: (b, n); by default they continue where the cache ends.
            chunk: tokens projected at once.
        """
        for start in range(0, taps[0].shape[1], chunk):
            piece = [tap[:, start : start + chunk].to(self.device, self.dtype) for tap in taps]
            count = piece[0].shape[1]
            if position_ids is None:
                positions = torch.arange(cache.length, cache.length + count, device=self.device).unsqueeze(0)
            else:
                positions = position_ids[:, start : start + count].to(self.device)
            for layer_idx, context in enumerate(self.project_context(piece, positions)):
                cache.append(layer_idx, context)
            cache.advance(count)

    def new_context_cache(self) -> ContextCache:
        """An empty context cache for one call of `generate()`."""
        return ContextCache(self.config.num_hidden_layers, headroom=256)

    # ------------------------------------------------------------------------------------------------- drafting

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor | Sequence[torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache=None,
        past_key_values=None,
        **kwargs,
    ) -> BaseModelOutput:
        """
        Args:
            noise_embeds: (b, s, H), the target's embeddings of the anchor and the mask tokens; several blocks may follow
                one another in training, told apart by `attention_mask`.
            context_hidden_states: the taps of context tokens not yet in `cache`: (b, n, T * H) concatenated in
                `target_layer_ids` order, or T tensors (b, n, H), or None if there are none.
            attention_mask: None if all is visible; (b, keys) with 1 for visible keys; (b, 1, s, keys), boolean; or a
                `BlockMask` of flex attention.
            position_ids: (b, n + s), the context's positions, then the block's. Defaults to running on from `cache`.
            cache: None, a `ContextCache`, or transformers' `DFlashCache`.
            past_key_values: the name that transformers below 5.24 gives `cache`.
        Returns:
            `last_hidden_state` (b, s, H) after the final norm, for the target's head.
        Raises:
            ValueError: if the context's width is not T * H.
        """
        cache = past_key_values if cache is None else cache
        taps = self._split_taps(context_hidden_states)
        num_new = taps[0].shape[1] if taps else 0
        num_cached = _cached_length(cache)
        if position_ids is None:
            end = num_cached + num_new + noise_embeds.shape[1]
            position_ids = torch.arange(num_cached, end, device=noise_embeds.device).unsqueeze(0)
        masks = masks_by_layer_type(self.config, attention_mask, noise_embeds, position_ids, num_cached)
        join = self._joiner(taps, position_ids[:, :num_new], cache)
        position_embeddings = self.rotary_emb(noise_embeds, position_ids[:, num_new:])
        hidden_states = noise_embeds
        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=True):
            hidden_states = layer(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=masks[layer_type],
                join=join,
                **kwargs,
            )
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))

    def _split_taps(self, context) -> list[torch.Tensor]:
        """The taps as T tensors (b, n, H), whichever way they came; autocast sees to their dtype, else it is ours."""
        if context is None:
            return []
        cast = not torch.is_autocast_enabled(self.device.type)
        if not isinstance(context, torch.Tensor):
            return [tap.to(self.dtype) if cast else tap for tap in context]
        width = self.config.num_taps * self.config.hidden_size
        if context.shape[-1] != width:
            raise ValueError(
                f"context_hidden_states is {context.shape[-1]} wide, but {self.config.num_taps} taps "
                f"of hidden_size {self.config.hidden_size} make {width}"
            )
        return list((context.to(self.dtype) if cast else context).split(self.config.hidden_size, dim=-1))

    def _joiner(self, taps: list[torch.Tensor], position_ids: torch.Tensor, cache) -> Callable:
        """How attention gets context and block together: from our cache, from transformers', or, in training, directly."""
        if isinstance(cache, ContextCache):
            if taps:
                self.extend_context(taps, cache)
            return cache.with_block
        contexts = list(self.project_context(taps, position_ids)) if taps else []

        def join(layer_idx: int, block: KeyValue) -> KeyValue:
            if contexts:
                block = tuple(torch.cat(pair, dim=2) for pair in zip(contexts[layer_idx], block, strict=True))
            return block if cache is None else cache.update(*block, layer_idx)

        return join

    # ------------------------------------------------------------------------------------------------- in generate()

    def check_target(self, target: PreTrainedModel, generation_config) -> None:
        """Raises `ValueError` if this drafter does not belong to `target` or the call cannot be accelerated."""
        check_target(self, target, generation_config)

    def make_candidate_generator(self, target: PreTrainedModel, **call) -> DFlareCandidateGenerator:
        """What the hook asks an assistant model for: the candidate generator of one call of `generate()`."""
        return DFlareCandidateGenerator(self, target, **call)

    def decode_batch(self, target: PreTrainedModel, stock: Callable, input_ids: torch.Tensor, **call) -> torch.Tensor:
        """What the hook calls for more than one sequence; see `batches_dflare.decode_batch`."""
        return decode_batch(self, target, stock, input_ids, **call)

    def attach(self, target: PreTrainedModel) -> None:
        """Makes this one target accept DFlare drafters without the class-wide hook (see `hook_dflare`)."""
        attach_to(target)

    def detach(self, target: PreTrainedModel) -> None:
        """Undoes `attach`."""
        detach_from(target)

    @contextmanager
    def record_drafts(self) -> Iterator[list[DraftRecord]]:
        """
        Collects one `DraftRecord` per call of `generate()` made inside, by this thread (or task) only:

            with drafter.record_drafts() as records:
                target.generate(**inputs, assistant_model=drafter)
            records[0].acceptance_length
        """
        with record_drafts() as records:
            yield records


def _cached_length(cache) -> int:
    """Context tokens that a cache of either kind holds."""
    if cache is None:
        return 0
    return cache.length if isinstance(cache, ContextCache) else cache.get_seq_length()


def fusion_start(config: DFlareConfig) -> torch.Tensor:
    """
    Start values (D, T) of the fusion weights: the tap at the draft layer's relative depth leads. Without softmax the
    mixture starts the same, as the softmax's values.
    """
    depth, taps = config.num_hidden_layers, config.num_taps
    start = torch.zeros(depth, taps)
    for layer_idx in range(depth):
        start[layer_idx, round(layer_idx * (taps - 1) / max(depth - 1, 1))] = FUSION_START
    return start if config.fusion_softmax else start.softmax(dim=-1)


DFlareConfig.register_for_auto_class()
DFlareForBlockDiffusion.register_for_auto_class("AutoModel")
install_hook()
