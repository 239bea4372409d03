"""
How many prompts a second are held against the benchmarks, on this machine; medians of a few runs. (2.4 million is the
paper's number.)

    python benchmarks/decontaminate.py --prompts PROMPTS --benchmarks BENCHMARKS
"""

import argparse
import statistics
import time

from transformers import AutoTokenizer

from dflare.commands.data import CLEANED_AT_ONCE
from dflare.configuration.arguments import DEFAULT_TARGET
from dflare.configuration.targets import resolve_target
from dflare.training.decontaminate import BenchmarkIndex
from dflare.training.prompts import read_benchmarks, stream_prompts
from dflare.training.regenerate import batched

RUNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--benchmarks", nargs="+", required=True)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(resolve_target(DEFAULT_TARGET))
    prompts, seconds = list(stream_prompts(args.prompts, [], 0, None)), []
    for _ in range(RUNS):
        index = BenchmarkIndex(read_benchmarks(args.benchmarks), tokenizer)
        start = time.perf_counter()
        removed = sum(hit is not None for batch in batched(prompts, CLEANED_AT_ONCE) for hit in index.find(batch))
        seconds.append(time.perf_counter() - start)
    rate = len(prompts) / statistics.median(seconds)
    print(f"{len(prompts):,} prompts, {removed} removed, {rate:,.0f} a second: 2.4 million in {2.4e6 / rate:.0f} s")
    for (benchmark, reason), count in sorted(index.counts.items()):
        print(f"  {benchmark}: {count} ({reason})")


if __name__ == "__main__":
    main()
