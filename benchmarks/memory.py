"""
Memory that drafting adds to a long prompt: the peak of a prefill with and without the drafter, each in a fresh process, and
what it should be at most: the target's own peak, the taps of all prompt tokens, and the drafter with its cache.

    python benchmarks/memory.py
    python benchmarks/memory.py --tokens 8192 --hidden 1024 --layers 12 --taps 5
"""

import argparse
import multiprocessing
import resource

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dflare import DFlareConfig, DFlareForBlockDiffusion

MIB = 2**20
SLACK = 1.02  # of what is measured, since an allocator rounds and keeps


def make_pair(args: argparse.Namespace) -> tuple[LlamaForCausalLM, DFlareForBlockDiffusion]:
    """A wide target of random weights, and a drafter of two layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=args.hidden, intermediate_size=2 * args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64, num_key_value_heads=2, max_position_embeddings=2 * args.tokens,
    )  # fmt: skip
    target = LlamaForCausalLM(config).eval()
    target.generation_config.eos_token_id = None
    fields = {"num_hidden_layers": 2, "num_taps": args.taps, "draft_policy": "fixed", "mask_token_id": 511}
    return target, DFlareForBlockDiffusion(DFlareConfig.from_target(config, **fields)).eval()


def measure(args: argparse.Namespace, assisted: bool, result) -> None:
    """Peak resident MiB above the state before `generate()`, and what taps and drafter's cache hold."""
    torch.set_num_threads(1)
    target, drafter = make_pair(args)
    prompt = torch.randint(3, 500, (1, args.tokens))
    options = {"max_new_tokens": 24, "do_sample": False, "assistant_model": drafter if assisted else None}
    target.generate(prompt[:, :64], **options)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    target.generate(prompt, **options)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    config = drafter.config
    key_values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    result.put([x / MIB for x in (peak, args.tokens * config.num_taps * args.hidden * 4, args.tokens * key_values * 4)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--taps", type=int, default=9)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")  # a peak never falls, so each has a process of its own
    results = []
    for assisted in (False, True):
        result = context.SimpleQueue()
        process = context.Process(target=measure, args=(args, assisted, result))
        process.start()
        results.append(result.get())
        process.join()
    (alone, taps, cache), (assisted, _, _) = results
    allowed = alone + taps + cache
    print(f"{args.tokens} tokens, {args.layers} layers of width {args.hidden}, fp32; MiB above the idle process")
    print(f"  target alone      {alone:8.1f}")
    print(f"  with the drafter  {assisted:8.1f}")
    print(f"  allowed           {allowed:8.1f}  (alone + taps {taps:.1f} + drafter's cache {cache:.1f})")
    if assisted > SLACK * allowed:
        raise SystemExit("more than allowed")


if __name__ == "__main__":
    main()
