"""What each slot of a block weighs in the loss. Slot k of B - 1 is the k-th draft after the anchor."""

import torch


def position_weights(block_size: int, gamma: float | None, device=None) -> torch.Tensor:
    """exp(-(k - 1) / gamma) for slots k = 1..B-1, shape (B - 1,); all ones if `gamma` is None (paper, Training)."""
    steps = torch.arange(block_size - 1, device=device, dtype=torch.float)
    return torch.ones_like(steps) if gamma is None else torch.exp(-steps / gamma)


def gamma_at(
    start: float | None, step: float = 0.0, end: float | None = None, *, epoch: float = 0.0, progress: float = 0.0
) -> float | None:
    """
    Gamma at a moment of training: `start` and `step` more with each whole epoch (the paper's appendix), or, with `end`,
    growing evenly from `start` to `end` over all steps (its general description). None stays unweighted.

    Args:
        epoch: epochs done. progress: share of all steps done, from 0 to 1.
    """
    if start is None:
        return None
    return start + step * int(epoch) if end is None else start + (end - start) * min(progress, 1.0)


def expected_length_weights(losses: torch.Tensor, valid: torch.Tensor, alpha: float) -> torch.Tensor:
    """
    D-PACE (arXiv 2605.18810, equations 7 and 8): each slot weighs what its log-probability adds to the expected number of
    accepted drafts, the sum over m >= k of the chance that slots 1..m all hold. Without gradient.

    Args:
        losses: (..., B - 1) cross-entropy of each slot. valid: (..., B - 1), whether it has a label.
        alpha: how far confidences are lifted towards 1, so that late slots learn before early ones are sure.
    """
    confidence = (alpha + (1 - alpha) * torch.exp(-losses.detach())) * valid
    prefixes = confidence.cumprod(dim=-1)
    return prefixes.flip(-1).cumsum(dim=-1).flip(-1) * valid


def until_failure(hits: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """
    Accept-until-fail (arXiv 2607.01893): the slots up to the first that the greedy draft gets wrong, that one included.

    Args:
        hits: (..., B - 1), whether the greedy draft is the label. valid: as in `expected_length_weights`.
    """
    before = torch.cat([torch.ones_like(hits[..., :1]), hits[..., :-1]], dim=-1)
    return before.int().cumprod(dim=-1).bool() & valid
