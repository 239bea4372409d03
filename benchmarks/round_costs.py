"""
What a round of drafting and verifying costs on this machine, for the embedded pair: the target's pass over 1 to 8 tokens on
a filled cache, and the drafter's block with the head on 1 to 7 drafts. Medians, in milliseconds.

    python benchmarks/round_costs.py --dtype float32
"""

import argparse
import copy

import torch
from training_step import median_seconds

from dflare.candidates_dflare import request_taps
from dflare.checks_dflare import CACHE_NAME
from dflare.configuration.arguments import DEFAULT_DRAFTER, DEFAULT_TARGET
from dflare.configuration.targets import load_pair
from dflare.drafting_dflare import BlockDrafter

CONTEXT = 150


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    dtype = parser.parse_args().dtype
    target, drafter, _ = load_pair(DEFAULT_TARGET, DEFAULT_DRAFTER, dtype)
    ids = torch.randint(20, 40_000, (1, CONTEXT))
    filled = getattr(target(input_ids=ids, use_cache=True), CACHE_NAME)
    taps = [
        torch.randn(1, CONTEXT, drafter.config.hidden_size, dtype=target.dtype) for _ in drafter.config.target_layer_ids
    ]
    context = drafter.new_context_cache()
    drafter.extend_context(taps, context)
    block = BlockDrafter(drafter, target, ids)
    options = {"output_hidden_states": request_taps(drafter.config), "use_cache": True}
    print("tokens  verify   draft (milliseconds)")
    for count in range(1, drafter.config.block_size + 1):

        def verify(count=count):
            target(input_ids=ids[:, :count], **{CACHE_NAME: copy.deepcopy(filled)}, **options)

        def draft(count=count):
            block.logits(block.hidden(ids[:, -1:], context), count - 1)

        drafting = f"{1000 * median_seconds(draft, 15):6.1f}" if count > 1 else "     -"
        print(f"{count:6}  {1000 * median_seconds(verify, 15):6.1f}  {drafting}")


if __name__ == "__main__":
    main()
