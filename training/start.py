"""What training starts from: the config of a fresh drafter, a trained one, or layers of the target itself."""

from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError

from dflare import DFlareConfig, DFlareForBlockDiffusion
from dflare.checks_dflare import check_sizes
from dflare.configuration.arguments import START_LAYERS
from dflare.modeling_dflare import DFlareDecoderLayer

from .features import decoder_of

OPTIONAL_NORMS = ("q_norm.weight", "k_norm.weight")


def drafter_config(settings: dict, target_config, tokenizer) -> DFlareConfig:
    """The config of a fresh drafter; `settings` are arguments of `DFlareConfig.from_target`, or `ValueError`."""
    try:
        return DFlareConfig.from_target(target_config, tokenizer=tokenizer, **settings)
    except (TypeError, StrictDataclassError) as error:
        raise ValueError(f"drafter: {' '.join(str(error).split())}") from None


def trained_drafter(folder: str, settings: dict, target) -> DFlareForBlockDiffusion:
    """
    The drafter in `folder` (or of that Hub id), in fp32, which must agree with `target` and with `settings`.

    Raises:
        ValueError: naming the field and both values where they differ.
    """
    drafter = DFlareForBlockDiffusion.from_pretrained(folder, dtype=torch.float32)
    check_sizes(drafter, target)
    for key, value in settings.items():
        if (its := getattr(drafter.config, key, None)) != value:
            raise ValueError(f"drafter.{key} is {value!r}, but {its!r} in {folder}, which start_from names")
    return drafter.train()


def copy_target_layers(drafter: DFlareForBlockDiffusion, target, which: str) -> list[int]:
    """
    Lets draft layers begin as layers of the target, the context's projections as the block's. Key and value heads are
    repeated where the drafter has a multiple of the target's; norms that the target lacks (of queries, keys) begin as ever.

    Args:
        which: `last`, the target's last layers, or `spread`, evenly from the first to the last.
    Returns:
        The target's layers that were taken.
    Raises:
        ValueError: if the target's layers are built otherwise, so that copied weights would mean something else.
    """
    layers, config = getattr(decoder_of(target), "layers", []), drafter.config
    ids = _which_layers(len(layers), config.num_hidden_layers, which)
    text = target.config.get_text_config()
    theirs = {
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        "hidden_act": getattr(text, "hidden_activation", None) or getattr(text, "hidden_act", None),
    }
    for key, value in theirs.items():
        if value != getattr(config, key):
            raise ValueError(f"start_layers: {key} is {value!r} in the target, {getattr(config, key)!r} in the drafter")
    for layer, number in zip(drafter.layers, ids, strict=True):
        _copy_layer(cast(DFlareDecoderLayer, layer), layers[number], number, config.head_dim)
    return ids


def _which_layers(count: int, depth: int, which: str) -> list[int]:
    if which not in START_LAYERS or depth > count:
        raise ValueError(
            f"start_layers is {which!r} for {depth} draft layers of {count} target layers that are named so"
        )
    if which == "last":
        return list(range(count - depth, count))
    return [round(i * (count - 1) / max(depth - 1, 1)) for i in range(depth)]


def _copy_layer(layer: DFlareDecoderLayer, source: Any, number: int, head_dim: int) -> None:
    own, theirs = dict(layer.named_parameters()), dict(source.named_parameters())
    names = {name: name.replace("_proj_target.", "_proj.") for name in own}
    further = set(theirs) - set(names.values())
    missing = {source for source in names.values() if source not in theirs and not source.endswith(OPTIONAL_NORMS)}
    if missing or further or not _same_norm(layer.input_layernorm, source.input_layernorm):
        found = sorted(missing or further) or ["input_layernorm, which computes something else"]
        raise ValueError(
            f"start_layers: the target's layer {number} is built otherwise than the drafter's: "
            f"{'it lacks' if missing else 'it has'} {', '.join(found)}"
        )
    for name, tensor in own.items():
        if names[name] in theirs:
            heads = head_dim if ".k_proj" in name or ".v_proj" in name else None
            _copy(tensor, theirs[names[name]], f"layers.{number}.{names[name]}", heads)


def _same_norm(own: Any, theirs: Any) -> bool:
    """Whether two norms with the same weights do the same."""
    weight = theirs.weight.detach()
    states = torch.linspace(-2.0, 2.0, len(weight), dtype=weight.dtype, device=weight.device)[None]
    expected = torch.nn.functional.rms_norm(states.float(), weight.shape, weight.float(), own.variance_epsilon)
    return torch.allclose(theirs(states).float(), expected, rtol=0.02, atol=0.02)


@torch.no_grad()
def _copy(own: torch.Tensor, theirs: torch.Tensor, name: str, head_dim: int | None) -> None:
    if head_dim and own.shape[0] % theirs.shape[0] == 0:
        repeats = own.shape[0] // theirs.shape[0]
        theirs = theirs.unflatten(0, (-1, head_dim)).repeat_interleave(repeats, dim=0).flatten(0, 1)
    if own.shape != theirs.shape:
        raise ValueError(f"start_layers: {name} has the shape {tuple(theirs.shape)}, the drafter's {tuple(own.shape)}")
    own.copy_(theirs)
