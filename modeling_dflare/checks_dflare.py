"""
What cannot be accelerated, told before any token is computed: pairs that do not belong together, targets whose state cannot
be taken back, options that rejected drafts would spoil. Every `ValueError` names the field and both values.
"""

import inspect
from typing import Any

import transformers
from transformers import PreTrainedModel

from .configuration_dflare import CROPPABLE_LAYER_TYPES

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
CACHE_NAME = "cache" if VERSION >= (5, 24) else "past_key_values"
# Adapters whose virtual tokens the loop would lose; up to 5.22 those of prefix tuning too (tested: 5.18.0, 5.22.2).
VIRTUAL_TOKENS = {"PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "CPT", "CARTRIDGE"}
VIRTUAL_TOKENS |= set() if VERSION >= (5, 23) else {"PREFIX_TUNING"}


def check_target(drafter: PreTrainedModel, target: PreTrainedModel, generation_config) -> None:
    """
    Raises `ValueError`, before any token is computed, if `drafter` was not made for `target` or if the call cannot be
    accelerated; the message names the field and both values.
    """
    drafter.config.validate_drafter()  # whose fields can be set at any time
    check_sizes(drafter, target)
    if drafter.training:
        raise ValueError("the drafter is in training mode; call drafter.eval() before generate()")
    if target.training and target.is_gradient_checkpointing:
        raise ValueError(
            "the target is in training mode with gradient checkpointing, which drops its cache; call eval()"
        )
    check_layers(target)
    _check_options(target, generation_config)


def check_sizes(drafter: PreTrainedModel, target: PreTrainedModel) -> None:
    """Raises `ValueError` if `drafter` was not made for `target`, naming the field and both values."""
    ours, theirs = drafter.config, target.config.get_text_config()
    pairs = {
        "hidden_size": (ours.hidden_size, theirs.hidden_size),
        "number of target layers": (ours.num_target_layers, theirs.num_hidden_layers),
        "vocab_size": (ours.vocab_size, theirs.vocab_size),
    }
    for name, (mine, its) in pairs.items():
        if mine != its:
            raise ValueError(
                f"this drafter belongs to another target: {name} is {mine} in the drafter's config "
                f"({drafter.name_or_path or type(drafter).__name__}) and {its} in the target's "
                f"({target.name_or_path or type(target).__name__})"
            )
    _check_embedding(ours, target)


def _check_embedding(config, target: PreTrainedModel) -> None:
    embedding = target.get_input_embeddings()
    rows, width = (
        getattr(embedding, name, None) for name in ("num_embeddings", "embedding_dim")
    )  # a wrapper may not tell
    if rows is not None and config.mask_token_id >= rows:
        raise ValueError(f"mask_token_id is {config.mask_token_id}, but the target's embedding has {rows} rows")
    if width is not None and config.hidden_size != width:
        raise ValueError(f"hidden_size is {config.hidden_size}, but the target's embedding is {width} wide")
    if target.get_output_embeddings() is None:
        raise ValueError(f"{type(target).__name__} has no output embedding (language-model head) to draft with")


def check_layers(target: PreTrainedModel) -> None:
    """Raises `ValueError` for a target whose state cannot be taken back, or that keeps none."""
    if target.config.is_encoder_decoder:
        raise ValueError(f"{type(target).__name__} is an encoder-decoder; DFlare accelerates decoder-only targets")
    if not {"cache", "past_key_values"} & set(inspect.signature(type(target).forward).parameters):
        raise ValueError(
            f"{type(target).__name__} takes no cache, which verification needs: generate without assistant_model"
        )
    kinds = set(getattr(target.config.get_text_config(), "layer_types", None) or ()) - set(CROPPABLE_LAYER_TYPES)
    if kinds:
        raise ValueError(
            f"{type(target).__name__} has layers of type {', '.join(sorted(kinds))}, whose state cannot be rolled back "
            "after verification; generate without assistant_model"
        )


def _check_options(target: PreTrainedModel, generation_config) -> None:
    asked = generation_config.num_assistant_tokens
    if asked is not None and (not isinstance(asked, int) or asked < 0):
        raise ValueError(f"num_assistant_tokens is {asked!r}; it must be a whole number, and 0 or more")
    if generation_config.use_cache is False:
        raise ValueError("use_cache is False; verification needs the target's cache, so leave use_cache at True")
    if generation_config.cache_implementation == "quantized":
        raise ValueError(
            "cache_implementation is 'quantized', which stores different values for tokens that arrive together than for "
            "the same tokens one by one: generate without assistant_model"
        )
    if generation_config.guidance_scale not in (None, 1):
        raise ValueError(
            f"guidance_scale is {generation_config.guidance_scale}; its processor keeps a cache of its own, which drafts "
            "that are rejected would spoil: generate without assistant_model"
        )
    watermark = type(generation_config.watermarking_config).__name__
    if watermark == "SynthIDTextWatermarkingConfig":
        raise ValueError(
            f"watermarking_config is a {watermark}; its processor remembers every token it is shown, drafts that are "
            "rejected too: generate without assistant_model"
        )
    attention = target.config.get_text_config()._attn_implementation
    if generation_config.output_attentions and generation_config.return_dict_in_generate and attention != "eager":
        raise ValueError(
            f"output_attentions is True, but the target's attn_implementation is {attention!r}, which returns none; load "
            "it with attn_implementation='eager'"
        )
    _check_adapter(target)


def _check_adapter(target: PreTrainedModel) -> None:
    owner = getattr(target.__dict__.get("prepare_inputs_for_generation"), "__self__", None)
    tuning = getattr(getattr(owner, "active_peft_config", None), "peft_type", None)
    tuning = getattr(tuning, "value", tuning)
    if tuning in VIRTUAL_TOKENS:
        raise ValueError(f"the target's adapter is {tuning}, whose virtual tokens the verification loop would lose")
    for name, adapter in (getattr(target, "peft_config", None) or {}).items():
        if phrase := getattr(adapter, "alora_invocation_tokens", None):
            raise ValueError(
                f"the target's adapter {name!r} has alora_invocation_tokens {phrase}; it would be switched on at other "
                "tokens where several are fed at once: generate without assistant_model"
            )


def check_positions(target: PreTrainedModel, input_ids, model_kwargs: dict, generation_config) -> None:
    """
    Raises `ValueError` where the target's RoPE would change while it decodes: types `dynamic` and `longrope` go by the last
    position of a pass, so tokens fed together would be turned otherwise than one by one.
    """
    embeds = model_kwargs.get("inputs_embeds")
    unnamed = 0 if embeds is None or input_ids.shape[1] else embeds.shape[1]  # positions that max_length leaves out
    prompt_length, max_length = (unnamed + length for length in (input_ids.shape[1], generation_config.max_length))
    text: Any = target.config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    for entry in rope.values() if "full_attention" in rope else (rope,):
        kind = entry.get("rope_type")
        if kind not in ("dynamic", "longrope"):
            continue
        limit = entry.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
        limit = limit or text.max_position_embeddings
        if max_length > limit and (kind == "dynamic" or prompt_length <= limit):
            raise ValueError(
                f"max_length is {max_length} (prompt and new tokens), but the target's RoPE of type {kind!r} changes "
                f"beyond {limit} tokens, and with it what was decoded before: ask for fewer new tokens, or generate "
                "without assistant_model"
            )


def check_cache(cache) -> None:
    """Raises `ValueError` for a cache that cannot drop its last tokens; transformers' loop would tell after the prefill."""
    if not getattr(cache, "is_croppable", True):
        kinds = sorted({type(layer).__name__ for layer in cache.layers if not layer.is_croppable})
        raise ValueError(
            f"the cache has layers of type {', '.join(kinds)}, whose tokens cannot be taken back after verification; use "
            "the default cache, or generate without assistant_model"
        )


def check_inputs(model_kwargs: dict) -> None:
    """Raises `ValueError` for inputs that the verification loop would get wrong."""
    mask = model_kwargs.get("attention_mask")
    if model_kwargs.get("inputs_embeds") is not None and mask is not None and not bool(mask.all()):
        raise ValueError(
            "attention_mask hides positions of inputs_embeds; the verification loop would lose track of it, so leave the "
            "hidden positions out, or generate without assistant_model"
        )
