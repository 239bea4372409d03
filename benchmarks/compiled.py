"""
Does `torch.compile` help here? Ordinary decoding and whole blocks, with nothing, the drafter, or target and drafter
compiled; after a warm-up on the same prompts, so that no compilation is timed. Shapes are dynamic: the context grows.

    python benchmarks/compiled.py --dtype float32
"""

import argparse
import functools
import statistics
import time

import torch
from transformers import AutoTokenizer

from dflare.commands.generate import encode, timed
from dflare.configuration.arguments import DEFAULT_DRAFTER, DEFAULT_TARGET, CheckArguments
from dflare.configuration.targets import load_pretrained, resolve_drafter, resolve_target

REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(resolve_target(DEFAULT_TARGET))
    prompts = [encode(prompt, tokenizer) for prompt in CheckArguments().prompts]
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    runs: dict[str, list] = {}
    for compiled in ((), ("drafter",), ("target", "drafter")):
        models = {
            "target": load_pretrained("AutoModelForCausalLM", resolve_target(DEFAULT_TARGET), args.dtype),
            "drafter": load_pretrained("AutoModel", resolve_drafter(DEFAULT_DRAFTER), args.dtype),
        }
        models["drafter"].config.draft_policy = "fixed"
        for name in compiled:
            models[name].forward = torch.compile(models[name].forward, dynamic=True)
        for label, assistant in (("ordinary", None), ("whole block", models["drafter"])):
            if assistant is not None or compiled != ("drafter",):
                generate = functools.partial(models["target"].generate, **options, assistant_model=assistant)
                runs[f"{label}, {' and '.join(compiled) or 'nothing'} compiled"] = generate
    for name, generate in runs.items():
        start = time.perf_counter()
        for inputs in prompts:
            generate(**inputs)
        print(f"{name}: warm after {time.perf_counter() - start:.0f} s", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPEATS):
        for name, generate in runs.items():
            seconds[name].append(sum(timed(functools.partial(generate, **inputs))[1] for inputs in prompts))
    base = statistics.median(next(iter(seconds.values())))
    for name, spent in seconds.items():
        print(f"{name:45} {base / statistics.median(spent):5.2f} times ordinary decoding, nothing compiled")


if __name__ == "__main__":
    main()
