"""
How much sooner, and where the time goes: ordinary decoding, prompt lookup, transformers' native DFlash loop with the same
weights, whole blocks without and with the drafter's draft vocabulary, and the adaptive choice, in turn on the same prompts
in one process. Then the same with a drafter of random weights, whose drafts fail: no harm must be done.

    python benchmarks/speed.py --benchmarks DIR --output benchmarks/results/speed.json

For each type and temperature a table: tokens per second relative to ordinary decoding over all prompts, quartiles of the
prompts' own ratios, tokens per drafted round, and the shares of the time in the target's passes, in the drafter (its
layers, its context, the head), and in the rest.
"""

import argparse
import collections
import copy
import functools
import json
import statistics
import sys
import time

import torch
from transformers import AutoTokenizer, set_seed

from dflare.candidates_dflare import record_drafts
from dflare.commands.generate import encode
from dflare.configuration.arguments import DEFAULT_DRAFTER, DEFAULT_TARGET
from dflare.configuration.targets import load_pair, resolve_target
from dflare.drafting_dflare import BlockDrafter
from prompts import FORMATS, benchmarks_folder, draw_prompts, report_file

LOOKUP_TOKENS = 3  # what prompt lookup proposes; more costs it more than it gains here
PARTS = ("target", "drafter")


class Clock:
    """Seconds spent in each part, the outermost watched call counting."""

    def __init__(self):
        self.spent: collections.Counter = collections.Counter()
        self.busy = False

    def watch(self, owner, method: str, part: str) -> None:
        """Counts the calls of `owner.method`, where the owner is an object or a class."""
        original = getattr(owner, method)

        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            if self.busy:
                return original(*args, **kwargs)
            self.busy, start = True, time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.spent[part] += time.perf_counter() - start
                self.busy = False

        setattr(owner, method, wrapper)


def make_arms(drafter, clock: Clock) -> dict[str, dict]:
    """What each arm passes to `generate()`."""
    fixed, unrestricted, adaptive = (copy.deepcopy(drafter) for _ in range(3))
    for assistant, policy in ((fixed, "fixed"), (unrestricted, "fixed"), (adaptive, "adaptive")):
        assistant.config.draft_policy = policy
        for method in ("forward", "extend_context"):
            clock.watch(assistant, method, "drafter")
    unrestricted.set_draft_vocabulary(None)
    return {
        "ordinary": {},
        "prompt lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
        "native DFlash": {"assistant_model": fixed, "speculation_type": "dflash"},
        "whole block, whole vocabulary": {"assistant_model": unrestricted},
        "whole block": {"assistant_model": fixed},
        "adaptive": {"assistant_model": adaptive},
    }


def race(target, prompts: list, arms: dict, options: dict, clock: Clock) -> dict[str, list[dict]]:
    """Each arm on each prompt; which comes first turns from prompt to prompt."""
    for arm in arms.values():
        target.generate(**prompts[0], **{**options, "max_new_tokens": 16}, **arm)
    rows: dict[str, list[dict]] = {name: [] for name in arms}
    names = list(arms)
    for number, inputs in enumerate(prompts):
        for name in names[number % len(arms) :] + names[: number % len(arms)]:
            set_seed(number)
            clock.spent.clear()
            with record_drafts() as records:
                start = time.perf_counter()
                output = target.generate(**inputs, **options, **arms[name])
                seconds = time.perf_counter() - start
            tokens = output.shape[1] - inputs["input_ids"].shape[1]
            lengths = [length for record in records for length in record.acceptance_lengths]
            parts = {part: clock.spent[part] for part in PARTS}
            rows[name].append({"tokens": tokens, "seconds": seconds, "parts": parts, "lengths": lengths})
        print(f"  prompt {number + 1} of {len(prompts)}", file=sys.stderr, flush=True)
    return rows


def summarise(rows: dict[str, list[dict]]) -> dict:
    """Relative to ordinary decoding."""
    speeds = {name: [row["tokens"] / row["seconds"] for row in mine] for name, mine in rows.items()}
    totals = {name: sum(r["tokens"] for r in mine) / sum(r["seconds"] for r in mine) for name, mine in rows.items()}
    summary = {}
    for name, mine in rows.items():
        ratios = [m / o for m, o in zip(speeds[name], speeds["ordinary"], strict=True)]
        lengths = [length for row in mine for length in row["lengths"]]
        seconds = sum(row["seconds"] for row in mine)
        shares = {part: sum(row["parts"][part] for row in mine) / seconds for part in PARTS}
        summary[name] = {
            "tokens_per_second": totals[name],
            "speed_up": totals[name] / totals["ordinary"],
            "quartiles": statistics.quantiles(ratios, n=4),
            "tokens_per_round": statistics.mean(lengths) if lengths else None,
            "shares": {**shares, "rest": 1 - sum(shares.values())},
        }
    return summary


def table(title: str, summary: dict) -> str:
    """Markdown."""
    lines = [
        f"\n{title}\n",
        "| | tok/s | speed-up | quartiles | tokens per drafted round | target / drafter / rest |",
        "| --- | ---: | ---: | --- | ---: | --- |",
    ]
    for name, row in summary.items():
        quartiles = " / ".join(f"{q:.2f}" for q in row["quartiles"])
        length = f"{row['tokens_per_round']:.2f}" if row["tokens_per_round"] else ""
        shares = " / ".join(f"{100 * share:.0f}%" for share in row["shares"].values())
        lines.append(
            f"| {name} | {row['tokens_per_second']:.1f} | {row['speed_up']:.2f} | {quartiles} | {length} | {shares} |"
        )
    return "\n".join(lines)


def measure(dtype: str, temperature: float, prompts: list, args, clock: Clock, report: dict) -> None:
    """All arms with the drafter, then ordinary and adaptive with one of random weights."""
    target, drafter, _ = load_pair(DEFAULT_TARGET, DEFAULT_DRAFTER, dtype)
    torch.manual_seed(0)
    hostile = type(drafter)(drafter.config).to(target.dtype).eval()
    clock.watch(target, "forward", "target")
    clock.watch(target.get_output_embeddings(), "forward", "drafter")
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": temperature > 0}
    options |= {"temperature": temperature, "top_k": 0} if temperature else {}
    name = f"{dtype}, {'greedy' if not temperature else f'temperature {temperature:g}'}"
    for label, assistant in ((name, drafter), (f"{name}, drafter of random weights", hostile)):
        arms = make_arms(assistant, clock)
        if assistant is hostile:
            arms = {arm: arms[arm] for arm in ("ordinary", "adaptive")}
        report["results"][label] = summarise(race(target, prompts, arms, options, clock))
        print(table(label, report["results"][label]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--benchmarks", type=benchmarks_folder, required=True, help="folder of the six benchmarks' files"
    )
    parser.add_argument("--per-benchmark", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--output", type=report_file)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(resolve_target(DEFAULT_TARGET))
    drawn = [prompt for name in FORMATS for prompt in draw_prompts(args.benchmarks, name, args.per_benchmark, seed=0)]
    prompts = [encode(prompt["text"], tokenizer) for prompt in drawn]
    report: dict = {"command": "python " + " ".join(sys.argv), "prompts": [prompt["id"] for prompt in drawn]}
    clock = Clock()
    clock.watch(BlockDrafter, "logits", "drafter")
    report |= {"threads": torch.get_num_threads(), "results": {}}
    for dtype in args.dtypes:
        for temperature in args.temperatures:
            measure(dtype, temperature, prompts, args, clock, report)
            if args.output:
                args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
