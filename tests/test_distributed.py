"""Two ranks give the losses and the weights of one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflare.configuration.arguments import RECIPES
from helpers import response_rows

SCRIPT = Path(__file__).parent / "distributed_run.py"


def train(folder: Path, ranks: int, batch: int, *kind: str) -> tuple[dict, dict]:
    """The report and the saved weights of a run."""
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--rdzv-backend", "c10d"]
        launch += ["--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [*launch, str(SCRIPT), str(folder), str(batch), *kind],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parent)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((folder / "result.json").read_text())
    return report, load_file(folder / "saved" / "model.safetensors")


def hub_files(folder: Path) -> tuple[dict, set[str]]:
    """What loads a saved drafter without the package: where its classes stand, and the code."""
    return json.loads((folder / "config.json").read_text())["auto_map"], {file.name for file in folder.glob("*.py")}


@pytest.fixture(scope="module")
def alone(talker, tmp_path_factory):
    """What one rank gives, and the rows it was trained on."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "rows.json").write_text(json.dumps(response_rows(talker, count=24, length=20)))
    return folder, *train(folder, 1, 4)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_are_one(tmp_path, alone, kind):
    folder, report, weights = alone
    (tmp_path / "rows.json").write_text((folder / "rows.json").read_text())
    other, others_weights = train(tmp_path, 2, 2, *([kind] if kind == "fsdp" else []))
    assert report["kind"].endswith("NO") and other["kind"].endswith("FSDP" if kind == "fsdp" else "MULTI_CPU")
    assert other["losses"] == pytest.approx(report["losses"], rel=1e-5)
    for key in ("eval_loss", "eval_acceptance_length", "eval_accuracy_1"):
        assert other["metrics"][key] == pytest.approx(report["metrics"][key], rel=1e-4)
    assert weights.keys() == others_weights.keys()
    assert hub_files(tmp_path / "saved") == hub_files(folder / "saved")
    for name, tensor in weights.items():
        torch.testing.assert_close(others_weights[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_the_accelerate_configs_are_understood(name):
    from accelerate.commands.config.config_args import load_config_from_file

    file = RECIPES.parent / "accelerate" / f"{name}.yaml"
    config = load_config_from_file(str(file))
    assert config.num_processes == 8 and config.mixed_precision == "bf16"
