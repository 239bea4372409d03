"""What the drafter's layers may see, in the form that each kind of attention wants."""

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from .configuration_dflare import DFlareConfig


def masks_by_layer_type(
    config: DFlareConfig, mask: Any, noise_embeds: torch.Tensor, position_ids: torch.Tensor, num_cached: int
) -> dict[str, Any]:
    """
    The caller's mask as it is for full layers, and with the window's limit for sliding ones.

    Args:
        mask: None, (b, keys) with 1 for visible keys, (b, 1, s, keys), or a `BlockMask`.
        noise_embeds: (b, s, H). position_ids: (b, n + s), of the new context and the blocks.
        num_cached: context tokens before them.
    """
    length = noise_embeds.shape[1]
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        mask = mask[:, None, None, :].bool().expand(-1, 1, length, -1)
    masks = {"full_attention": mask}
    if "sliding_attention" in config.layer_types:
        cached = torch.arange(num_cached, device=position_ids.device).expand(position_ids.shape[0], -1)
        keys = torch.cat([cached, position_ids], dim=1)
        masks["sliding_attention"] = _within(config.sliding_window, position_ids[:, -length:], keys, mask)
    return {kind: _for_backend(mask, config._attn_implementation, noise_embeds.dtype) for kind, mask in masks.items()}


def _within(window: int, queries: torch.Tensor, keys: torch.Tensor, mask: Any) -> "torch.Tensor | BlockMask":
    """`mask` with a sliding window's limit, by the positions (b, s) of queries and (b, keys) of keys."""
    if isinstance(mask, BlockMask):

        def near(row, head, query, key):
            return mask.mask_mod(row, head, query, key) & ((queries[row, query] - keys[row, key]).abs() < window)

        return create_block_mask(near, mask.shape[0], None, queries.shape[1], keys.shape[1], device=queries.device.type)
    close = (queries[:, None, :, None] - keys[:, None, None, :]).abs() < window
    return close if mask is None else close & mask


def _for_backend(mask: Any, attention: str, dtype: torch.dtype) -> Any:
    """A boolean mask as the attention implementation wants it: sdpa takes it as it is, the others add it."""
    if attention == "sdpa" or not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
