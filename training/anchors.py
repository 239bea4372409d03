"""Where drafts start in training: anchors, and what a block at an anchor is fed, asked and allowed to see."""

from collections.abc import Sequence

import torch

IGNORED = -100


def anchor_candidates(loss_mask: torch.Tensor) -> torch.Tensor:
    """
    Positions that can be anchors, ascending: tokens the target generated whose successor it generated too. So the first
    candidate is the first generated token, as in `generate()`.

    Args:
        loss_mask: (length,), 1 at tokens that the target generated.
    """
    mask = loss_mask.bool()
    return (mask[:-1] & mask[1:]).nonzero(as_tuple=True)[0]


def sample_anchors(loss_mask: torch.Tensor, count: int | None, generator: torch.Generator | None) -> torch.Tensor:
    """Up to `count` distinct anchors of one sequence, ascending, all equally likely; every candidate if `count` is None."""
    candidates = anchor_candidates(loss_mask)
    if count is None or len(candidates) <= count:
        return candidates
    return candidates[torch.randperm(len(candidates), generator=generator)[:count]].sort().values


def draw_anchors(
    loss_mask: torch.Tensor,
    count: int | None = None,
    generator: torch.Generator | None = None,
    budget: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Anchors (b, A) of a batch, and whether each is real (`keep`): up to `count` of each sequence, by default all candidates.

    Args:
        loss_mask: (b, S), 0 on padding.
        budget: anchors of the whole batch at most, which bounds a step's memory: sequences with many give up some.
    """
    masks = loss_mask.cpu()
    available = [len(anchor_candidates(mask)) for mask in masks]
    if budget is not None:
        count = _fair_count(available, budget, count)
    drawn = [sample_anchors(mask, count, generator) for mask in masks]
    anchors = torch.zeros(len(masks), max(1, *map(len, drawn)), dtype=torch.long)  # one even where there is none
    keep = torch.zeros_like(anchors, dtype=torch.bool)
    for row, own in enumerate(drawn):
        anchors[row, : len(own)], keep[row, : len(own)] = own, True
    return anchors.to(loss_mask.device), keep.to(loss_mask.device)


def _fair_count(available: Sequence[int], budget: int, count: int | None) -> int:
    """The most anchors that each sequence may have so that all of them stay within the budget."""
    most = max(available) if count is None else min(count, max(available))
    return next((n for n in range(most, 0, -1) if sum(min(own, n) for own in available) <= budget), 1)


def slot_labels(
    input_ids: torch.Tensor, loss_mask: torch.Tensor, anchors: torch.Tensor, keep: torch.Tensor, block_size: int
) -> torch.Tensor:
    """
    Labels (b, A, B - 1) of the mask slots: slot k of the block at anchor a is to say token a + k. `IGNORED` where the
    anchor is padding, the label lies past the end, or the target did not generate it.

    Args:
        input_ids, loss_mask: (b, S).
        anchors, keep: (b, A) positions, and whether they are real.
    """
    places = anchors.unsqueeze(-1) + torch.arange(1, block_size, device=anchors.device)
    inside = places < input_ids.shape[1]
    rows = torch.arange(len(input_ids), device=anchors.device)[:, None, None]
    clamped = places.clamp(max=input_ids.shape[1] - 1)
    valid = inside & keep.unsqueeze(-1) & loss_mask[rows, clamped].bool()
    return input_ids[rows, clamped].masked_fill(~valid, IGNORED)


def block_ids(input_ids: torch.Tensor, anchors: torch.Tensor, block_size: int, mask_token_id: int) -> torch.Tensor:
    """What the blocks are fed, (b, A * B): each anchor's token, then mask tokens."""
    blocks = input_ids.new_full((*anchors.shape, block_size), mask_token_id)
    blocks[..., 0] = input_ids.gather(1, anchors)
    return blocks.flatten(1)


def block_positions(anchors: torch.Tensor, length: int, block_size: int) -> torch.Tensor:
    """Positions (b, S + A * B) of the context's tokens, then of every block's."""
    context = torch.arange(length, device=anchors.device).expand(len(anchors), -1)
    blocks = anchors.unsqueeze(-1) + torch.arange(block_size, device=anchors.device)
    return torch.cat([context, blocks.flatten(1)], dim=1)


def block_mask(anchors: torch.Tensor, keep: torch.Tensor, length: int, block_size: int) -> torch.Tensor:
    """
    Boolean mask (b, 1, A * B, S + A * B): a block sees the context strictly before its anchor, and all of itself (paper,
    Training). A padding anchor's block sees only itself, so that no row is ever empty.
    """
    limits = torch.where(keep, anchors, 0).repeat_interleave(block_size, dim=1)
    context = torch.arange(length, device=anchors.device) < limits.unsqueeze(-1)
    owner = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(block_size)
    own = (owner[:, None] == owner[None, :]).expand(len(anchors), -1, -1)
    return torch.cat([context, own], dim=-1).unsqueeze(1)
