"""Runs that are killed at random moments, ten times each, and go on: nothing is lost, repeated or different."""

import random
import signal
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file

from dflare.training.store import read_rows

KILLS = 10


def run_with_kills(words: list[str], seconds: tuple[float, float], seed: int) -> int:
    """Runs a command until it ends by itself, killing it `KILLS` times before; returns how often it was really killed."""
    draw, killed = random.Random(seed), 0
    for attempt in range(KILLS + 1):
        process = subprocess.Popen([sys.executable, "-m", "dflare.commands.main", *words], stdout=subprocess.DEVNULL)
        try:
            process.wait(timeout=draw.uniform(*seconds) if attempt < KILLS else None)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            killed += 1
        assert process.wait() in (0, -signal.SIGKILL)
    return killed


def duration(words: list[str]) -> float:
    """Seconds of a run that nobody disturbs."""
    start = time.time()
    subprocess.run([sys.executable, "-m", "dflare.commands.main", *words], check=True, stdout=subprocess.DEVNULL)
    return time.time() - start


@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["0", "1"])
def test_data_runs(files, temperature):
    def words(name):
        return ["data", "--target", str(files / "target"), "--prompts", str(files / "prompts.jsonl"), "--output",
                str(files / name), "--dtype", "float32", "--batch_size", "1", "--max_new_tokens", "60",
                "--temperature", temperature]  # fmt: skip

    whole = duration(words("whole.parquet"))
    assert run_with_kills(words("parts.parquet"), (0.6 * whole, whole), seed=0) >= 2
    rows = read_rows(files / "parts.parquet")
    assert len(rows) == 40 and rows == read_rows(files / "whole.parquet")


@pytest.mark.slow
def test_training_runs(files):
    data = files / "out.parquet"
    duration(["data", "--target", str(files / "target"), "--prompts", str(files / "prompts.jsonl"), "--output", str(data),
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

    whole = duration(words("whole"))
    assert run_with_kills(words("parts"), (0.6 * whole, whole), seed=1) >= 2
    ours, expected = (load_file(files / name / "drafter" / "model.safetensors") for name in ("parts", "whole"))
    assert all((ours[key] == tensor).all() for key, tensor in expected.items())
