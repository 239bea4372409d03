"""
Does `torch.compile` help here? Ordinary decoding and whole blocks, with nothing, the drafter, or target and drafter
compiled; after a warm-up on the same prompts, so that no compilation is timed. Shapes are dynamic, since the context grows;
with `--static` the target's cache has a fixed size.

    python benchmarks/compiled.py --dtype float32
"""

import argparse
import functools
import statistics
from collections.abc import Callable

import torch
from transformers import AutoTokenizer

from dflare.commands.generate import encode, timed
from dflare.configuration.arguments import DEFAULT_DRAFTER, DEFAULT_TARGET, CheckArguments
from dflare.configuration.targets import load_pair, resolve_target

REPEATS = 3


def make_runs(dtype: str, options: dict) -> dict[str, Callable]:
    """The ways to be compared, as functions of a prompt's inputs."""
    runs: dict[str, Callable] = {}
    for compiled in ((), ("drafter",), ("target", "drafter")):
        target, drafter, _ = load_pair(DEFAULT_TARGET, DEFAULT_DRAFTER, dtype)
        drafter.config.draft_policy = "fixed"
        for name, model in (("target", target), ("drafter", drafter)):
            if name in compiled:
                model.forward = torch.compile(model.forward, dynamic=True)
        for label, assistant in (("ordinary", None), ("whole block", drafter)):
            if assistant is not None or compiled != ("drafter",):
                name = f"{label}, {' and '.join(compiled) or 'nothing'} compiled"
                runs[name] = functools.partial(target.generate, **options, assistant_model=assistant)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=3, help="how many; fewer compile sooner")
    parser.add_argument("--static", action="store_true", help="cache_implementation='static'")
    args = parser.parse_args()
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False, "disable_compile": True}
    options |= {"cache_implementation": "static"} if args.static else {}
    tokenizer = AutoTokenizer.from_pretrained(resolve_target(DEFAULT_TARGET))
    prompts = [encode(prompt, tokenizer) for prompt in CheckArguments().prompts[: args.prompts]]
    runs = make_runs(args.dtype, options)
    for name, generate in runs.items():
        seconds = timed(lambda generate=generate: [generate(**inputs) for inputs in prompts])[1]
        print(f"{name}: warm after {seconds:.0f} s", flush=True)
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPEATS):
        for name, generate in runs.items():
            spent[name].append(timed(lambda generate=generate: [generate(**inputs) for inputs in prompts])[1])
            print(f"{name}: {spent[name][-1]:.2f} s", flush=True)
    base = statistics.median(next(iter(spent.values())))
    for name, seconds in spent.items():
        print(f"{name:45} {base / statistics.median(seconds):5.2f} times ordinary decoding, nothing compiled")


if __name__ == "__main__":
    main()
