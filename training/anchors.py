"""Where drafts start in training: anchors, and what a block at an anchor is fed, asked and allowed to see."""

from collections.abc import Callable, Sequence

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

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
    starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Anchors (b, A) of a batch, and whether each is real (`keep`): up to `count` of each sequence, by default all candidates.

    Args:
        loss_mask: (b, S), 0 on padding.
        budget: anchors of the whole batch at most, which bounds a step's memory: sequences with many give up some.
        starts: (b, S), where each token's sequence begins in its row; by default a row is one sequence.
    """
    pieces = [_sequences(mask, start) for mask, start in zip(loss_mask.cpu(), _rows(starts, loss_mask), strict=True)]
    available = [len(anchor_candidates(mask)) for row in pieces for _, mask in row]
    if budget is not None:
        count = _fair_count(available, budget, count)
    drawn = [torch.cat([sample_anchors(mask, count, generator) + start for start, mask in row]) for row in pieces]
    if budget is not None and sum(map(len, drawn)) > budget:  # one each is too many already: some go without
        chosen = torch.randperm(sum(map(len, drawn)), generator=generator)[:budget].sort().values
        drawn = _only(drawn, chosen)
    anchors = torch.zeros(len(drawn), max(1, *map(len, drawn)), dtype=torch.long)  # one even where there is none
    keep = torch.zeros_like(anchors, dtype=torch.bool)
    for row, own in enumerate(drawn):
        anchors[row, : len(own)], keep[row, : len(own)] = own, True
    return anchors.to(loss_mask.device), keep.to(loss_mask.device)


def _only(drawn: list[torch.Tensor], chosen: torch.Tensor) -> list[torch.Tensor]:
    """Of all anchors, counted through all rows, the chosen ones."""
    keep = torch.zeros(sum(map(len, drawn)), dtype=torch.bool)
    keep[chosen] = True
    return [own[kept] for own, kept in zip(drawn, keep.split(list(map(len, drawn))), strict=True)]


def _rows(starts: torch.Tensor | None, loss_mask: torch.Tensor) -> Sequence[torch.Tensor | None]:
    return [None] * len(loss_mask) if starts is None else list(starts.cpu())


def _sequences(loss_mask: torch.Tensor, starts: torch.Tensor | None) -> list[tuple[int, torch.Tensor]]:
    """Where each sequence of a row begins, and its mask."""
    if starts is None:
        return [(0, loss_mask)]
    first, lengths = starts.unique_consecutive(return_counts=True)
    return list(zip(first.tolist(), loss_mask.split(lengths.tolist()), strict=True))


def _fair_count(available: Sequence[int], budget: int, count: int | None) -> int:
    """The most anchors that each sequence may have so that all of them stay within the budget."""
    most = max(available) if count is None else min(count, max(available))
    return next((n for n in range(most, 0, -1) if sum(min(own, n) for own in available) <= budget), 1)


def slot_labels(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    anchors: torch.Tensor,
    keep: torch.Tensor,
    block_size: int,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Labels (b, A, B - 1) of the mask slots: slot k of the block at anchor a is to say token a + k. `IGNORED` where the
    anchor is padding, the label lies past the end of its sequence, or the target did not generate it.

    Args:
        input_ids, loss_mask: (b, S).
        anchors, keep: (b, A) positions, and whether they are real.
        starts: as in `draw_anchors`.
    """
    places = anchors.unsqueeze(-1) + torch.arange(1, block_size, device=anchors.device)
    rows = torch.arange(len(input_ids), device=anchors.device)[:, None, None]
    clamped = places.clamp(max=input_ids.shape[1] - 1)
    valid = (places == clamped) & keep.unsqueeze(-1) & loss_mask[rows, clamped].bool()
    if starts is not None:
        valid &= starts[rows, clamped] == starts.gather(1, anchors).unsqueeze(-1)
    return input_ids[rows, clamped].masked_fill(~valid, IGNORED)


def block_ids(input_ids: torch.Tensor, anchors: torch.Tensor, block_size: int, mask_token_id: int) -> torch.Tensor:
    """What the blocks are fed, (b, A * B): each anchor's token, then mask tokens."""
    blocks = input_ids.new_full((*anchors.shape, block_size), mask_token_id)
    blocks[..., 0] = input_ids.gather(1, anchors)
    return blocks.flatten(1)


def token_positions(starts: torch.Tensor) -> torch.Tensor:
    """Each token's position in its own sequence, (b, S)."""
    return torch.arange(starts.shape[1], device=starts.device) - starts


def block_positions(anchors: torch.Tensor, block_size: int, starts: torch.Tensor) -> torch.Tensor:
    """Positions (b, S + A * B) of the context's tokens, then of every block's; `starts` as in `draw_anchors`."""
    context = token_positions(starts)
    blocks = context.gather(1, anchors).unsqueeze(-1) + torch.arange(block_size, device=anchors.device)
    return torch.cat([context, blocks.flatten(1)], dim=1)


def block_visibility(anchors: torch.Tensor, keep: torch.Tensor, block_size: int, starts: torch.Tensor) -> Callable:
    """
    What a block sees (paper, Training): its own sequence strictly before its anchor, and all of itself. A padding anchor's
    block sees only itself, so that no row is ever empty. The one place that says so, for every kind of attention.

    Returns:
        `visible(row, head, query, key)` for whole numbers or tensors of them that broadcast: queries are the blocks' A * B
        tokens, keys the context's S and then the blocks'. The form that flex attention calls a `mask_mod`.
    """
    length = starts.shape[1]
    first, end = starts.gather(1, anchors), torch.where(keep, anchors, 0)

    def visible(row, head, query, key):
        block = query // block_size
        context = (key >= first[row, block]) & (key < end[row, block])
        return context | ((key >= length) & ((key - length) // block_size == block))

    return visible


def block_mask(
    anchors: torch.Tensor, keep: torch.Tensor, block_size: int, starts: torch.Tensor, attention: str = "sdpa"
) -> "torch.Tensor | BlockMask":
    """
    `block_visibility` as the kind of attention wants it: a `BlockMask` for `flex_attention`, which never is as large as
    all queries times all keys, else boolean, (b, 1, A * B, S + A * B).
    """
    visible, queries = block_visibility(anchors, keep, block_size, starts), anchors.shape[1] * block_size
    keys, device = starts.shape[1] + queries, anchors.device
    if attention == "flex_attention":
        options: dict = {"B": len(anchors), "H": None, "device": device, "_compile": device.type != "cpu"}
        return create_block_mask(visible, Q_LEN=queries, KV_LEN=keys, **options)
    row, query, key = (torch.arange(size, device=device) for size in (len(anchors), queries, keys))
    return visible(row[:, None, None, None], 0, query[:, None], key)
