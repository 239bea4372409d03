"""What training starts from: the config of a fresh drafter, a trained one, or layers of the target itself."""

import torch

from dflare import DFlareConfig, DFlareForBlockDiffusion
from dflare.checks_dflare import check_sizes
from dflare.configuration.arguments import START_LAYERS


def drafter_config(settings: dict, target_config, tokenizer) -> DFlareConfig:
    """The config of a fresh drafter; `settings` are arguments of `DFlareConfig.from_target`."""
    try:
        return DFlareConfig.from_target(target_config, tokenizer=tokenizer, **settings)
    except TypeError as error:
        raise ValueError(f"drafter: {error}") from None


def features_made_with(target: str, config: DFlareConfig) -> dict:
    """What features depend on, and a drafter with this config needs."""
    keys = ("target_layer_ids", "hidden_size", "num_target_layers")
    return {"target": target, **{key: getattr(config, key) for key in keys}}


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
    Lets draft layers begin as layers of the target, as far as names and shapes agree; the context's projections begin as
    the block's. Key and value heads are repeated where the drafter has a multiple of the target's.

    Args:
        which: `last`, the target's last layers, or `spread`, evenly from the first to the last.
    Returns:
        The target's layers that were taken.
    Raises:
        ValueError: if a projection's shape differs otherwise, naming it and both shapes.
    """
    layers, config = target.get_decoder().layers, drafter.config
    ids = _which_layers(len(layers), config.num_hidden_layers, which)
    for layer, number in zip(drafter.layers, ids, strict=True):
        theirs = dict(layers[number].named_parameters())
        shared = {own: own.replace("_proj_target.", "_proj.") for own, _ in layer.named_parameters()}
        shared = {own: name for own, name in shared.items() if name in theirs}
        if not shared:
            raise ValueError(
                f"start_layers is {which!r}, but no parameter of the target's layer {number} has a name of ours"
            )
        for own, name in shared.items():
            heads = config.head_dim if ".k_proj" in name or ".v_proj" in name else None
            _copy(layer.get_parameter(own), theirs[name], f"layers.{number}.{name}", heads)
    return ids


def _which_layers(count: int, depth: int, which: str) -> list[int]:
    if which not in START_LAYERS or depth > count:
        raise ValueError(f"start_layers is {which!r} for {depth} draft layers of {count} target layers")
    if which == "last":
        return list(range(count - depth, count))
    return [round(i * (count - 1) / max(depth - 1, 1)) for i in range(depth)]


@torch.no_grad()
def _copy(own: torch.Tensor, theirs: torch.Tensor, name: str, head_dim: int | None) -> None:
    if head_dim and own.shape[0] % theirs.shape[0] == 0:
        repeats = own.shape[0] // theirs.shape[0]
        theirs = theirs.unflatten(0, (-1, head_dim)).repeat_interleave(repeats, dim=0).flatten(0, 1)
    if own.shape != theirs.shape:
        raise ValueError(f"start_layers: {name} has the shape {tuple(theirs.shape)}, the drafter's {tuple(own.shape)}")
    own.copy_(theirs)
