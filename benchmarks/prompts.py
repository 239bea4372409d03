"""Prompts of the six benchmarks, each in the format that it is usually asked in. Imports nothing of the package."""

import argparse
import json
import random
from pathlib import Path

REASON = "\nPlease reason step by step, and put your final answer within \\boxed{{}}."
FORMATS = {
    "gsm8k": "{}" + REASON,
    "math500": "{}" + REASON,
    "aime25": "{}" + REASON,
    "humaneval": "Complete the following Python function. Answer with the whole function.\n```python\n{}```",
    "mbpp_sanitized": "{}",
    "mt_bench": "{}",
}


def benchmarks_folder(name: str) -> Path:
    """A command-line argument: a folder that holds all the benchmarks' files."""
    missing = [file for file in FORMATS if not (Path(name) / f"{file}.jsonl").is_file()]
    if missing:
        raise argparse.ArgumentTypeError(f"{name} lacks {', '.join(f'{file}.jsonl' for file in missing)}")
    return Path(name)


def report_file(name: str) -> Path:
    """A command-line argument: a file to be written in the end, whose folder is made at once."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    return Path(name)


def draw_prompts(folder: Path, name: str, count: int, seed: int) -> list[dict]:
    """`count` rows of a benchmark by the seed, its first turn in its format."""
    lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").rstrip("\n").split("\n")
    rows = random.Random(seed).sample([json.loads(line) for line in lines], count)
    return [{"id": row["id"], "text": FORMATS[name].format(row["turns"][0])} for row in rows]
