"""The weighted block loss (paper, Training): cross-entropy of each mask slot, early slots weighing most."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dflare.drafting_dflare import RestrictedHead

from .anchors import IGNORED, block_ids, block_mask, block_positions, slot_labels


def position_weights(block_size: int, gamma: float | None, device=None) -> torch.Tensor:
    """exp(-(k - 1) / gamma) for slots k = 1..B-1, shape (B - 1,); all ones if `gamma` is None."""
    steps = torch.arange(block_size - 1, device=device, dtype=torch.float)
    return torch.ones_like(steps) if gamma is None else torch.exp(-steps / gamma)


def gamma_at(epoch: float, start: float | None, step: float) -> float | None:
    """The schedule of the paper's appendix: `start`, and `step` more with each whole epoch; None stays unweighted."""
    return None if start is None else start + step * int(epoch)


def rows_of(head: RestrictedHead, labels: torch.Tensor) -> torch.Tensor:
    """Token ids as rows of a restricted head; `ValueError` if one is not among its `token_ids`."""
    rows = torch.searchsorted(head.token_ids, labels).clamp(max=len(head.token_ids) - 1)
    if not torch.equal(head.token_ids[rows], labels):
        missing = labels[head.token_ids[rows] != labels].unique().tolist()
        raise ValueError(
            f"token_ids lacks the labels {missing[:10]}; the head is restricted to {len(head.token_ids)} ids"
        )
    return rows


def block_hidden_states(
    drafter: nn.Module,
    embed: nn.Module,
    input_ids: torch.Tensor,
    taps: Sequence[torch.Tensor],
    anchors: torch.Tensor,
    keep: torch.Tensor,
) -> torch.Tensor:
    """
    The drafter's final hidden states (b, A, B, H) of the blocks at all anchors in one pass: what `generate()` computes
    for each of them when the committed prefix ends at its anchor.

    Args:
        drafter: a `DFlareForBlockDiffusion`, or its wrapper in distributed training.
        embed: the target's embedding, frozen.
        input_ids: (b, S). taps: T tensors (b, S, H) of the target's states on them. anchors, keep: (b, A).
    """
    plain = unwrap(drafter)
    size = plain.config.block_size
    noise = embed(block_ids(input_ids, anchors, size, plain.config.mask_token_id)).to(plain.dtype)
    hidden = drafter(
        noise_embeds=noise,
        context_hidden_states=taps,
        attention_mask=block_mask(anchors, keep, input_ids.shape[1], size),
        position_ids=block_positions(anchors, input_ids.shape[1], size),
    ).last_hidden_state
    return hidden.unflatten(1, (-1, size))


def weighted_cross_entropy(
    hidden_states: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, head: Any, chunk: int = 2048
) -> torch.Tensor:
    """
    Sum of weight times cross-entropy over the slots with a label; only those reach the head, `chunk` at a time, and
    their logits are computed again in the backward pass, so no tensor is larger than chunk x vocabulary.

    Args:
        hidden_states: (..., H). labels, weights: (...), `IGNORED` where a slot does not count.
        head: the target's frozen head, or a `RestrictedHead`.
    """
    valid = labels != IGNORED
    hidden_states, labels, weights = hidden_states[valid], labels[valid], weights[valid]
    hidden_states = hidden_states.to(_input_dtype(head, hidden_states))
    if isinstance(head, RestrictedHead):
        labels = rows_of(head, labels)

    def piece_loss(states: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        losses = nn.functional.cross_entropy(head(states).float(), targets, reduction="none")
        return (losses * weight).sum()

    pieces = zip(hidden_states.split(chunk), labels.split(chunk), weights.split(chunk), strict=True)
    run: Callable = piece_loss if len(labels) <= chunk else lambda *p: checkpoint(piece_loss, *p, use_reentrant=False)
    return sum((run(*piece) for piece in pieces), start=hidden_states.sum() * 0.0)


def plain_outcome(
    hidden_states: torch.Tensor, labels: torch.Tensor, head: Any, chunk: int = 512
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross-entropy of (N, H) slots, and for each of the N whether the greedy draft is the label."""
    loss, hits = hidden_states.new_zeros((), dtype=torch.float), []
    for states, targets in zip(hidden_states.split(chunk), labels.split(chunk), strict=True):
        logits = head(states.to(_input_dtype(head, states))).float()
        loss += nn.functional.cross_entropy(logits, targets, reduction="sum")
        hits.append(logits.argmax(dim=-1) == targets)
    return loss / max(len(labels), 1), torch.cat(hits)


def block_loss(
    drafter: nn.Module,
    embed: nn.Module,
    head: nn.Module,
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    taps: Sequence[torch.Tensor],
    anchors: torch.Tensor,
    keep: torch.Tensor,
    gamma: float | None,
    weight_sum: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """
    The training loss: the weighted sum over slots divided by the sum of weights.

    Args:
        gamma: decay of the position weights in slots; None for none.
        weight_sum: the divisor, where several batches make one step; by default this batch's own sum.
    """
    block_size = unwrap(drafter).config.block_size
    labels = slot_labels(input_ids, loss_mask, anchors, keep, block_size)
    weights = position_weights(block_size, gamma, labels.device).expand(labels.shape)
    if weight_sum is None:
        weight_sum = (weights * (labels != IGNORED)).sum()
    hidden = block_hidden_states(drafter, embed, input_ids, taps, anchors, keep)[:, :, 1:]
    return weighted_cross_entropy(hidden, labels, weights, head) / (weight_sum + 1e-6)


def _input_dtype(head: Any, states: torch.Tensor) -> torch.dtype:
    """What a head wants to be fed: its weight's dtype, unless that is a quantised one."""
    return head.weight.dtype if head.weight.is_floating_point() else states.dtype


def unwrap(drafter: Any) -> Any:
    """The drafter inside a wrapper of distributed training."""
    return getattr(drafter, "module", drafter)
