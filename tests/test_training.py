"""Responses to a trained drafter, on a tiny pair."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import AutoModel, EarlyStoppingCallback, TrainerCallback

import zoo
from dflare.commands.main import main
from dflare.commands.train import check_rows, checkpoint_to_resume
from dflare.configuration.arguments import TrainArguments
from dflare.training.data import load_responses, pad_with_every_anchor, response_token_ids, to_sequences
from dflare.training.store import ResponseStore, read_rows
from dflare.training.trainer import DFlareTrainer, DFlareTrainingArguments, sequence_statistics
from helpers import greedy, response_rows, tiny_drafter, tiny_target


@pytest.fixture(scope="module")
def target(talker):
    """The target that the responses are of."""
    return talker


def make_trainer(tmp_path, target, drafter, rows, **settings):
    data = to_sequences(Dataset.from_list(rows), max_length=400)
    options = dict(
        output_dir=str(tmp_path / "run"), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        per_device_train_batch_size=4, learning_rate=3e-3, num_anchors=16, max_steps=30, logging_steps=10,
    ) | settings  # fmt: skip
    return DFlareTrainer(drafter, target, DFlareTrainingArguments(**options), train_dataset=data, eval_dataset=data)


def test_training_lowers_the_loss_and_never_touches_the_target(tmp_path, target):
    rows, drafter = response_rows(target), tiny_drafter(target)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    trainer = make_trainer(tmp_path, target, drafter, rows, fusion_lr_scale=10.0)
    start = trainer.evaluate()
    trainer.train()
    end = trainer.evaluate()
    assert end["eval_loss"] < 0.8 * start["eval_loss"]
    assert end["eval_acceptance_length"] > start["eval_acceptance_length"] >= 1.0
    assert {f"eval_accuracy_{k}" for k in (1, 2, 3)} <= set(end)
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())


@pytest.mark.parametrize("draft_vocabulary", [None, range(0, 64, 2)])
def test_validation_foretells_generation(tmp_path, target, draft_vocabulary):
    """The acceptance length that evaluation reports is the one that generate() has on the same prompts."""
    rows, drafter = response_rows(target), tiny_drafter(target)
    drafter.set_draft_vocabulary(draft_vocabulary)
    trainer = make_trainer(tmp_path, target, drafter, rows)
    trainer.train()
    foretold = trainer.evaluate()["eval_acceptance_length"]
    drafter.eval()
    lengths = []
    for row in rows:
        with drafter.record_drafts() as records:
            greedy(
                target, torch.tensor([row["prompt_ids"]]), max_new_tokens=40, eos_token_id=None, assistant_model=drafter
            )
        lengths += records[0].acceptance_lengths
    assert sum(lengths) / len(lengths) == pytest.approx(foretold, abs=0.02)


def test_the_walk_through_blocks():
    correct = torch.tensor([[1, 0, 1], [1, 1, 1], [1, 1, 0], [0, 0, 0], [0, 1, 1], [1, 1, 1]]).bool()
    keep = torch.ones(6, dtype=torch.bool)
    losses, valid = torch.full(correct.shape, 0.5), torch.ones_like(correct)
    known = torch.arange(3).expand(correct.shape) < 2
    walked = sequence_statistics(losses, known, correct, valid, keep, torch.tensor(True)).tolist()
    # Anchor 0 accepts one draft and moves on to 2, that accepts two and moves on to 5, whose round the end cuts.
    assert walked == [2, 5, 9.0, 12, 4, 4, 4, 6, 6, 6]
    sampled = sequence_statistics(losses, known, correct, valid, keep, torch.tensor(False)).tolist()
    assert sampled[:2] == [0, 0] and sampled[2:] == walked[2:]


@pytest.mark.parametrize("concatenate", [True, False])
def test_evaluation_does_not_depend_on_its_batches(tmp_path, target, concatenate):
    rows = response_rows(target, count=10)
    for place, row in enumerate(rows):
        row["response_ids"] = row["response_ids"][: 1 + 4 * place]
    drafter, found = tiny_drafter(target), []
    for batch in (1, 3, 10):
        trainer = make_trainer(
            tmp_path, target, drafter, rows, per_device_eval_batch_size=batch, eval_do_concat_batches=concatenate
        )
        metrics = trainer.evaluate()
        found.append({key: value for key, value in metrics.items() if key.startswith(("eval_loss", "eval_acc"))})
    assert found[0] == pytest.approx(found[1], rel=1e-5) and found[0] == pytest.approx(found[2], rel=1e-5)
    predicted = trainer.predict(trainer.eval_dataset)
    assert predicted.metrics["test_loss"] == pytest.approx(metrics["eval_loss"])


def test_what_cannot_be_trained_is_refused_at_once(tmp_path, target):
    rows = response_rows(target, count=4)
    with pytest.raises(ValueError, match="belongs to another target: number of target layers is 7"):
        make_trainer(tmp_path, target, tiny_drafter(tiny_target(num_hidden_layers=7)), rows)
    with pytest.raises(ValueError, match="neftune_noise_alpha is 1.0"):
        make_trainer(tmp_path, target, tiny_drafter(target), rows, neftune_noise_alpha=1.0)
    refused = {
        "include_for_metrics": ["inputs"],
        "batch_eval_metrics": True,
        "label_smoothing_factor": 0.1,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "num_anchors": 2.5,
        "gradient_accumulation_steps": 0,
    }
    for name, value in refused.items():
        with pytest.raises(ValueError, match=f"{name} (is|has)"):
            make_trainer(tmp_path, target, tiny_drafter(target), rows, **{name: value})
    sampled = to_sequences(Dataset.from_list([{**row, "temperature": 1.0} for row in rows]), max_length=64)
    settings = DFlareTrainingArguments(str(tmp_path), metric_for_best_model="eval_acceptance_length", use_cpu=True)
    with pytest.raises(ValueError, match="none of the 4 validation rows is greedy"):
        check_rows(64, settings, sampled, sampled)
    linear = zoo.build("Qwen3-Next")
    with pytest.raises(ValueError, match="linear_attention, whose state cannot be rolled back"):
        make_trainer(tmp_path, linear, tiny_drafter(linear), rows)
    scaled = zoo.build("Granite").float()
    with pytest.raises(ValueError, match="distillation is 'kl', but GraniteForCausalLM scales or caps"):
        make_trainer(tmp_path, scaled, tiny_drafter(scaled), rows, distillation="kl")


@pytest.mark.parametrize("name", [*zoo.TARGETS])
def test_every_kind_of_target_can_be_trained_for(tmp_path, target, name):
    """Also packed, which gives the same loss, where the target keeps sequences apart."""
    other = zoo.build(name).float()
    rows = response_rows(target, count=4, length=12)
    losses = []
    for packing in (False, True):
        drafter = tiny_drafter(other.float(), **zoo.ROPE_IN_FULL)
        try:
            trainer = make_trainer(tmp_path, other, drafter, rows, max_steps=1, logging_steps=1, packing=packing)
        except ValueError as error:
            assert packing and "packing is True, but" in str(error)
            continue
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] == pytest.approx(losses[-1], rel=1e-4)


def test_accumulation_equals_one_big_batch(tmp_path, target):
    rows = response_rows(target, count=8)
    weights = []
    for batch, steps in ((8, 1), (2, 4)):
        drafter = tiny_drafter(target)
        trainer = make_trainer(
            tmp_path, target, drafter, rows, max_steps=1, per_device_train_batch_size=batch, num_anchors=1000,
            gradient_accumulation_steps=steps, warmup_steps=0, optim="sgd", learning_rate=1.0, max_grad_norm=0.0,
        )  # fmt: skip
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in drafter.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_target_of_another_dtype(tmp_path, target, dtype):
    drafter = tiny_drafter(target)
    other = tiny_target(dtype=dtype)
    trainer = make_trainer(tmp_path, other, drafter, response_rows(target, count=4), max_steps=1)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0


def test_batches_without_any_anchor(tmp_path, target):
    rows = [{"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1], "greedy": True, "length": 3}] * 4
    trainer = make_trainer(tmp_path, target, tiny_drafter(target), response_rows(target, count=4), max_steps=1)
    trainer.train_dataset = trainer.eval_dataset = Dataset.from_list(rows)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == 0.0


def test_kept_states_are_the_same_states(tmp_path, target):
    rows, weights = response_rows(target, count=8), []
    for keep in (False, True):
        drafter = tiny_drafter(target)
        trainer = make_trainer(tmp_path, target, drafter, rows, max_steps=6, keep_states=keep)
        trainer.train()
        assert len(trainer.kept_states) == (8 if keep else 0)
        weights.append(torch.cat([p.detach().flatten() for p in drafter.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep", [False, True])
def test_packed_batches_train_as_padded_ones(tmp_path, target, keep):
    rows, weights = response_rows(target, count=12), []
    for place, row in enumerate(rows):
        row["response_ids"] = row["response_ids"][: 6 + 3 * place]
    for packing in (False, True):
        drafter = tiny_drafter(target)
        make_trainer(
            tmp_path, target, drafter, rows, max_steps=6, packing=packing, keep_states=keep, num_anchors=1000
        ).train()
        weights.append(torch.cat([p.detach().flatten() for p in drafter.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-3, atol=1e-4)


def test_a_target_that_mixes_packed_sequences_is_refused(tmp_path, target, monkeypatch):
    own = target.model.forward
    monkeypatch.setattr(target.model, "forward", lambda *args, position_ids=None, **kwargs: own(*args, **kwargs))
    with pytest.raises(ValueError, match="packing is True, but in a packed row"):
        make_trainer(tmp_path, target, tiny_drafter(target), response_rows(target, count=4), packing=True)


@pytest.mark.parametrize(
    "settings",
    [
        dict(weighting="expected_length"), dict(weighting="until_failure"), dict(distillation="kl"),
        dict(distillation="total_variation"), dict(gradient_checkpointing=True), dict(gamma=2.0, gamma_end=6.0),
        dict(packing=True, distillation="kl", keep_states=True), dict(anchor_budget=40), dict(muon=True),
    ],
    ids=lambda settings: " ".join(settings),
)  # fmt: skip
def test_every_objective_lowers_the_loss(tmp_path, target, settings):
    trainer = make_trainer(tmp_path, target, tiny_drafter(target), response_rows(target, count=8), **settings)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before - 0.1
    gammas = [entry["gamma"] for entry in trainer.state.log_history if "gamma" in entry]
    assert len(gammas) == 3 and gammas[0] < gammas[1] < gammas[2] < 20  # by epochs, or evenly to its end


def test_muon_learns_matrices_and_adamw_the_rest(tmp_path, target):
    drafter = tiny_drafter(target)
    trainer = make_trainer(
        tmp_path, target, drafter, response_rows(target, count=4), max_steps=1, muon=True, fusion_lr_scale=10.0,
        warmup_steps=0, learning_rate=1e-2, max_grad_norm=0.0,
    )  # fmt: skip
    before = {name: tensor.clone() for name, tensor in drafter.named_parameters()}
    trainer.train()
    moved = {name: tensor - before[name] for name, tensor in drafter.named_parameters()}
    sizes = []
    for name, step in moved.items():
        if name == "layer_fusion_weights" or step.ndim < 2:  # AdamW's first step is the rate, whatever the gradient
            rate = 0.1 if name == "layer_fusion_weights" else 0.01
            assert step.detach().abs().max() == pytest.approx(rate, rel=1e-2)
        else:
            sizes.append(float(step.detach().square().mean().sqrt()) / 0.01)
    assert 0.1 < max(sizes) < 0.3  # Muon's steps are as large as AdamW's usually are, a fifth of the rate
    rates = {group["lr"] for group in trainer.optimizer.param_groups}
    assert rates == {0.0}  # both parts follow the schedule to its end


def test_checkpointing_activations_changes_nothing(tmp_path, target):
    weights = []
    for on in (False, True):
        drafter = tiny_drafter(target)
        make_trainer(
            tmp_path, target, drafter, response_rows(target, count=8), max_steps=4, gradient_checkpointing=on
        ).train()
        weights.append(torch.cat([p.detach().flatten() for p in drafter.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-5)


def test_callbacks_metrics_of_your_own_and_the_best_checkpoint(tmp_path, target):
    """The best by acceptance length is kept, and training ends early where it no longer grows."""
    seen = []

    class Watch(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            seen.append((metrics["eval_acceptance_length"], metrics["eval_rounds"]))

    data = to_sequences(Dataset.from_list(response_rows(target, count=8)), max_length=400)
    settings = DFlareTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=12, learning_rate=0.0,
        per_device_train_batch_size=4, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        load_best_model_at_end=True, metric_for_best_model="acceptance_length", save_total_limit=1,
    )  # fmt: skip
    trainer = DFlareTrainer(
        tiny_drafter(target), target, settings, train_dataset=data, eval_dataset=data,
        compute_metrics=lambda prediction: {"rounds": float(prediction.predictions[:, 0].sum())},
        callbacks=[Watch(), EarlyStoppingCallback(early_stopping_patience=2)],
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 6 and len(seen) == 3 and len(set(seen)) == 1 and seen[0][1] > 0
    assert trainer.state.best_metric == seen[0][0] and trainer.state.best_model_checkpoint.endswith("checkpoint-2")


def test_pushes_hold_a_drafter_that_loads(tmp_path, target, monkeypatch):
    """During training and at its end, with a stand-in for the Hub's interface that keeps what it is given."""
    pushed = []

    class Hub:
        def create_repo(self, name, **options):
            return SimpleNamespace(repo_id=f"me/{name}")

        def upload_folder(self, *, folder_path, ignore_patterns=(), **options):
            copy = tmp_path / f"pushed-{len(pushed)}"
            shutil.copytree(folder_path, copy, ignore=shutil.ignore_patterns(*ignore_patterns))
            pushed.append(copy)
            return SimpleNamespace(is_done=lambda: True, done=lambda: True)

    monkeypatch.setattr("transformers.trainer.hf_api", Hub)
    drafter = tiny_drafter(target)
    rows = response_rows(target, count=4)
    trainer = make_trainer(
        tmp_path, target, drafter, rows, max_steps=2, save_strategy="steps", save_steps=1, push_to_hub=True
    )
    trainer.train()
    trainer.push_to_hub()
    assert len(pushed) >= 3
    for folder in pushed:
        assert {file.name for file in folder.glob("*.py")} >= {"modeling_dflare.py", "hook_dflare.py"}
        assert not list(folder.glob("checkpoint-*"))
    last = AutoModel.from_pretrained(pushed[-1], dtype=torch.float32)
    assert torch.equal(last.layer_fusion_weights, drafter.layer_fusion_weights)


def test_a_loss_that_is_not_finite_stops_training(tmp_path, target):
    drafter = tiny_drafter(target)
    with torch.no_grad():
        drafter.norm.weight[0] = float("nan")
    with pytest.raises(FloatingPointError, match="the loss is nan at step 0"):
        make_trainer(tmp_path, target, drafter, response_rows(target, count=4)).train()


def test_collator_pads_without_inventing_anchors():
    rows = [
        {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 1, 1], "greedy": True},
        {"input_ids": [5, 6], "loss_mask": [0, 1], "greedy": False},
    ]
    batch = pad_with_every_anchor(rows)
    assert batch["keep"].tolist() == [[True, True], [False, False]] and batch["anchors"][0].tolist() == [2, 3]
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9], [5, 6, 0, 0, 0]] and batch["greedy"].tolist() == [
        True,
        False,
    ]


def test_data_and_train_commands_make_a_drafter_that_loads(files, capsys):
    data, run = files / "out.parquet", files / "run"
    recipe = files / "recipe.yaml"
    recipe.write_text(
        f"data: {{target: {files}/target, prompts: ['{files}/prompts.jsonl'], output: {data}, dtype: float32}}\n"
        f"train:\n  target: {files}/target\n  data: {data}\n  output_dir: {run}\n  validation_size: 8\n"
        "  draft_vocab_size: 40\n  target_dtype: float32\n"
        "  drafter: {num_hidden_layers: 2, block_size: 4, num_taps: 3}\n"
        "  trainer: {use_cpu: true, report_to: none, max_steps: 6, save_steps: 3, per_device_train_batch_size: 4}\n"
    )
    assert main(["data", "--config", str(recipe), "--max_new_tokens", "24", "--batch_size", "8"]) == 0
    assert main(["train", "--config", str(recipe)]) == 0
    report = json.loads((run / "training.json").read_text())
    assert report["evaluation"]["eval_acceptance_length"] >= 1.0
    drafter = AutoModel.from_pretrained(run / "drafter")
    assert drafter.dtype == torch.bfloat16 and len(drafter.draft_token_ids) == 40
    assert os.path.exists(run / "drafter" / "hook_dflare.py")
    # Another drafter does not go on from this one's checkpoints, and a damaged checkpoint is passed over.
    assert main(["train", "--config", str(recipe), "--drafter.block_size", "5"]) == 2
    assert "block_size is 5, but the checkpoints" in capsys.readouterr().err
    newest = run / "checkpoint-6" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:200])
    assert main(["train", "--config", str(recipe)]) == 0
    assert "checkpoint-6 is not whole" in capsys.readouterr().out
    first = AutoModel.from_pretrained(run / "drafter").norm.weight.clone()
    # The same command again goes on from the newest checkpoint: nothing is left to do, so the drafter is the same.
    assert main(["train", "--config", str(recipe)]) == 0
    assert torch.equal(AutoModel.from_pretrained(run / "drafter").norm.weight, first)


def test_responses_of_another_target_are_said(files, capsys, caplog):
    """A name in the file that differs is warned of, for a folder may be the same; ids that the target lacks end the run."""
    row = {"id": "a", "prompt_ids": [4, 5], "response_ids": [6, 7, 8, 2], "temperature": 0.0, "finish_reason": "stop"}
    words = ["train", "--target", f"{files}/target", "--output_dir", f"{files}/other", "--trainer.use_cpu", "true"]
    for name, change in (("own", {}), ("foreign", {"response_ids": [6, 8000]})):
        store = ResponseStore(files / f"{name}.parquet", {"target": "Qwen/Qwen3-8B"})
        store.add([{**row, **change}])
        store.finish()
        assert main([*words, "--data", f"{files}/{name}.parquet"]) == 2
    assert "response_ids holds the id 8000, but the target's vocabulary has" in capsys.readouterr().err
    assert "own.parquet says that its responses are those of 'Qwen/Qwen3-8B'" in caplog.text


def test_only_the_writing_rank_leaves_files(tmp_path, target):
    (tmp_path / "data.parquet").write_bytes(b"anything")
    args = TrainArguments(data=str(tmp_path / "data.parquet"), output_dir=str(tmp_path / "run"))
    config = tiny_drafter(target).config
    assert checkpoint_to_resume(args, config, writes=False) is None and not list((tmp_path / "run").iterdir())
    assert checkpoint_to_resume(args, config) is None and [f.name for f in (tmp_path / "run").iterdir()] == ["run.json"]


def test_training_goes_on_from_a_trained_drafter(files, capsys):
    data, first, second = files / "out.parquet", files / "first", files / "second"
    recipe = files / "recipe.yaml"
    recipe.write_text(
        f"data: {{target: {files}/target, prompts: ['{files}/prompts.jsonl'], output: {data}, dtype: float32}}\n"
        f"train:\n  target: {files}/target\n  data: {data}\n  target_dtype: float32\n  validation_size: 8\n"
        "  drafter: {num_hidden_layers: 1, block_size: 4, num_taps: 3}\n"
        "  trainer: {use_cpu: true, report_to: none, max_steps: 2, per_device_train_batch_size: 4}\n"
    )
    assert main(["data", "--config", str(recipe), "--max_new_tokens", "24"]) == 0
    assert main(["train", "--config", str(recipe), "--output_dir", str(first), "--draft_vocab_size", "10"]) == 0
    held_back = {row["id"] for row in read_rows(first / "validation.parquet")}
    assert len(held_back) == 8
    # On from there with a learning rate of zero and the same rows held back: the same drafter, the same figures.
    onward = ["train", "--config", str(recipe), "--output_dir", str(second), "--start_from", str(first / "drafter")]
    onward += ["--validation_data", str(first / "validation.parquet"), "--trainer.learning_rate", "0.0"]
    assert main(onward) == 0
    commonest = response_token_ids(load_responses(data), 10).tolist()
    assert AutoModel.from_pretrained(second / "drafter").draft_token_ids.tolist() == commonest and len(commonest) == 10
    before, after = (AutoModel.from_pretrained(run / "drafter").state_dict() for run in (first, second))
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    evaluations = [json.loads((run / "training.json").read_text())["evaluation"] for run in (first, second)]
    assert evaluations[0]["eval_loss"] == pytest.approx(evaluations[1]["eval_loss"], rel=1e-2)  # bf16 weights
    assert {row["id"] for row in read_rows(second / "validation.parquet")} == held_back
    # What does not fit the drafter, its target or the data is said.
    fresh = ["train", "--config", str(recipe), "--output_dir", str(files / "fresh")]
    for flags, message in (
        (["--drafter.fusion_softmax", "False"], "fusion_softmax is 'False'; true or false is expected"),
        (["--drafter.rms_norm_eps", "tiny"], "rms_norm_eps"),
    ):
        assert main([*fresh, *flags]) == 2
        assert message in capsys.readouterr().err
    assert main([*onward, "--drafter.block_size", "5"]) == 2
    assert "drafter.block_size is 5, but 4 in" in capsys.readouterr().err
    assert main([*onward, "--output_dir", str(files / "third"), "--validation_data", str(data)]) == 2
    assert "which holds every row" in capsys.readouterr().err


class StopAt(TrainerCallback):
    """Ends a run as a signal would, after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("muon", [False, True])
@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
@pytest.mark.parametrize("stopped_at", [3, 7])
def test_a_run_that_goes_on_ends_with_the_same_weights(tmp_path, target, strategy, stopped_at, muon):
    rows, weights = response_rows(target, count=20, length=20), []
    options = dict(max_steps=9, save_strategy="steps", save_steps=2, num_anchors=4, gamma_step=1.0,
                   train_sampling_strategy=strategy, per_device_train_batch_size=2,
                   gradient_accumulation_steps=2, muon=muon, fusion_lr_scale=10.0)  # fmt: skip
    for name, stops in (("whole", []), ("parts", [stopped_at])):
        for stop in (*stops, None):
            drafter = tiny_drafter(target)
            trainer = make_trainer(tmp_path / name, target, drafter, rows, **options)
            if stop is None:
                trainer.train(resume_from_checkpoint=bool(stops))
                continue
            trainer.add_callback(StopAt(stop))
            with pytest.raises(KeyboardInterrupt):
                trainer.train()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in drafter.parameters()]))
    assert torch.equal(*weights)


def test_lora_on_a_published_drafter(tmp_path, target):
    """Adapted to what its target says now, merged, and saved as a drop-in."""
    from peft import LoraConfig, get_peft_model

    rows, drafter = response_rows(target), tiny_drafter(target)
    drafter.set_draft_vocabulary(range(0, 64, 2))
    frozen = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    adapted = get_peft_model(drafter, LoraConfig(r=4, target_modules=["q_proj", "v_proj_target", "down_proj"]))
    trainer = make_trainer(tmp_path, target, adapted, rows, learning_rate=3e-2, save_strategy="steps", save_steps=20)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before - 0.1
    merged = adapted.merge_and_unload()
    changed = {name for name, tensor in merged.state_dict().items() if not torch.equal(tensor, frozen[name])}
    assert changed and all(name.split(".")[-2] in ("q_proj", "v_proj_target", "down_proj") for name in changed)
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModel.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    prompt = torch.tensor([rows[0]["prompt_ids"]])
    assert torch.equal(
        greedy(target, prompt, max_new_tokens=20, assistant_model=again), greedy(target, prompt, max_new_tokens=20)
    )
