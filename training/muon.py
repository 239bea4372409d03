"""Muon for the drafter's matrices: see README, Measured, for what it gained over AdamW."""

import torch
from torch import nn


class MuonAndAdamW(torch.optim.Optimizer):
    """
    torch's Muon (https://kellerjordan.github.io/posts/muon/) for matrices, with updates as large as AdamW's so that one
    learning rate serves both (arXiv 2502.16982), and AdamW for all else. To the Trainer it is one optimiser.

    Args:
        parameters: by name; those that learn.
        lr: learning rate of both.
        lr_scales: multiples of it, by parameter's name.
        betas, eps: AdamW's.
        weight_decay: Muon's; AdamW's is 0.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], lr: float, lr_scales: dict[str, float], weight_decay: float, **adamw
    ):
        matrices = [tensor for name, tensor in parameters.items() if _is_matrix(name, tensor)]
        groups = [
            {"params": [tensor], "lr": lr * lr_scales.get(name, 1.0)}
            for name, tensor in parameters.items()
            if not _is_matrix(name, tensor)
        ]
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            self.parts.append(muon)
        if groups:  # an adapter may have matrices alone
            self.parts.append(torch.optim.AdamW(groups, lr=lr, weight_decay=0.0, **adamw))
        super().__init__(list(parameters.values()), {"lr": lr})

    @property
    def param_groups(self) -> list[dict]:  # type: ignore[override]
        """The groups of both, as they are: a schedule writes into them."""
        return [group for part in self.parts for group in part.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict]) -> None:
        """What the base class would keep; the parts keep their own."""

    def add_param_group(self, param_group: dict) -> None:
        """Nothing: the parts have all groups."""

    def step(self, closure=None):
        """One step of both."""
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict:
        """The states of both."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict) -> None:
        """From `state_dict`."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)


def _is_matrix(name: str, tensor: torch.Tensor) -> bool:
    """The fusion weights are a table of logits, not a matrix that states pass."""
    return tensor.ndim == 2 and not name.endswith("layer_fusion_weights")
