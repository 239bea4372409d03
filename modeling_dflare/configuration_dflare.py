"""Configuration of a DFlare drafter (arXiv 2606.02091): Qwen3's keys plus what ties a drafter to its target."""

import copy
import dataclasses

from transformers import PreTrainedConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.utils import logging

logger = logging.get_logger(__name__)

FUSIONS = ("layerwise", "shared_fc")
DRAFT_POLICIES = ("adaptive", "fixed")
# The ids that published checkpoints keep inside `dflash_config`; we read and write them in both places.
NESTED_KEYS = ("block_size", "mask_token_id", "target_layer_ids")
DRAFT_LAYER_TYPES = ("full_attention", "sliding_attention")
# Target layer kinds whose cache can drop its last tokens again, which verification needs.
CROPPABLE_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


class DFlareConfig(Qwen3Config):
    r"""
    What a drafter is, and which target it belongs to. Sizes, norms, activation and RoPE are Qwen3's keys; the drafter
    shares the target's hidden size and vocabulary because it shares the target's embedding and head.

    Args:
        block_size (`int`):
            Tokens in a block: the anchor and `block_size - 1` mask tokens (paper, Settings).
        num_target_layers (`int`):
            Decoder layers of the *target* (the published meaning of the key), which bounds `target_layer_ids`.
        target_layer_ids (`list[int]`):
            Tapped target layers, ascending. Zero-based decoder-layer outputs: id `i` is `hidden_states[i + 1]`. The last
            layer is refused, since transformers hands it out after the final norm and serving engines before it.
        mask_token_id (`int`):
            The token that stands at undrafted block positions; it must have a row in the target's embedding.
        fusion (`str`):
            `"layerwise"`: each draft layer mixes the taps by its own weights (DFlare). `"shared_fc"`: one linear layer
            over the concatenated taps, shared by all draft layers (DFlash). Unset, it follows from `architectures`.
        fusion_softmax (`bool`, defaults to `True`):
            Whether layer-wise weights pass through a softmax (paper, ablation "without softmax").
        fusion_fc (`bool`, defaults to `False`):
            Whether one linear layer, shared by all draft layers, follows the layer-wise mixture (paper, ablation "added
            fully-connected layer").
        separate_context_kv (`bool`):
            Whether the context has key/value projections of its own. Unset: yes with `"layerwise"`, no with `"shared_fc"`.
        num_draft_tokens (`int`, *optional*):
            Drafts handed to the target per round at most, if fewer than `block_size - 1`. `num_assistant_tokens` of a
            call can only lower it.
        draft_policy (`str`, defaults to `"adaptive"`):
            `"adaptive"`: each round verifies as many drafts as promise the most tokens per second here, and drafting
            pauses where it does not pay. `"fixed"`: always as many as allowed, which makes seeded samples repeatable.
        draft_vocab_size (`int`, *optional*):
            Tokens that are ever drafted, if not all: the weights then hold `draft_token_ids`, rows of the target's head.
            Set by `DFlareForBlockDiffusion.set_draft_vocabulary`.

    Raises:
        ValueError: for a value that is missing, out of range or contradictory; it names the field and both values.
    """

    model_type = "dflare"
    has_no_defaults_at_init = True

    # Required, but for the parent's sake with a default; `validate_drafter` refuses a missing one.
    block_size: int = None  # type: ignore[assignment]
    num_target_layers: int = None  # type: ignore[assignment]
    target_layer_ids: list[int] = None  # type: ignore[assignment]
    mask_token_id: int = None  # type: ignore[assignment]
    fusion: str | None = None
    fusion_softmax: bool = True
    fusion_fc: bool = False
    separate_context_kv: bool | None = None
    num_draft_tokens: int | None = None
    draft_policy: str = "adaptive"
    draft_vocab_size: int | None = None
    dflash_config: dict | None = None

    def __post_init__(self, **kwargs):
        self._require_rope_base(kwargs)
        self._merge_nested_ids()
        if self.fusion is None:
            published_dflash = any("DFlash" in name for name in self.architectures or [])
            self.fusion = "shared_fc" if published_dflash else "layerwise"
        if self.separate_context_kv is None:
            self.separate_context_kv = self.fusion == "layerwise"
        super().__post_init__(**kwargs)
        self.validate_drafter()
        self._warn_of_mask_token()

    @property
    def num_taps(self) -> int:
        """Number of tapped target layers, T in the paper."""
        return len(self.target_layer_ids)

    def to_dict(self) -> dict:
        """All fields, with the ids in both published places."""
        output = super().to_dict()
        output["dflash_config"] = {**(self.dflash_config or {}), **{key: getattr(self, key) for key in NESTED_KEYS}}
        return output

    def to_diff_dict(self) -> dict:
        """What is saved: as `to_dict`, the nested form never left out."""
        output = super().to_diff_dict()
        output["dflash_config"] = self.to_dict()["dflash_config"]
        return output

    def _merge_nested_ids(self) -> None:
        nested = self.dflash_config or {}
        for key in NESTED_KEYS:
            top, inner = getattr(self, key), nested.get(key)
            if top is not None and inner is not None and top != inner:
                raise ValueError(f"{key} is {top} at the top level but {inner} inside dflash_config; they must agree")
            setattr(self, key, inner if top is None else top)

    def _warn_of_mask_token(self) -> None:
        eos = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        if self.mask_token_id in [*eos, self.pad_token_id]:
            logger.warning(
                f"mask_token_id is {self.mask_token_id}, which is also eos_token_id {self.eos_token_id} or pad_token_id "
                f"{self.pad_token_id}: the drafter cannot tell it from text"
            )

    def _require_rope_base(self, kwargs: dict) -> None:
        entries = self.rope_parameters or kwargs.get("rope_scaling") or {}
        if kwargs.get("rope_theta") is None and entries.get("rope_theta") is None:
            raise ValueError(
                "rope_theta is missing: give it at the top level or inside rope_parameters "
                f"(rope_parameters={self.rope_parameters}); a wrong base drafts rubbish, so there is no default"
            )

    def validate_drafter(self) -> None:
        """Raises `ValueError` for a field that is missing, of another type, out of range or at odds with another."""
        for key in ("num_target_layers", *NESTED_KEYS):
            if getattr(self, key) is None:
                raise ValueError(f"{key} is missing; DFlareConfig.from_target(target.config) derives it")
        least = {"block_size": 2, "num_hidden_layers": 1, "num_target_layers": 2, "mask_token_id": 0}
        least |= {key: 1 for key in ("num_draft_tokens", "draft_vocab_size") if getattr(self, key) is not None}
        for key, low in least.items():
            _require_int(key, getattr(self, key), low)
        for key in ("fusion_softmax", "fusion_fc", "separate_context_kv"):
            if not isinstance(getattr(self, key), bool):
                raise ValueError(f"{key} is {getattr(self, key)!r}; true or false is expected")
        if self.fusion not in FUSIONS:
            raise ValueError(f"fusion is {self.fusion!r}; known are {', '.join(FUSIONS)}")
        if self.fusion_fc and self.fusion != "layerwise":
            raise ValueError(f"fusion_fc is {self.fusion_fc}, but fusion is {self.fusion!r}, which has its own layer")
        if self.draft_policy not in DRAFT_POLICIES:
            raise ValueError(f"draft_policy is {self.draft_policy!r}; known are {', '.join(DRAFT_POLICIES)}")
        if (self.draft_vocab_size or 0) > self.vocab_size:
            raise ValueError(f"draft_vocab_size is {self.draft_vocab_size}, above vocab_size {self.vocab_size}")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id is {self.mask_token_id}, outside the vocabulary of {self.vocab_size}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, no multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        check_target_layer_ids(self.target_layer_ids, self.num_target_layers)
        self._validate_layer_types()

    def _validate_layer_types(self) -> None:
        unknown = set(self.layer_types) - set(DRAFT_LAYER_TYPES)
        if unknown or len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types is {self.layer_types}; expected one of {', '.join(DRAFT_LAYER_TYPES)} for each of "
                f"{self.num_hidden_layers} layers"
            )
        if "sliding_attention" in self.layer_types and (self.sliding_window or 0) < self.block_size:
            raise ValueError(
                f"sliding_window is {self.sliding_window}, below block_size {self.block_size} (with use_sliding_window "
                f"{self.use_sliding_window})"
            )

    @classmethod
    def from_target(
        cls,
        target_config: PreTrainedConfig,
        *,
        num_hidden_layers: int = 7,
        block_size: int = 16,
        num_taps: int = 9,
        target_layer_ids: list[int] | None = None,
        mask_token_id: int | None = None,
        tokenizer=None,
        **overrides,
    ) -> "DFlareConfig":
        """
        Derives a drafter's config from its target's; depth, block and number of taps default to the paper's for Qwen3.

        Args:
            target_config: the target's config; of a multimodal target the text part is used.
            num_hidden_layers, block_size, num_taps: the drafter's depth, block and tap count. A target too shallow for
                `num_taps` distinct taps gets as many as it has layers below the last.
            target_layer_ids: explicit taps, instead of evenly spread ones.
            mask_token_id: explicit mask token; otherwise `choose_mask_token(target_config, tokenizer)`.
            tokenizer: the target's tokenizer, if at hand: it knows which tokens the model never uses.
            overrides: any other field, e.g. `num_key_value_heads`, `fusion` or `rope_parameters`.

        Raises:
            ValueError: if a value does not fit the target, or the target has no RoPE and none is given.
        """
        known = {item.name for item in dataclasses.fields(cls)} | {"rope_theta", "partial_rotary_factor"}
        if unknown := set(overrides) - known:
            raise ValueError(f"from_target: {', '.join(sorted(unknown))}: no such field of DFlareConfig")
        text = target_config.get_text_config()
        depth = text.num_hidden_layers
        heads = _plain_int(text.num_attention_heads)
        rope = overrides.pop("rope_parameters", None) or _rope_of(text)
        for key in ("rope_theta", "partial_rotary_factor"):
            if key in overrides:
                rope = {"rope_type": "default", **(rope or {}), key: overrides.pop(key)}
        fields = {
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "intermediate_size": _plain_int(getattr(text, "intermediate_size", None)) or 4 * text.hidden_size,
            "num_hidden_layers": num_hidden_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": _plain_int(getattr(text, "num_key_value_heads", None)) or heads,
            "head_dim": _plain_int(getattr(text, "head_dim", None)) or text.hidden_size // heads,
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-6,
            "max_position_embeddings": getattr(text, "max_position_embeddings", None) or 32768,
            "rope_parameters": rope,
            "pad_token_id": text.pad_token_id,
            "bos_token_id": text.bos_token_id,
            "eos_token_id": text.eos_token_id,
            "block_size": block_size,
            "num_target_layers": depth,
            "target_layer_ids": spread_taps(depth, num_taps) if target_layer_ids is None else list(target_layer_ids),
            "mask_token_id": choose_mask_token(target_config, tokenizer) if mask_token_id is None else mask_token_id,
        }
        return cls(**{**fields, **overrides})


def check_target_layer_ids(ids: list[int], num_target_layers: int) -> None:
    """Raises `ValueError` unless `ids` are ascending, distinct decoder layers below the last of `num_target_layers`."""
    for layer_id in ids:
        _require_int("target_layer_ids", layer_id, 0)
    if not ids or list(ids) != sorted(set(ids)):
        raise ValueError(f"target_layer_ids is {ids}; they must be distinct and ascending, and at least one")
    if ids[-1] >= num_target_layers - 1:
        raise ValueError(
            f"target_layer_ids is {ids}, but with num_target_layers {num_target_layers} the taps lie in "
            f"0..{num_target_layers - 2} (the last layer's output is not the same thing in every engine)"
        )


def spread_taps(num_target_layers: int, num_taps: int) -> list[int]:
    """
    Evenly spread tapped layers, from the second layer to the third last (36 layers, 9 taps: 1, 5, ..., 33, as published).
    Where that range is too short for `num_taps`, all layers but the last are, and a shallow target gets fewer taps.

    Raises:
        ValueError: for a target of a single layer, which has no layer below its last, or a non-positive count.
    """
    if num_target_layers < 2 or num_taps < 1:
        raise ValueError(f"num_target_layers is {num_target_layers} and num_taps {num_taps}; 2 and 1 are the least")
    first, last = (1, num_target_layers - 3) if num_taps <= num_target_layers - 3 else (0, num_target_layers - 2)
    count = min(num_taps, last - first + 1)
    if count == 1:
        return [last]
    return [first + round(i * (last - first) / (count - 1)) for i in range(count)]


def choose_mask_token(target_config: PreTrainedConfig, tokenizer=None) -> int:
    """
    A token with an embedding row that the target does not use: with a tokenizer, a row beyond all its ids, else an added
    token that neither the chat template nor a special id needs; else the last row that is no special id.
    """
    vocab_size = target_config.get_text_config().vocab_size
    used = special_token_ids(target_config)
    if tokenizer is not None:
        first_free = max(tokenizer.get_vocab().values()) + 1
        if first_free < vocab_size and first_free not in used:
            return first_free
        used |= set(tokenizer.all_special_ids)
        template = str(tokenizer.chat_template or "")
        for token_id, token in sorted(tokenizer.added_tokens_decoder.items()):
            free = token_id not in used and token_id < vocab_size
            if free and token.content.strip() and token.content not in template:
                return token_id
    logger.warning(
        "no token is known to be unused, so the mask token is the last ordinary one; better name one yourself"
    )
    return next(i for i in reversed(range(vocab_size)) if i not in used)


def special_token_ids(target_config: PreTrainedConfig) -> set[int]:
    """All ids that the config, or its text part, calls a token id: eos and pad as well as a multimodal target's own."""
    found = set()
    for config in (target_config, target_config.get_text_config()):
        for name, value in vars(config).items():
            if name.endswith(("_token_id", "_token_ids")):
                found |= set(value) if isinstance(value, (list, tuple)) else {value}
    return {token_id for token_id in found if token_id is not None}


def _require_int(key: str, value, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{key} holds {value!r}; expected a whole number of {least} or more")


def _plain_int(value) -> int | None:
    """A size that some targets state per layer: the largest of them."""
    return max(value) if isinstance(value, (list, tuple)) else value


def _rope_of(text_config: PreTrainedConfig) -> dict | None:
    """The target's RoPE entry, of its full-attention layers where layer types differ; None for a target without RoPE."""
    rope = copy.deepcopy(getattr(text_config, "rope_parameters", None))
    if rope and "full_attention" in rope:
        rope = rope["full_attention"]
    return rope or None
