"""
Peak memory and time of the head and its cross-entropy, forward and backward: ours, torch's `linear_cross_entropy` in
chunks, and the plain dense computation, on the same random states and labels. Each case runs in a process of its own.

    python benchmarks/loss_memory.py --output benchmarks/results/loss-memory.json

Memory is the most that the process held above what it had when states, labels and head were there.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch
from torch import nn

from dflare.training.loss import slot_losses
from prompts import report_file

HIDDEN, BLOCK, RUNS = 1024, 16, 3
WAYS = ("dense", "torch in chunks", "ours")


def losses_of(way: str, states: torch.Tensor, labels: torch.Tensor, head: nn.Linear) -> torch.Tensor:
    """Cross-entropies (N,), by one of the `WAYS`."""
    if way == "ours":
        return slot_losses(states, labels, head)[0]
    if way == "dense":
        return nn.functional.cross_entropy(head(states).float(), labels, reduction="none")
    options = nn.LinearCrossEntropyOptions()
    return nn.functional.linear_cross_entropy(states, head.weight, labels, reduction="none", options=options)


def measure(way: str, vocabulary: int, anchors: int, dtype: str) -> dict:
    """Median seconds of a step and MiB above the start, in this process."""
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, vocabulary, bias=False, dtype=getattr(torch, dtype)).requires_grad_(False)
    slots = anchors * (BLOCK - 1)
    states = torch.randn(slots, HIDDEN, dtype=head.weight.dtype, requires_grad=True)
    labels, weights = torch.randint(0, vocabulary, (slots,)), torch.rand(slots)
    idle, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(RUNS):
        states.grad = None
        start = time.perf_counter()
        (losses_of(way, states, labels, head) * weights).sum().backward()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": statistics.median(seconds), "mib": (peak - idle) / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--anchors", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--output", type=report_file)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # way, vocabulary, anchors: measure here
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]), int(args.one[2]), args.dtype)))
        return
    rows = []
    print("| vocabulary | anchors | way | MiB | of dense | seconds | of dense |\n|" + " ---: |" * 7)
    for vocabulary in args.vocabularies:
        for anchors in args.anchors:
            dense = None
            for way in args.ways:
                command = [sys.executable, __file__, "--dtype", args.dtype, "--one", way, str(vocabulary), str(anchors)]
                result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                dense = dense or result
                rows.append({"vocabulary": vocabulary, "anchors": anchors, "way": way, **result})
                shares = [result[key] / dense[key] for key in ("mib", "seconds")]
                print(
                    f"| {vocabulary:,} | {anchors} | {way} | {result['mib']:,.0f} | {shares[0]:.2f} | "
                    f"{result['seconds']:.2f} | {shares[1]:.2f} |",
                    flush=True,
                )
    if args.output:
        args.output.write_text(json.dumps({"command": " ".join(sys.argv), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
