"""What the commands say to a user's mistake: one line that names the field, before work is lost."""

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import Qwen3Config

from dflare.commands import progress
from dflare.commands.main import main
from dflare.training.store import SCHEMA
from helpers import tiny_drafter, tiny_target


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target's folder, a drafter's, and a run whose drafter lies inside."""
    root = tmp_path_factory.mktemp("pair")
    target = tiny_target()
    target.save_pretrained(root / "target")
    for place in ("own", "run/drafter"):
        tiny_drafter(target).save_pretrained(root / place)
    return root


def complaint(capsys, *words: str) -> str:
    """The one line of a command that ends with status 2."""
    assert main([str(word) for word in words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train", "--data, --output_dir: missing"),
        ("train --data x --output_dir y --drafter.depth", "missing its value"),
        ("train --data x --output_dir y --trainr.lr 1", "unknown argument '--trainr.lr'"),
        ("train --data nowhere.parquet --output_dir y", "no file nowhere.parquet"),
        ("train --data x --output_dir y --trainer.learning_rat 1", "learning_rat"),
        ("generate --max_new_token 3", "unknown argument '--max_new_token'; did you mean --max_new_tokens?"),
        ("generate --colour red", "unknown argument '--colour'; --help lists the known ones"),
        ("generate --config nowhere.yaml", "no file nowhere.yaml"),
        ("generate --repeats 0", "repeats is 0; the least is 1"),
        ("generate --temperature -1", "temperature is -1.0; the least is 0"),
        ("generate --drafter ./nowhere", "drafter: there is no folder ./nowhere"),
        ("check --target /no/where", "target: there is no folder /no/where"),
        ("check --drafter {}/target", "holds a model of type 'llama', which is no drafter"),
        ("check --drafter {0}/own --target {0}/own", "holds a model of type 'dflare', which is no target"),
        ("generate --drafter {}/run", "did you mean {}/run/drafter?"),
        ("data --output {}/x.parquet --prompts {}/nothing", "prompts: {}/nothing is neither"),
        ("train --data {0}/none.parquet --output_dir {0}/t", "data: there is no file {0}/none.parquet"),
        ("train --data x --output_dir y --trainer.max_steps ten", "trainer.max_steps is 'ten', but a number"),
        ("train --data x --output_dir y --trainer.maxsteps 3", "unknown key 'maxsteps'; did you mean 'max_steps'?"),
        ("train --data x --output_dir y --draft_vocab_size 0", "draft_vocab_size is 0; the least is 1"),
    ],
)
def test_mistakes(folders, capsys, words, expected):
    assert expected.format(folders) in complaint(capsys, *words.format(folders, folders).split())


def test_a_benchmarks_folder_that_is_missing_is_called_so(tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"id": "a", "turns": ["Name a fruit."]}\n')
    words = ["data", "--prompts", tmp_path / "p.jsonl", "--output", tmp_path / "x.parquet"]
    assert "benchmarks: nothing is neither" in complaint(capsys, *words, "--benchmarks", "nothing")
    assert "there is no file gone.parquet" in complaint(capsys, *words, "--reuse", "gone.parquet")
    assert "no prompt is left to answer" in complaint(capsys, *words, "--limit", "0")


def test_data_without_rows_or_of_another_kind(tmp_path, capsys):
    empty, text = tmp_path / "empty.parquet", tmp_path / "text.parquet"
    pq.write_table(pa.Table.from_pylist([], schema=SCHEMA), empty)
    text.write_text("not parquet")
    for file in (empty, text):
        line = complaint(capsys, "train", "--data", file, "--output_dir", tmp_path / "run")
        assert "data: " in line and file.name in line


def test_the_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("dflare 0.")


def test_a_dry_run_says_what_training_takes_and_loads_nothing(tmp_path, capsys):
    sizes = dict(hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    Qwen3Config(**sizes, intermediate_size=12288, vocab_size=151_936).save_pretrained(tmp_path)
    words = ["train", "--config", "qwen3-8b", "--target", tmp_path, "--dry_run"]
    assert main([str(word) for word in words]) == 0
    said, warned = capsys.readouterr()
    assert "unused" not in warned  # no mask token is asked for
    assert "target: 8,190,735,360" in said and "steps: 225,000 of 64 sequences" in said
    hours = int(re.search(r"about ([\d,]+) device-hours", said)[1].replace(",", ""))
    assert 5120 / 2 < hours < 5120 * 2  # what the paper's own run took
    words += ["--features", "x", "--draft_vocab_size", "32000", "--trainer.gradient_checkpointing", "true"]
    assert main([str(word) for word in words]) == 0
    pattern = r"target ([\d.]+), .*blocks ([\d.]+), logits ([\d.]+)"
    less, more = (list(map(float, re.search(pattern, text).groups())) for text in (capsys.readouterr().out, said))
    assert all(a < b for a, b in zip(less, more, strict=True))


def test_a_log_is_told_of_progress_meanwhile(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    with progress.TokenProgress() as bar:
        task = bar.add_task("Answering", total=4, tokens=0)
        for count in (1, 2):
            bar.update(task, advance=1, tokens=10 * count)
        lines = capsys.readouterr().out.strip().splitlines()
    assert [re.search(r"\d/4", line)[0] for line in lines] == ["1/4", "2/4"]
    assert all("tokens/s" in line for line in lines)
