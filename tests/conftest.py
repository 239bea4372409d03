"""One thread: the models here are tiny, and threads that wait for each other cost more than they bring."""

import pytest
import torch

import dflare.batches_dflare as batches

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
