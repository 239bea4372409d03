"""
Same tokens, sooner? Plain `generate()` with and without the drafter, on prompts of the six benchmarks, in a process that
cannot import the package: what a user of the Hub repository gets. Writes a JSON report and prints a table.

    python benchmarks/lossless.py --target TARGET --drafter hub_cards/dflare-smollm2-135m --benchmarks DIR \\
        --per-benchmark 9 --max-new-tokens 128 --dtype float32 --output benchmarks/results/lossless-float32.json

Each prompt is decoded both ways in turn, which goes first alternates, and the speed-up is the ratio of tokens per second
over all prompts of a benchmark; its spread is the median and the quartiles of the ratios of single prompts.
"""

import argparse
import hashlib
import json
import platform
import statistics
import sys
import time
from pathlib import Path

sys.modules["dflare"] = None  # importing the package fails from here on

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from prompts import FORMATS, benchmarks_folder, draw_prompts, report_file  # noqa: E402

GROUPS = {
    "math": ("gsm8k", "math500", "aime25"),
    "code": ("humaneval", "mbpp_sanitized"),
    "chat": ("mt_bench",),
    "all": tuple(FORMATS),
}
NEAR_TIE = 0.25  # a difference of the top two logits that bf16 rounding can turn over


def run_prompt(target, drafter, inputs, max_new_tokens: int, drafter_first: bool) -> dict:
    """Both arms on one prompt: tokens, seconds, rounds, and how they differ if they do."""
    outputs, seconds = {}, {}
    with drafter.record_drafts() as records:
        for arm in ("dflare", "ordinary") if drafter_first else ("ordinary", "dflare"):
            start = time.perf_counter()
            assistant = drafter if arm == "dflare" else None
            outputs[arm] = target.generate(
                **inputs, assistant_model=assistant, max_new_tokens=max_new_tokens, do_sample=False
            )
            seconds[arm] = time.perf_counter() - start
    prompt = inputs["input_ids"].shape[1]
    result = {
        "seconds": seconds,
        "tokens": {arm: output.shape[1] - prompt for arm, output in outputs.items()},
        "acceptance_lengths": records[0].acceptance_lengths,
        "rounds_cut": sum(r.cut for r in records[0].rounds),
        "identical": torch.equal(outputs["ordinary"], outputs["dflare"]),
    }
    if not result["identical"]:
        result["top_two_gap"] = gap_at_difference(target, outputs["ordinary"][0], outputs["dflare"][0])
    return result


@torch.no_grad()
def gap_at_difference(target, a: torch.Tensor, b: torch.Tensor) -> float:
    """Where the outputs part: the target's top two logits on the common prefix in fp32, their difference."""
    length = min(len(a), len(b))
    different = (a[:length] != b[:length]).nonzero()
    place = int(different[0]) if len(different) else length
    dtype = target.dtype
    logits = target.float()(input_ids=a[None, :place], use_cache=False).logits[0, -1]
    target.to(dtype)
    top = logits.topk(2).values
    return float(top[0] - top[1])


def summarise(rows: list[dict]) -> dict:
    """Totals of one benchmark, or of all."""
    lengths = [length for row in rows for length in row["acceptance_lengths"]]
    speeds = {
        arm: sum(r["tokens"][arm] for r in rows) / sum(r["seconds"][arm] for r in rows) for arm in rows[0]["tokens"]
    }
    ratios = [
        (r["tokens"]["dflare"] / r["seconds"]["dflare"]) / (r["tokens"]["ordinary"] / r["seconds"]["ordinary"])
        for r in rows
    ]
    return {
        "prompts": len(rows),
        "identical": sum(row["identical"] for row in rows),
        "wide_gaps": sum(row.get("top_two_gap", 0.0) > NEAR_TIE for row in rows),
        "acceptance_length": statistics.mean(lengths) if lengths else None,
        "tokens_per_second": speeds,
        "speed_up": speeds["dflare"] / speeds["ordinary"],
        "speed_up_quartiles": statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--benchmarks", type=benchmarks_folder, required=True)
    parser.add_argument("--only", choices=list(FORMATS), help="one benchmark instead of all six")
    parser.add_argument("--per-benchmark", type=int, default=9)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--num-draft-tokens", type=int, help="fixed number of drafts to verify; by default adaptive")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=report_file, required=True)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype)
    drafter = AutoModel.from_pretrained(args.drafter, trust_remote_code=True, dtype=dtype)
    if args.num_draft_tokens:
        drafter.config.draft_policy, drafter.config.num_draft_tokens = "fixed", args.num_draft_tokens
    report = measure(args, tokenizer, target, drafter)
    args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print_table(report["summary"])
    failed = [row["id"] for row in report["rows"] if not row["identical"] and row["top_two_gap"] > NEAR_TIE]
    exact = dtype == torch.float32 and report["summary"]["all"]["identical"] < len(report["rows"])
    return 1 if failed or exact else 0


def measure(args, tokenizer, target, drafter) -> dict:
    """Runs everything and gathers the report."""
    encoded = {}
    for name in [args.only] if args.only else FORMATS:
        for prompt in draw_prompts(args.benchmarks, name, args.per_benchmark, args.seed):
            chat = [{"role": "user", "content": prompt["text"]}]
            encoded[name, prompt["id"]] = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
    warm_up = next(iter(encoded.values()))
    run_prompt(target, drafter, warm_up, 16, False)
    rows = []
    for number, ((name, id), inputs) in enumerate(encoded.items()):
        row = run_prompt(target, drafter, inputs, args.max_new_tokens, bool(number % 2))
        rows.append({"benchmark": name, "id": id, **row})
        mean = statistics.mean(row["acceptance_lengths"] or [1])
        print(f"{number + 1}/{len(encoded)} {id}: identical {row['identical']}, length {mean:.2f}", flush=True)
    parts = {name: (name,) for name in FORMATS} | GROUPS
    groups = {name: [row for row in rows if row["benchmark"] in members] for name, members in parts.items()}
    summary = {name: summarise(group) for name, group in groups.items() if group}
    return {
        "command": "python " + " ".join(sys.argv),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": {"processor": processor(), "threads": torch.get_num_threads()},
        "dtype": args.dtype,
        "attention": target.config._attn_implementation,
        "block_size": drafter.config.block_size,
        "draft_policy": drafter.config.draft_policy,
        "num_draft_tokens": drafter.config.num_draft_tokens or drafter.config.block_size - 1,
        "chat_template_arguments": {"add_generation_prompt": True},
        "prompt_ids_sha256": hashlib.sha256(
            json.dumps([inputs["input_ids"].tolist() for inputs in encoded.values()]).encode()
        ).hexdigest(),
        "drafter_class": f"{type(drafter).__module__}.{type(drafter).__name__}",
        "summary": summary,
        "rows": rows,
    }


def processor() -> str:
    """The processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def print_table(summary: dict) -> None:
    """The summary as a Markdown table."""
    print(
        "\n| benchmark | prompts | identical | acceptance length | ordinary tok/s | DFlare tok/s | speed-up | quartiles |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    for name, group in summary.items():
        speeds, length = group["tokens_per_second"], group["acceptance_length"] or float("nan")
        quartiles = " / ".join(f"{q:.2f}" for q in group["speed_up_quartiles"])
        print(
            f"| {name} | {group['prompts']} | {group['identical']} | {length:.2f} "
            f"| {speeds['ordinary']:.1f} | {speeds['dflare']:.1f} | {group['speed_up']:.2f} | {quartiles} |"
        )


if __name__ == "__main__":
    sys.exit(main())
