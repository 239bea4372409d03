"""
Does the choice of how many drafts to verify pay, and does it never harm? Ordinary decoding, blocks of fixed length and the
adaptive choice, in turn on the same prompts in one process; then the same with a drafter of random weights, whose drafts
fail. Medians over prompts of tokens per second relative to ordinary decoding.

    python benchmarks/policies.py --benchmarks DIR --dtype float32 --output benchmarks/results/policies-float32.json
"""

import argparse
import copy
import functools
import json
import random
import statistics
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

from dflare.commands.generate import encode, timed
from dflare.configuration.arguments import DEFAULT_DRAFTER, DEFAULT_TARGET
from dflare.configuration.targets import load_pretrained, resolve_drafter, resolve_target

ARMS = ("ordinary", "one draft", "three drafts", "whole block", "adaptive")
FILES = ("gsm8k", "math500", "humaneval", "mbpp_sanitized", "mt_bench")


def arms_of(drafter) -> dict:
    """Each arm's assistant and options."""
    fixed, adaptive = copy.deepcopy(drafter), copy.deepcopy(drafter)
    fixed.config.draft_policy, adaptive.config.draft_policy = "fixed", "adaptive"
    fixed.config.num_draft_tokens = adaptive.config.num_draft_tokens = None
    options: tuple[dict, ...] = (
        {},
        {"assistant_model": fixed, "num_assistant_tokens": 1},
        {"assistant_model": fixed, "num_assistant_tokens": 3},
        {"assistant_model": fixed},
        {"assistant_model": adaptive},
    )
    return dict(zip(ARMS, options, strict=True))


def race(target, prompts: list, arms: dict, options: dict) -> dict[str, list[float]]:
    """Seconds per token of each arm on each prompt; the order turns from prompt to prompt."""
    for arm in arms.values():
        target.generate(**prompts[0], **{**options, "max_new_tokens": 24}, **arm)
    costs: dict[str, list[float]] = {name: [] for name in arms}
    for number, inputs in enumerate(prompts):
        names = list(arms)[number % len(arms) :] + list(arms)[: number % len(arms)]
        for name in names:
            output, seconds = timed(functools.partial(target.generate, **inputs, **options, **arms[name]))
            costs[name].append(seconds / (output.shape[1] - inputs["input_ids"].shape[1]))
    return costs


def summarise(costs: dict[str, list[float]]) -> dict:
    """Relative to ordinary decoding: the ratio over all prompts, and the quartiles of the prompts' ratios."""
    ordinary = costs["ordinary"]
    summary = {}
    for name, mine in costs.items():
        ratios = [o / m for o, m in zip(ordinary, mine, strict=True)]
        summary[name] = {"overall": sum(ordinary) / sum(mine), "quartiles": statistics.quantiles(ratios, n=4)}
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmarks", type=Path, required=True)
    parser.add_argument("--per-benchmark", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="ordinary is always among them")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(resolve_target(DEFAULT_TARGET))
    target = load_pretrained("AutoModelForCausalLM", resolve_target(DEFAULT_TARGET), args.dtype)
    drafter = load_pretrained("AutoModel", resolve_drafter(DEFAULT_DRAFTER), args.dtype)
    torch.manual_seed(0)
    hostile = type(drafter)(drafter.config).to(target.dtype).eval()
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": args.temperature > 0}
    options |= {"temperature": args.temperature} if args.temperature else {}
    prompts = []
    for name in FILES:
        rows = (args.benchmarks / f"{name}.jsonl").read_text(encoding="utf-8").rstrip("\n").split("\n")
        for row in random.Random(0).sample(rows, args.per_benchmark):
            prompts.append(encode(json.loads(row)["turns"][0], tokenizer))
    report = {"command": "python " + " ".join(sys.argv), "prompts": len(prompts)}
    for label, assistant in (("the drafter", drafter), ("a drafter of random weights", hostile)):
        arms = {name: arm for name, arm in arms_of(assistant).items() if name in {"ordinary", *args.arms}}
        report[label] = summarise(race(target, prompts, arms, options))
        print(f"\n{label}, {len(prompts)} prompts")
        for name, row in report[label].items():
            quartiles = " / ".join(f"{q:.2f}" for q in row["quartiles"])
            print(f"  {name:14} {row['overall']:5.2f}   quartiles {quartiles}", flush=True)
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
