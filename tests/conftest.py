"""One thread: the models here are tiny, and threads that wait for each other cost more than they bring."""

import json

import pytest
import torch

import dflare.batches_dflare as batches
from helpers import WORDS, tiny_target, word_tokenizer

torch.set_num_threads(1)


@pytest.fixture
def oracle(monkeypatch):
    """Makes batches draft a known truth, row r wrong at position 1 + (r + round) mod (k + 1), where k is none."""

    def install(truth: torch.Tensor) -> None:
        class Oracle(batches.BatchDecoder):
            def _draft(self, anchors, limit):
                _, logits = super()._draft(anchors, limit)
                drafts = torch.zeros(logits.shape[:2], dtype=torch.long)
                for i, row in enumerate(self.rows):
                    length, count = self.texts[row].shape[1], logits.shape[1]
                    known = truth[row, length : length + count]
                    drafts[i, : len(known)] = known
                    wrong = (row + len(self.records[row].rounds)) % (count + 1)
                    if wrong < count:
                        drafts[i, wrong] = (drafts[i, wrong] + 1) % logits.shape[2]
                return drafts, logits

        monkeypatch.setattr(batches, "BatchDecoder", Oracle)

    return install


@pytest.fixture(scope="session")
def tokenizer():
    """Words for tokens, with a chat template."""
    return word_tokenizer()


@pytest.fixture(scope="module")
def talker():
    """A tiny target in fp32 that knows its end token."""
    target = tiny_target(dtype=torch.float32)
    target.generation_config.eos_token_id = 2
    return target


@pytest.fixture
def files(tmp_path, talker, tokenizer):
    """A folder with a target in `target` and 40 prompts in `prompts.jsonl`."""
    talker.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    rows = [{"id": f"p{i}", "turns": [" ".join(WORDS[(i + j) % 60] for j in range(3 + i % 5))]} for i in range(40)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return tmp_path
