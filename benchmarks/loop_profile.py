"""
Where a run's time goes: the target's passes, the drafter (context, block, head), and the rest of the loop, for ordinary
decoding and with the drafter, on a few prompts in turn. Shares of the time of all runs, and milliseconds a round.

    python benchmarks/loop_profile.py --dtype float32
"""

import argparse
import collections
import functools
import time

import torch
from transformers import AutoTokenizer

from dflare.candidates_dflare import DFlareCandidateGenerator
from dflare.commands.generate import encode
from dflare.configuration.arguments import DEFAULT_DRAFTER, DEFAULT_TARGET, CheckArguments
from dflare.configuration.targets import load_pretrained, resolve_drafter, resolve_target

spent: collections.Counter = collections.Counter()
calls: collections.Counter = collections.Counter()


def timed(owner, method: str, name: str) -> None:
    """Adds the seconds of each call of `owner.method` to `spent[name]`."""
    original = getattr(owner, method)

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            spent[name] += time.perf_counter() - start
            calls[name] += 1

    setattr(owner, method, wrapper)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--policy", default="fixed", choices=["fixed", "adaptive"])
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(resolve_target(DEFAULT_TARGET))
    target = load_pretrained("AutoModelForCausalLM", resolve_target(DEFAULT_TARGET), args.dtype)
    drafter = load_pretrained("AutoModel", resolve_drafter(DEFAULT_DRAFTER), args.dtype)
    drafter.config.draft_policy = args.policy
    prompts = [encode(prompt, tokenizer) for prompt in CheckArguments().prompts]
    for assistant in (None, drafter):
        target.generate(**prompts[0], max_new_tokens=16, do_sample=False, assistant_model=assistant)
    timed(target, "forward", "target")
    timed(drafter, "extend_context", "drafter: context")
    timed(DFlareCandidateGenerator, "_draft_hidden", "drafter: block")
    timed(DFlareCandidateGenerator, "get_candidates", "candidates in all")
    for name, assistant in (("ordinary decoding", None), ("with the drafter", drafter)):
        spent.clear()
        calls.clear()
        start, tokens = time.perf_counter(), 0
        for inputs in prompts:
            output = target.generate(
                **inputs, max_new_tokens=args.max_new_tokens, do_sample=False, assistant_model=assistant
            )
            tokens += output.shape[1] - inputs["input_ids"].shape[1]
        total = time.perf_counter() - start
        report(name, total, tokens)


def report(name: str, total: float, tokens: int) -> None:
    """One arm's shares."""
    passes = calls["target"]
    print(f"\n{name}: {tokens} tokens, {passes} passes of the target, {total:.2f} s, {tokens / total:.1f} tokens/s")
    drafting = spent["candidates in all"] - spent["drafter: context"] - spent["drafter: block"]
    parts = {key: spent[key] for key in ("target", "drafter: context", "drafter: block")}
    parts["drafter: head, choice"] = drafting
    parts["rest of the loop"] = total - sum(parts.values())
    for part, seconds in parts.items():
        print(f"  {part:24} {100 * seconds / total:5.1f}%  {1000 * seconds / passes:7.2f} ms a round")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
