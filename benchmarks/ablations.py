"""
Small drafters for the embedded target, one for each arm and seed, and what each arm changes: the paper's ablations, other
objectives, and settings. All are trained for the same number of steps on the same rows, a seeded sample of the responses
whose features are stored first, and validated on the same others. A run that goes on does what is missing. Further flags go
to each `dflare train`, where an arm does not say otherwise.

    python benchmarks/ablations.py --data hub_cards/smollm2-135m-instruct-responses/responses.parquet \\
        --runs runs/ablations --output benchmarks/results/ablations.json

Acceptance length is that of a greedy walk through the validation rows' blocks, as `dflare train` reports it.
"""

import argparse
import concurrent.futures
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

from dflare.training.data import load_responses
from prompts import report_file

BASE = "dflare"
HELD_BACK = 64
# What differs from the recipe: the paper's optimiser, and short steps, for there are many runs.
COMMON: dict[str, object] = {
    "trainer.muon": False,
    "trainer.learning_rate": 1e-3,
    "trainer.per_device_train_batch_size": 2,
    "trainer.fusion_lr_scale": 10.0,
    "trainer.num_anchors": 32,
}
ARMS: dict[str, dict[str, object]] = {
    BASE: {},
    # The paper's ablations.
    "without softmax": {"drafter.fusion_softmax": False},
    "shared keys and values": {"drafter.separate_context_kv": False},
    "added fully-connected layer": {"drafter.fusion_fc": True},
    "growing gamma": {"trainer.gamma_end": 6.0},
    "DFlash": {"drafter.fusion": "shared_fc", "drafter.separate_context_kv": False},
    "1 layer": {"drafter.num_hidden_layers": 1},
    "3 layers": {"drafter.num_hidden_layers": 3},
    "5 taps": {"drafter.num_taps": 5, "features": "{runs}/features-5"},
    # Other objectives.
    "KL, half": {"trainer.distillation": "kl"},
    "KL alone": {"trainer.distillation": "kl", "trainer.distillation_share": 1.0},
    "total variation, half": {"trainer.distillation": "total_variation"},
    "expected length": {"trainer.weighting": "expected_length"},
    "until failure": {"trainer.weighting": "until_failure"},
    # Settings.
    "Muon": {"trainer.muon": True, "trainer.learning_rate": 4e-3},
    "blocks of 16": {"drafter.block_size": 16},
    "start from the target's last layers": {"start_layers": "last"},
    "3 key/value heads": {"drafter.num_key_value_heads": 3},
    "gamma 2": {"trainer.gamma": 2.0},
    "twice the learning rate": {"trainer.learning_rate": 2e-3},
    "half the learning rate": {"trainer.learning_rate": 5e-4},
    "fusion at the common rate": {"trainer.fusion_lr_scale": 1.0},
    "final norm from 1": {"final_norm_start": 1.0},
}
# Two-sided 95% points of Student's t for 1, 2, ... degrees of freedom.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


def dflare(threads: int, *words: object) -> None:
    """Run `dflare` with so many threads."""
    command = [str(Path(sys.executable).with_name("dflare")), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")


def prepare(args: argparse.Namespace) -> None:
    """The sample, the rows held back from it, and the features of both for each number of taps, where missing."""
    args.runs.mkdir(parents=True, exist_ok=True)
    sample = args.runs / "sample.parquet"
    if not sample.is_file():
        rows = load_responses(args.data).shuffle(seed=0)
        rows.select(range(HELD_BACK)).to_parquet(args.runs / "validation.parquet")
        rows.select(range(HELD_BACK + args.rows)).to_parquet(sample)
    for taps in sorted({ARMS[arm].get("drafter.num_taps", 9) for arm in args.arms}):
        features = ("--features", args.runs / f"features-{taps}", "--drafter.num_taps", taps)
        dflare(args.jobs, "data", "--output", sample, "--max_length", 400, *features)


def train(arm: str, seed: int, args: argparse.Namespace) -> dict:
    """The evaluation of one run, trained now if it is not there."""
    folder = args.runs / f"{arm.replace(' ', '-').replace('/', '-')}-{seed}"
    report = folder / "training.json"
    if not report.is_file():
        flags = {
            "config": args.recipe, "data": "{runs}/sample.parquet", "validation_data": "{runs}/validation.parquet",
            "features": "{runs}/features-9", "output_dir": folder, "seed": seed, "threads": 1,
            "trainer.max_steps": args.steps, "trainer.eval_strategy": "no", "trainer.save_strategy": "no",
            **COMMON, **args.flags, **ARMS[arm],
        }  # fmt: skip
        words = (word for key, value in flags.items() for word in (f"--{key}", _text(value).format(**vars(args))))
        dflare(1, "train", *words)
    return json.loads(report.read_text())["evaluation"]


def _text(value: object) -> str:
    return json.dumps(value) if isinstance(value, (bool, float)) else str(value)


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95% interval; infinite for a single value."""
    if len(values) < 2:
        return values[0], math.inf
    width = STUDENT[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), width


def row(arm: str, lengths: dict[str, dict[int, float]]) -> str:
    """A line of the table; differences are taken seed by seed."""
    own = list(lengths[arm].values())
    spread = f"{statistics.stdev(own):.3f}" if len(own) > 1 else "-"
    line = f"| {arm} | {len(own)} | {statistics.mean(own):.3f} | {spread} |"
    common = sorted(lengths[arm].keys() & lengths[BASE].keys())
    if arm == BASE or not common:
        return f"{line} |"
    mean, width = interval([lengths[arm][seed] - lengths[BASE][seed] for seed in common])
    verdict = "" if abs(mean) > width else ", no difference shown"
    return f"{line} {mean:+.3f} ± {width:.3f}{verdict} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "runs"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1600, help="Rows to train on.")
    parser.add_argument("--recipe", default="smollm2-135m")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--jobs", type=int, default=2, help="Runs at a time, of one thread each.")
    parser.add_argument("--output", type=report_file)
    args, flags = parser.parse_known_args()
    args.flags = {name.removeprefix("--"): value for name, value in zip(flags[::2], flags[1::2], strict=True)}
    prepare(args)
    lengths: dict[str, dict[int, float]] = {arm: {} for arm in args.arms}
    results: dict[str, dict[int, dict]] = {arm: {} for arm in args.arms}
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        work = {pool.submit(train, arm, seed, args): (arm, seed) for seed in args.seeds for arm in args.arms}
        for done in concurrent.futures.as_completed(work):
            arm, seed = work[done]
            results[arm][seed] = done.result()
            lengths[arm][seed] = results[arm][seed]["eval_acceptance_length"]
            print(f"{arm}, seed {seed}: {lengths[arm][seed]:.3f}", flush=True)
    print(f"| arm | seeds | acceptance length | spread | against {BASE} |\n| --- |" + " ---: |" * 4)
    for arm in args.arms:
        print(row(arm, lengths))
    if args.output:
        content = {"command": " ".join(sys.argv), "steps": args.steps, "arms": ARMS, "results": results}
        args.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
