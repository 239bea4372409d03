"""Runs that are killed at random moments, ten times each, and go on: nothing is lost, repeated or different."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from safetensors.torch import load_file

from dflare.training.store import read_rows

KILLS = 10


def run_with_kills(words: list[str], progress: Callable[[], int], seconds: float, seed: int) -> None:
    """Runs a command again and again, killing it `KILLS` times up to `seconds` after it has got on; then lets it end."""
    draw = random.Random(seed)
    for _ in range(KILLS):
        process, before = start(words), progress()
        while progress() <= before:
            assert process.poll() is None, "the run ended before it was killed often enough"
            time.sleep(0.002)
        time.sleep(draw.uniform(0, seconds))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    finish(words)


def start(words: list[str]) -> subprocess.Popen:
    """The command in a process of its own."""
    return subprocess.Popen([sys.executable, "-m", "dflare.commands.main", *words], stdout=subprocess.DEVNULL)


def finish(words: list[str]) -> None:
    """Runs the command to its end."""
    assert start(words).wait() == 0


@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["0", "1"])
def test_data_runs(files, temperature):
    def words(name):
        return ["data", "--target", str(files / "target"), "--prompts", str(files / "prompts.jsonl"), "--output",
                str(files / name), "--dtype", "float32", "--batch_size", "1", "--max_new_tokens", "60",
                "--temperature", temperature]  # fmt: skip

    finish(words("whole.parquet"))
    parts = files / "parts.parquet.parts"
    run_with_kills(words("parts.parquet"), lambda: len(list(parts.glob("*.parquet"))), seconds=0.3, seed=0)
    rows = read_rows(files / "parts.parquet")
    assert len(rows) == 40 and rows == read_rows(files / "whole.parquet")


@pytest.mark.slow
def test_training_runs(files):
    data = files / "out.parquet"
    finish(["data", "--target", str(files / "target"), "--prompts", str(files / "prompts.jsonl"), "--output", str(data),
              "--dtype", "float32", "--max_new_tokens", "24"])  # fmt: skip
    recipe = files / "recipe.yaml"
    recipe.write_text(
        f"train:\n  target: {files}/target\n  data: {data}\n  target_dtype: float32\n  validation_size: 8\n  threads: 1\n"
        "  drafter: {num_hidden_layers: 2, block_size: 4, num_taps: 3}\n"
        "  trainer: {use_cpu: true, report_to: none, max_steps: 120, save_steps: 5, per_device_train_batch_size: 4,\n"
        "            train_sampling_strategy: group_by_length, save_total_limit: 2, num_anchors: 4}\n"
    )

    def words(name):
        return ["train", "--config", str(recipe), "--output_dir", str(files / name)]

    def newest() -> int:
        return max((int(folder.name.split("-")[1]) for folder in (files / "parts").glob("checkpoint-*")), default=0)

    finish(words("whole"))
    run_with_kills(words("parts"), newest, seconds=0.3, seed=1)
    ours, expected = (load_file(files / name / "drafter" / "model.safetensors") for name in ("parts", "whole"))
    assert all((ours[key] == tensor).all() for key, tensor in expected.items())
