"""
What a training run will take, before anything is loaded: parameters, memory of a device, steps, device-hours. Counted, not
measured: multiplications of weights, two operations each, at a share of the device's peak that training usually reaches.
"""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from .loss import ROWS_AT_ONCE

ADAM_BYTES = 16  # of a parameter: fp32 weight, gradient, and two moments
AUTOCAST_BYTES = 2  # of a parameter: its bf16 copy in the forward pass
BACKWARD = 3  # forward and backward passes cost three forward ones
ACTIVATIONS = 16  # tensors of a slot's width that a layer keeps for its backward pass, the MLP's among them


@dataclass(frozen=True)
class Run:
    """
    What is to be trained, and on what.

    Args:
        rows: sequences of an epoch. tokens: in each on average. batch: sequences of a device and step.
        accumulation: batches of a step. devices: that share the work.
        anchors: of a sequence. tflops: a device's peak in bf16. utilisation: the share of it that is reached.
        checkpointing: whether layers' activations are computed again. features: whether the target's states are stored.
    """

    rows: int
    tokens: int
    epochs: float
    batch: int
    accumulation: int
    devices: int
    anchors: float
    tflops: float
    utilisation: float
    max_steps: int = -1
    checkpointing: bool = False
    features: bool = False

    @property
    def steps(self) -> int:
        """Optimiser steps."""
        own = math.ceil(self.epochs * self.rows / (self.batch * self.accumulation * self.devices))
        return self.max_steps if self.max_steps > 0 else own

    @property
    def sequences(self) -> int:
        """Sequences that all devices see in the whole run."""
        return self.steps * self.batch * self.accumulation * self.devices


def parameters(model: nn.Module) -> int:
    """All of a model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def active_parameters(model: nn.Module, config) -> int:
    """Those that one token passes: of a mixture's experts only as many as are chosen for it."""
    text = config.get_text_config()
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    chosen = getattr(text, "num_experts_per_tok", None)
    share = chosen / experts if experts and chosen else 1.0
    return sum(
        int(parameter.numel() * (share if ".experts." in name else 1.0)) for name, parameter in model.named_parameters()
    )


def gigabytes(drafter: nn.Module, target: nn.Module, run: Run, target_bytes: int = 2) -> dict[str, float]:
    """Memory of one device that holds all of the drafter and the target, by what it is for, in 10**9 bytes."""
    config: Any = drafter.config
    text = cast(Any, target.config).get_text_config()
    slots = run.batch * run.anchors * config.block_size
    tokens = run.batch * run.tokens
    kept = slots * (config.num_hidden_layers * (1 if run.checkpointing else ACTIVATIONS)) * config.hidden_size
    head = config.vocab_size * config.hidden_size
    resident = head * (1 if text.tie_word_embeddings else 2)
    context = tokens * config.hidden_size * (config.num_taps + 2 * config.num_hidden_layers)
    parts = {
        "target": (resident if run.features else parameters(target)) * target_bytes,
        "drafter and optimiser": parameters(drafter) * (ADAM_BYTES + AUTOCAST_BYTES),
        "taps and context": context * 2,
        "blocks": kept * 2 + slots * (tokens // run.batch + slots // run.batch),  # and the boolean mask
        "logits": 2 * ROWS_AT_ONCE * (config.draft_vocab_size or config.vocab_size) * 4,
    }
    return {name: size / 1e9 for name, size in parts.items()}


def operations(drafter: nn.Module, target: nn.Module, target_config, run: Run) -> float:
    """Floating-point operations of one sequence: the target forward, the drafter and its head forward and backward."""
    config: Any = drafter.config
    slots, width = run.anchors * config.block_size, config.head_dim * config.num_key_value_heads
    context = 2 * config.num_hidden_layers * config.hidden_size * width  # keys and values of a token
    scores = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * (run.tokens / 2)
    rows = config.draft_vocab_size or config.vocab_size
    head = rows * config.hidden_size * (config.block_size - 1) / config.block_size
    forward = slots * (parameters(drafter) - context + scores) + run.tokens * context
    # The head is frozen: its backward pass makes the states' gradient only.
    passes = BACKWARD + run.checkpointing
    states = 0 if run.features else run.tokens * active_parameters(target, target_config)
    return 2 * (states + passes * forward + 2 * slots * head)


def device_hours(drafter: nn.Module, target: nn.Module, target_config, run: Run) -> float:
    """Hours of all devices together."""
    return (
        run.sequences * operations(drafter, target, target_config, run) / (run.tflops * 1e12 * run.utilisation) / 3600
    )


def empty(make) -> nn.Module:
    """What `make` builds, without weights."""
    with torch.device("meta"):
        return make()
