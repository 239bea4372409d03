"""
Batches: tokens per second of ordinary batched decoding and of the drafter, on the same prompts in groups of each size, both
ways in turn; and whether each row is what it is on its own.

    python benchmarks/batches.py --benchmarks DIR --dtype float32 --output benchmarks/results/batches-float32.json
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

from dflare.commands.generate import timed
from dflare.configuration.arguments import DEFAULT_DRAFTER, DEFAULT_TARGET
from dflare.configuration.targets import load_pretrained, resolve_drafter, resolve_target
from prompts import FORMATS, draw_prompts

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmarks", type=Path, required=True, help="folder with the six benchmarks' JSONL files")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    folder = resolve_target(DEFAULT_TARGET)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    target = load_pretrained("AutoModelForCausalLM", folder, args.dtype)
    drafter = load_pretrained("AutoModel", resolve_drafter(DEFAULT_DRAFTER), args.dtype)
    per_file = -(-args.prompts // len(FORMATS))
    drawn = [draw_prompts(args.benchmarks, name, per_file, seed=0) for name in FORMATS]
    texts = [prompt["text"] for row in zip(*drawn, strict=True) for prompt in row][: args.prompts]
    arms = {"ordinary": {}, "dflare": {"assistant_model": drafter}}
    report: dict = {"command": "python " + " ".join(sys.argv), "sizes": {}}
    alone: list[list[int]] = []
    print("| rows | ordinary tok/s | DFlare tok/s | speed-up | rows as on their own | rows as in the ordinary batch |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for size in SIZES:
        batches = groups_of(texts, size, tokenizer)
        run_size(target, arms, batches[:1], 16)  # so that each size starts warm
        results = run_size(target, arms, batches, args.max_new_tokens)
        ordinary, ours = results["ordinary"], results["dflare"]
        alone = alone or ordinary["answers"]
        speeds = {name: sum(map(len, r["answers"])) / r["seconds"] for name, r in results.items()}
        same = [
            sum(mine == its for mine, its in zip(ours["answers"], other, strict=True))
            for other in (alone, ordinary["answers"])
        ]
        report["sizes"][size] = {"tokens_per_second": speeds, "as_alone": same[0], "as_ordinary_batch": same[1]}
        ratio = speeds["dflare"] / speeds["ordinary"]
        counts = " | ".join(f"{count} of {len(texts)}" for count in same)
        print(f"| {size} | {speeds['ordinary']:.1f} | {speeds['dflare']:.1f} | {ratio:.2f} | {counts} |", flush=True)
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
