"""Prompts of the six benchmarks, each in the format that it is usually asked in. Imports nothing of the package."""

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


def draw_prompts(folder: Path, name: str, count: int, seed: int) -> list[dict]:
    """`count` rows of a benchmark by the seed, its first turn in its format."""
    lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").rstrip("\n").split("\n")
    rows = random.Random(seed).sample([json.loads(line) for line in lines], count)
    return [{"id": row["id"], "text": FORMATS[name].format(row["turns"][0])} for row in rows]
