"""
The block loss (paper, Training): the cross-entropy of each mask slot, early slots weighing most. `block_loss` is the way of
a batch through it; `dense_block_loss` says the same in a few plain lines and is what the tests hold it to.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dflare.drafting_dflare import RestrictedHead

from .anchors import IGNORED, block_ids, block_mask, block_positions, slot_labels
from .weights import expected_length_weights, position_weights, until_failure

WEIGHTINGS = ("decay", "expected_length", "until_failure")
DISTILLATIONS = ("kl", "total_variation")
ROWS_AT_ONCE = 256  # slots whose logits are in memory together


@dataclass(frozen=True)
class Objective:
    """
    What the loss is made of; the paper's by default.

    Args:
        weighting: `decay` by gamma; `expected_length` (D-PACE) or `until_failure` in `training/weights.py`, the latter
            with the decay inside what it keeps.
        alpha: of `expected_length`.
        distillation: None, or a distance of the drafter's distribution from the target's to learn beside the label's
            cross-entropy: `kl` (target from draft) or `total_variation`, which is the chance of a rejection in sampling.
        share: of the distillation in the sum of both.
    """

    weighting: str = "decay"
    alpha: float = 0.5
    distillation: str | None = None
    share: float = 0.5

    def __post_init__(self):
        if self.weighting not in WEIGHTINGS:
            raise ValueError(f"weighting is {self.weighting!r}; it must be one of {', '.join(WEIGHTINGS)}")
        if self.distillation not in (None, *DISTILLATIONS):
            raise ValueError(f"distillation is {self.distillation!r}; it must be null or {' or '.join(DISTILLATIONS)}")
        for name, value in (("alpha", self.alpha), ("share", self.share)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}; it must lie between 0 and 1")


PLAIN = Objective()


def block_hidden_states(
    drafter: nn.Module,
    embed: nn.Module,
    input_ids: torch.Tensor,
    taps: Sequence[torch.Tensor],
    anchors: torch.Tensor,
    keep: torch.Tensor,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    The drafter's final hidden states (b, A, B, H) of the blocks at all anchors in one pass: what `generate()` computes
    for each of them when the committed prefix ends at its anchor.

    Args:
        drafter: a `DFlareForBlockDiffusion`, or its wrapper in distributed training.
        embed: the target's embedding, frozen.
        input_ids: (b, S). taps: T tensors (b, S, H) of the target's states on them. anchors, keep: (b, A).
        starts: (b, S), where each token's sequence begins in its row; by default a row is one sequence.
    """
    plain = unwrap(drafter)
    size, kind = plain.config.block_size, plain.config._attn_implementation
    starts = torch.zeros_like(input_ids) if starts is None else starts
    noise = embed(block_ids(input_ids, anchors, size, plain.config.mask_token_id)).to(plain.dtype)
    hidden = drafter(
        noise_embeds=noise,
        context_hidden_states=taps,
        attention_mask=block_mask(anchors, keep, size, starts, kind),
        position_ids=block_positions(anchors, size, starts),
    ).last_hidden_state
    return hidden.unflatten(1, (-1, size))


class _HeadCrossEntropy(torch.autograd.Function):
    """
    Cross-entropies (N,) behind a frozen linear head, and whether the greedy draft is the label, a few rows at a time. The
    gradient of the states is made along with them, so no logits are kept and none are computed twice.
    """

    @staticmethod
    def forward(ctx, states, labels, weight, bias, rows):
        losses = states.new_empty(len(states), dtype=torch.float)
        hits = torch.empty_like(labels, dtype=torch.bool)
        gradient = torch.empty_like(states)
        for piece in map(slice, range(0, len(states), rows), range(rows, len(states) + rows, rows)):
            logits = nn.functional.linear(states[piece], weight, bias).float()
            wanted = labels[piece, None]
            highest, drafts = logits.max(dim=-1, keepdim=True)
            hits[piece] = (drafts == wanted).squeeze(1)
            of_label = logits.gather(1, wanted) - highest
            total = logits.sub_(highest).exp_().sum(dim=-1, keepdim=True)  # in place: one tensor of logits at a time
            losses[piece] = (total.log() - of_label).squeeze(1)
            if states.requires_grad:
                logits.div_(total).scatter_add_(1, wanted, torch.full_like(total, -1.0))
                gradient[piece] = logits.to(weight.dtype) @ weight
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(hits)
        return losses, hits

    @staticmethod
    def backward(ctx, of_losses, _):
        (gradient,) = ctx.saved_tensors
        return gradient * of_losses.unsqueeze(1).to(gradient.dtype), None, None, None, None


def slot_losses(states: torch.Tensor, labels: torch.Tensor, head: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Cross-entropies (N,) of states (N, H) against labels (N,), and whether the greedy draft is the label. No tensor is
    larger than `ROWS_AT_ONCE` times the vocabulary.

    Args:
        head: the target's frozen head, or a `RestrictedHead`.
    """
    labels = rows_of(head, labels) if isinstance(head, RestrictedHead) else labels
    states = states.to(_input_dtype(head, states))
    if _is_plain(head):
        return _HeadCrossEntropy.apply(states, labels, head.weight, head.bias, ROWS_AT_ONCE)

    def losses_of(states, labels):
        logits = head(states).float()
        return nn.functional.cross_entropy(logits, labels, reduction="none"), logits.argmax(dim=-1) == labels

    losses, hits = _in_pieces(losses_of, states, labels)
    return losses, hits


def distillation_losses(states: torch.Tensor, target_states: torch.Tensor, head: Any, kind: str) -> torch.Tensor:
    """
    Distances (N,) of the drafter's distributions from the target's.

    Args:
        states, target_states: (N, H), what the head makes of them is compared. kind: one of `DISTILLATIONS`.
    """

    def distances(states, target_states):
        ours, theirs = head(states).float().log_softmax(dim=-1), head(target_states).float().log_softmax(dim=-1)
        if kind == "kl":
            return (nn.functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim=-1),)
        return ((ours.exp() - theirs.exp()).abs().sum(dim=-1) / 2,)

    dtype = _input_dtype(head, states)
    return _in_pieces(distances, states.to(dtype), target_states.to(dtype))[0]


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
    divisor: torch.Tensor | float | None = None,
    objective: Objective = PLAIN,
    target_states: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    The training loss: the weighted sum over slots divided by `loss_divisor`.

    Args:
        gamma: decay of the position weights in slots; None for none.
        divisor: where several batches make one step, that of all of them; by default this batch's own.
        target_states: (b, S, H), what the target's head is fed; for a distillation.
        starts: as in `block_hidden_states`.
    """
    block_size = unwrap(drafter).config.block_size
    labels = draftable(slot_labels(input_ids, loss_mask, anchors, keep, block_size, starts), head)
    if divisor is None:
        divisor = loss_divisor(labels, gamma, objective)
    hidden = block_hidden_states(drafter, embed, input_ids, taps, anchors, keep, starts)[:, :, 1:]
    valid = labels != IGNORED
    losses, hits = slot_losses(hidden[valid], labels[valid], head)
    weights = slot_weights(losses, hits, valid, gamma, objective)[valid]
    if objective.distillation and target_states is not None:
        wanted = _states_before_labels(target_states, anchors, block_size)[valid]
        distances = distillation_losses(hidden[valid], wanted, head, objective.distillation)
        losses = torch.lerp(losses, distances, objective.share)
    return (losses * weights).sum() / (divisor + 1e-6) + hidden.sum() * 0.0


def slot_weights(
    losses: torch.Tensor, hits: torch.Tensor, valid: torch.Tensor, gamma: float | None, objective: Objective
) -> torch.Tensor:
    """Weights (b, A, B - 1) of all slots, from what came of those that have a label."""
    if objective.weighting == "expected_length":
        spread = torch.zeros(valid.shape, device=valid.device).masked_scatter(valid, losses.detach())
        return expected_length_weights(spread, valid, objective.alpha)
    weights = position_weights(valid.shape[-1] + 1, gamma, valid.device).expand(valid.shape)
    if objective.weighting == "until_failure":
        weights = weights * until_failure(torch.zeros_like(valid).masked_scatter(valid, hits), valid)
    return weights


def loss_divisor(labels: torch.Tensor, gamma: float | None, objective: Objective = PLAIN) -> torch.Tensor:
    """
    What the weighted sum is divided by, known before the forward pass so that batches add up to one step: the sum of the
    position weights of all slots with a label; for `expected_length` the number of blocks (as its author asks for:
    SpecForge, issue 828).
    """
    valid = labels != IGNORED
    if objective.weighting == "expected_length":
        return valid.any(dim=-1).sum().float()
    return (position_weights(labels.shape[-1] + 1, gamma, labels.device) * valid).sum()


def dense_block_loss(
    hidden_states: torch.Tensor, labels: torch.Tensor, head: Callable, gamma: float | None
) -> torch.Tensor:
    """The plain loss in a few lines, with all logits (b, A, B - 1, V) at once: the reference for `block_loss`."""
    logits = head(hidden_states).float()
    losses = nn.functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    weights = position_weights(labels.shape[-1] + 1, gamma, labels.device) * (labels != IGNORED)
    return (losses.view(labels.shape) * weights).sum() / (weights.sum() + 1e-6)


def draftable(labels: torch.Tensor, head: Any) -> torch.Tensor:
    """Labels, `IGNORED` where a head restricted to a draft vocabulary cannot say them."""
    return labels.where(torch.isin(labels, head.token_ids), IGNORED) if isinstance(head, RestrictedHead) else labels


def rows_of(head: RestrictedHead, labels: torch.Tensor) -> torch.Tensor:
    """Token ids as rows of a restricted head; `ValueError` if one is not among its `token_ids`."""
    rows = torch.searchsorted(head.token_ids, labels).clamp(max=len(head.token_ids) - 1)
    if not torch.equal(head.token_ids[rows], labels):
        missing = labels[head.token_ids[rows] != labels].unique().tolist()
        raise ValueError(
            f"token_ids lacks the labels {missing[:10]}; the head is restricted to {len(head.token_ids)} ids"
        )
    return rows


def unwrap(drafter: Any) -> Any:
    """The drafter inside a wrapper of distributed training."""
    return getattr(drafter, "module", drafter)


def _states_before_labels(states: torch.Tensor, anchors: torch.Tensor, block_size: int) -> torch.Tensor:
    """(b, A, B - 1, H): for slot k of anchor a the state at a + k - 1, whose next token is the slot's label."""
    places = anchors.unsqueeze(-1) + torch.arange(block_size - 1, device=anchors.device)
    rows = torch.arange(len(states), device=anchors.device)[:, None, None]
    return states[rows, places.clamp(max=states.shape[1] - 1)]


def _in_pieces(function: Callable, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What `function` gives for all rows, a few at a time; what is needed for gradients is computed again."""
    run: Callable = lambda *piece: checkpoint(function, *piece, use_reentrant=False)  # noqa: E731
    pieces = [run(*piece) for piece in zip(*(tensor.split(ROWS_AT_ONCE) for tensor in rows), strict=True)]
    return tuple(torch.cat(column) for column in zip(*pieces, strict=True))


def _is_plain(head: Any) -> bool:
    """Whether a head is nothing but a matrix (and a bias) in memory, and frozen."""
    kind = isinstance(head, RestrictedHead) or type(head) is nn.Linear
    return kind and head.weight.is_floating_point() and not head.weight.requires_grad and not head.weight.is_meta


def _input_dtype(head: Any, states: torch.Tensor) -> torch.dtype:
    """What a head wants to be fed: its weight's dtype, unless that is a quantised one."""
    return head.weight.dtype if head.weight.is_floating_point() else states.dtype
