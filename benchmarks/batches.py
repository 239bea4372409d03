"""
Batches: tokens per second of ordinary batched decoding and of the drafter, on the same prompts in groups of each size, both
ways in turn and the whole repeated; and whether each row is what it is on its own.

    python benchmarks/batches.py --benchmarks DIR --dtype float32 --output benchmarks/results/batches-float32.json
"""

import argparse
import json
import statistics
import sys

import torch

from dflare.commands.generate import timed
from dflare.configuration.arguments import DEFAULT_DRAFTER, DEFAULT_TARGET
from dflare.configuration.targets import load_pair
from prompts import FORMATS, benchmarks_folder, draw_prompts, report_file

SIZES = (1, 4, 8, 16)


def groups_of(texts: list[str], size: int, tokenizer) -> list:
    """Left-padded batches of `size` prompts."""
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [
        tokenizer.apply_chat_template(
            chats[start : start + size], add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
        )
        for start in range(0, len(chats), size)
    ]


def answers_of(output: torch.Tensor, inputs, eos: int) -> list[list[int]]:
    """Each row's answer, up to its end-of-sequence token."""
    rows = output[:, inputs["input_ids"].shape[1] :].tolist()
    return [row[: row.index(eos) + 1] if eos in row else row for row in rows]


def run_size(target, arms: dict, batches: list, max_new_tokens: int) -> dict[str, dict]:
    """Answers and seconds of each arm; which goes first turns from batch to batch."""
    eos = target.generation_config.eos_token_id
    options = {"do_sample": False, "max_new_tokens": max_new_tokens}
    results: dict[str, dict] = {name: {"answers": [], "seconds": 0.0} for name in arms}
    for number, inputs in enumerate(batches):
        for name in sorted(arms, reverse=bool(number % 2)):
            work = lambda name=name, inputs=inputs: target.generate(**inputs, **options, **arms[name])  # noqa: E731
            output, seconds = timed(work)
            results[name]["answers"] += answers_of(output, inputs, eos)
            results[name]["seconds"] += seconds
    return results


def measure_size(target, arms: dict, batches: list, max_new_tokens: int, repeats: int) -> dict:
    """Medians of `repeats` runs over all batches: tokens per second of each arm and their ratio; and the last answers."""
    run_size(target, arms, batches[:1], 16)  # so that each size starts warm
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        results = run_size(target, arms, batches, max_new_tokens)
        for name, result in results.items():
            speeds[name].append(sum(map(len, result["answers"])) / result["seconds"])
    ratios = [ours / ordinary for ours, ordinary in zip(speeds["dflare"], speeds["ordinary"], strict=True)]
    return {
        "tokens_per_second": {name: statistics.median(runs) for name, runs in speeds.items()},
        "speed_up": statistics.median(ratios),
        "speed_ups": ratios,
        "answers": {name: result["answers"] for name, result in results.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--benchmarks", type=benchmarks_folder, required=True, help="folder of the six benchmarks' files"
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--output", type=report_file)
    args = parser.parse_args()
    target, drafter, tokenizer = load_pair(DEFAULT_TARGET, DEFAULT_DRAFTER, args.dtype, padding_side="left")
    per_file = -(-args.prompts // len(FORMATS))
    drawn = [draw_prompts(args.benchmarks, name, per_file, seed=0) for name in FORMATS]
    texts = [prompt["text"] for row in zip(*drawn, strict=True) for prompt in row][: args.prompts]
    arms = {"ordinary": {}, "dflare": {"assistant_model": drafter}}
    report: dict = {"command": "python " + " ".join(sys.argv), "sizes": {}}
    alone: list[list[int]] = []
    print("| rows | ordinary tok/s | DFlare tok/s | speed-up | rows as on their own | rows as in the ordinary batch |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for size in SIZES:
        found = measure_size(target, arms, groups_of(texts, size, tokenizer), args.max_new_tokens, args.repeats)
        answers = found.pop("answers")
        alone = alone or answers["ordinary"]
        same = [
            sum(mine == its for mine, its in zip(answers["dflare"], other, strict=True))
            for other in (alone, answers["ordinary"])
        ]
        report["sizes"][size] = {**found, "as_alone": same[0], "as_ordinary_batch": same[1]}
        ordinary, ours = found["tokens_per_second"].values()
        counts = " | ".join(f"{count} of {len(texts)}" for count in same)
        print(f"| {size} | {ordinary:.1f} | {ours:.1f} | {found['speed_up']:.2f} | {counts} |", flush=True)
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
