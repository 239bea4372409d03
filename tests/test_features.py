"""Features on disk give what the target's own passes give; and what training may start from, and pack."""

import json
import os
import shutil

import pytest
import torch
from datasets import Dataset

from dflare.commands.main import main
from dflare.training.data import to_sequences
from dflare.training.features import (
    FeatureStore,
    features_made_with,
    fingerprint,
    sequence_key,
    target_states,
    write_features,
)
from helpers import response_rows, tiny_drafter, tiny_target


@pytest.fixture(scope="module")
def target(talker):
    """The target that the responses are of, in fp32."""
    return talker


@pytest.fixture(scope="module")
def sequences(target):
    """Sequences of the tiny target, of many lengths."""
    rows = response_rows(target, count=12)
    for place, row in enumerate(rows):
        row["response_ids"] = row["response_ids"][: 4 + 3 * place]
    return to_sequences(Dataset.from_list(rows), max_length=400)


def store(folder, target, sequences):
    """Writes features and opens them."""
    config = tiny_drafter(target).config
    made_with = features_made_with(target, config)
    count = write_features(
        folder, sequences, made_with, lambda ids: target_states(target, config, ids), width=4 * config.hidden_size
    )
    return count, FeatureStore(folder, made_with)


def test_stored_states_are_the_targets(tmp_path, target, sequences, monkeypatch):
    monkeypatch.setattr("dflare.training.features.SHARD_TOKENS", 100)
    monkeypatch.setattr("dflare.training.features.BATCH_TOKENS", 60)
    count, features = store(tmp_path, target, sequences)
    assert count == len(features) == 12 and len(list(tmp_path.glob("*.safetensors"))) > 2
    for row in sequences:
        ids = torch.tensor(row["input_ids"])
        alone = torch.stack(target_states(target, tiny_drafter(target).config, ids[None]), dim=2)[0]
        torch.testing.assert_close(features[sequence_key(ids)].float(), alone, rtol=0.01, atol=0.001)  # in bf16
    # Again: nothing is missing. A shard lost, or more data: only that is made.
    assert store(tmp_path, target, sequences)[0] == 0
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    again, features = store(tmp_path, target, sequences)
    assert 0 < again < 12 and len(features) == 12 and not list(tmp_path.glob("*.tmp"))


def test_features_that_do_not_fit_are_refused(tmp_path, target, sequences):
    _, features = store(tmp_path / "f", target, sequences.select(range(6)))
    features.check(sequences.select(range(6)))
    with pytest.raises(ValueError, match="lacks the states of 6 of 12 sequences"):
        features.check(sequences)
    made_with = features_made_with(target, tiny_drafter(target, target_layer_ids=[1, 2, 4]).config)
    with pytest.raises(ValueError, match=r"target_layer_ids is \[1, 2, 4\] here, but .* was made with \[1, 2, 3\]"):
        FeatureStore(tmp_path / "f", made_with)
    with pytest.raises(ValueError, match="holds no shard"):
        FeatureStore(tmp_path / "none", made_with)
    with pytest.raises(ValueError, match="fingerprint is .* here, but .* was made with"):
        store(tmp_path / "f", tiny_target(dtype=torch.float32, seed=1), sequences)
    tiny_drafter(target).save_pretrained(tmp_path / "f" / "checkpoint-1")
    with pytest.raises(ValueError, match="model.safetensors is no shard of features; .* must hold nothing else"):
        store(tmp_path / "f", target, sequences)
    shutil.rmtree(tmp_path / "f" / "checkpoint-1")
    shard = next((tmp_path / "f").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match="safetensors is damaged .* delete it, and it is made again"):
        store(tmp_path / "f", target, sequences)
    with pytest.raises(ValueError, match="features: .* cannot be made"):
        store(shard, target, sequences)
    with pytest.raises(ValueError, match="GB are needed, but"):
        write_features(tmp_path / "g", sequences, made_with, lambda ids: [], width=10**15)


def test_two_runs_may_fill_one_folder(tmp_path, target, sequences, monkeypatch):
    monkeypatch.setattr("dflare.training.features.stored_features", lambda folder, made_with: {})  # both see it empty
    tmp_path.joinpath(".tmp123").write_bytes(b"of a killed run")
    store(tmp_path, target, sequences.select(range(6)))
    _, features = store(tmp_path, target, sequences.select(range(6, 12)))
    features.check(sequences)
    monkeypatch.undo()
    os.utime(tmp_path / ".tmp123", (0, 0))
    assert store(tmp_path, target, sequences)[0] == 0 and not list(tmp_path.glob(".tmp*"))


def test_a_fingerprint_tells_weights_apart_and_nothing_else(target):
    own = fingerprint(target)
    assert own == fingerprint(tiny_target(dtype=torch.bfloat16)) == fingerprint(tiny_target(dtype=torch.float32))
    other = tiny_target(dtype=torch.float32)
    other.model.layers[3].mlp.up_proj.weight.data += 0.1
    assert fingerprint(other) != own


def test_mistakes_are_found_before_prompts_are_answered(files, capsys):
    words = [
        "data",
        "--target",
        f"{files}/target",
        "--prompts",
        f"{files}/prompts.jsonl",
        "--output",
        f"{files}/o.parquet",
    ]
    (files / "afile").write_text("x")
    for flags, message in (
        (["--features", f"{files}/f", "--drafter.num_tapz", "3"], "num_tapz"),
        (["--features", f"{files}/f", "--drafter.target_layer_ids", "[1,99]"], "target_layer_ids is [1, 99]"),
        (["--features", f"{files}/afile"], "afile cannot be made"),
    ):
        assert main([*words, *flags]) == 2
        assert message in capsys.readouterr().err
    assert not (files / "o.parquet").exists()


def test_training_on_features_is_training_online(files, capsys):
    """Both commands, end to end: the same losses, and no pass of the target."""
    recipe, data = files / "recipe.yaml", files / "out.parquet"
    recipe.write_text(
        f"data: {{target: {files}/target, prompts: ['{files}/prompts.jsonl'], output: {data}, dtype: float32,"
        f" max_new_tokens: 24, features: {files}/features, drafter: {{num_taps: 3}}}}\n"
        f"train:\n  target: {files}/target\n  data: {data}\n  validation_size: 8\n  target_dtype: float32\n"
        "  drafter: {num_hidden_layers: 1, block_size: 4, num_taps: 3}\n"
        "  trainer: {use_cpu: true, report_to: none, max_steps: 4, logging_steps: 1, per_device_train_batch_size: 4}\n"
    )
    assert main(["data", "--config", str(recipe)]) == 0
    assert "states of 40 rows added" in capsys.readouterr().out
    alone = ["--output", str(data), "--features", f"{files}/more", "--max_length", "20"]  # of responses that are there
    assert main(["data", "--target", f"{files}/target", "--dtype", "float32", *alone]) == 0
    assert len(list((files / "more").glob("*.safetensors"))) == 1
    losses = []
    for name, extra in (("online", []), ("offline", ["--features", f"{files}/features"])):
        assert main(["train", "--config", str(recipe), "--output_dir", str(files / name), *extra]) == 0
        losses.append([float(line) for line in _losses(files / name)])
    assert losses[0] == pytest.approx(losses[1], rel=2e-3) and len(losses[0]) == 5  # states rounded to bf16
    flex = ["--attention", "flex_attention", "--output_dir", str(files / "flex")]
    assert main(["train", "--config", str(recipe), *flex]) == 2
    assert "attention is flex_attention, whose backward pass" in capsys.readouterr().err
    tracker = ["--trainer.report_to", "neptune", "--output_dir", str(files / "tracker")]
    assert main(["train", "--config", str(recipe), *tracker]) == 2
    assert "trainer.report_to is 'neptune', which is not installed" in capsys.readouterr().err
    wrong = ["--features", f"{files}/features", "--drafter.num_taps", "2", "--output_dir", str(files / "wrong")]
    assert main(["train", "--config", str(recipe), *wrong]) == 2
    assert "target_layer_ids is [1, 3] here, but" in capsys.readouterr().err


def _losses(run):
    log = json.loads((run / "training.json").read_text())["log"]
    return [entry[key] for entry in log for key in ("loss", "eval_loss") if key in entry]
