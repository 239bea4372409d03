"""
Where a training step's time goes on this machine: the target's pass, the drafter's forward and backward, the head and its
loss. Medians of a few runs on random tokens, in the shapes of the embedded pair's recipe.

    python benchmarks/training_step.py

On Linux, glibc gives large tensors back to the system after every operation. Keeping them, in huge pages, is worth a try:

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592 \\
        python benchmarks/training_step.py
"""

import argparse
import statistics
import time

import torch
from transformers import AutoModelForCausalLM

from dflare import DFlareConfig, DFlareForBlockDiffusion
from dflare.candidates_dflare import request_taps, select_taps
from dflare.configuration.arguments import DEFAULT_TARGET
from dflare.configuration.targets import resolve_target
from dflare.drafting_dflare import RestrictedHead
from dflare.training.loss import block_hidden_states, slot_losses

BATCH, LENGTH, PROMPT, ANCHORS, TOKENS = 6, 280, 100, 64, 10_000


def median_seconds(work, runs: int = 5) -> float:
    """Median of `runs` timed calls, after one that is not timed."""
    work()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(resolve_target(DEFAULT_TARGET), dtype=torch.bfloat16)
    target.requires_grad_(False)
    config = DFlareConfig.from_target(target.config, num_hidden_layers=2, block_size=8, num_key_value_heads=9)
    drafter = DFlareForBlockDiffusion(config)
    ids = torch.randint(20, TOKENS, (BATCH, LENGTH))
    anchors = torch.stack([torch.randperm(LENGTH - PROMPT - 8)[:ANCHORS].sort().values + PROMPT for _ in range(BATCH)])
    keep = torch.ones_like(anchors, dtype=torch.bool)
    embed, head = target.get_input_embeddings(), RestrictedHead(target.get_output_embeddings(), torch.arange(TOKENS))

    @torch.no_grad()
    def run_target() -> list[torch.Tensor]:
        outputs = target.get_decoder()(input_ids=ids, output_hidden_states=request_taps(config), use_cache=False)
        return select_taps(outputs, config)

    taps = run_target()

    def run_drafter() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = block_hidden_states(drafter, embed, ids, taps, anchors, keep)
        hidden.float().sum().backward()
        return hidden

    hidden = run_drafter()[:, :, 1:].detach().requires_grad_()
    labels = torch.randint(0, TOKENS, hidden.shape[:-1])

    def run_loss() -> None:
        slot_losses(hidden.flatten(0, -2), labels.flatten(), head)[0].sum().backward()

    for name, work in {"target": run_target, "drafter": run_drafter, "head and loss": run_loss}.items():
        print(f"{name:15} {median_seconds(work):.3f} s")


if __name__ == "__main__":
    main()
