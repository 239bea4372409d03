"""Regenerated responses as training sequences: token ids, and a mask over exactly what the target generated."""

import glob
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import torch
from datasets import Dataset

from .anchors import draw_anchors
from .store import SCHEMA, opened


def response_files(path: str | Path) -> list[Path]:
    """The parquet files that `path` stands for: a file, a folder of them, or a pattern such as `out-*.parquet`."""
    place = Path(path)
    if place.is_dir():
        return sorted(place.glob("*.parquet"))
    return sorted(map(Path, glob.glob(str(path)))) or [place]


def load_responses(path: str | Path) -> Dataset:
    """
    Rows that `dflare data` wrote (a parquet file, a folder of them, or a pattern), one response of the target each.

    Raises:
        ValueError: if nothing lies there, a file lacks a column, or there is no response token at all.
    """
    files = response_files(path)
    for file in files:
        schema = opened(pq.read_schema, file, "data: ")
        if missing := set(SCHEMA.names) - set(schema.names):
            raise ValueError(f"data: {file} lacks the columns {sorted(missing)}; it has {schema.names}")
    if not sum(pq.read_metadata(file).num_rows for file in files):
        raise ValueError(f"data: {path} holds no rows")
    rows = Dataset.from_parquet(list(map(str, files)), keep_in_memory=True)
    if not any(len(ids) for ids in rows["response_ids"]):
        raise ValueError(f"data: {path} holds no response token, so there is nothing to learn from")
    return rows


def to_sequences(rows: Dataset, max_length: int) -> Dataset:
    """
    Prompt and response joined and cut to `max_length` tokens; `loss_mask` is 1 on the response, `greedy` says whether the
    target decoded it greedily. Rows with fewer than two response tokens left hold no anchor and are dropped.
    """

    def join(row: dict) -> dict:
        prompt, response = row["prompt_ids"], row["response_ids"]
        mask = [0] * len(prompt) + [1] * len(response)
        return {
            "length": len(mask[:max_length]),
            "input_ids": (prompt + response)[:max_length],
            "loss_mask": mask[:max_length],
            "greedy": row["temperature"] == 0.0,
        }

    joined = rows.map(join, remove_columns=rows.column_names, keep_in_memory=True, desc="Joining prompts and responses")
    return joined.filter(lambda row: sum(row["loss_mask"]) >= 2, keep_in_memory=True, desc="Dropping empty responses")


def response_token_ids(rows: Dataset, limit: int | None = None) -> torch.Tensor:
    """The distinct token ids of all responses, or the `limit` most frequent of them, ascending."""
    counts = Counter(token for ids in rows["response_ids"] for token in ids)
    return torch.tensor(sorted(token for token, _ in counts.most_common(limit)))


def pad_sequences(rows: Sequence[dict]) -> dict[str, torch.Tensor]:
    """A batch of sequences, padded at their ends: the collator of training, which draws anchors later, by the step."""
    return {
        "input_ids": _pad([torch.as_tensor(row["input_ids"]) for row in rows]),
        "loss_mask": _pad([torch.as_tensor(row["loss_mask"]) for row in rows]),
        "greedy": torch.tensor([bool(row["greedy"]) for row in rows]),
        "length": torch.tensor([len(row["input_ids"]) for row in rows]),
    }


def pad_with_every_anchor(rows: Sequence[dict]) -> dict[str, torch.Tensor]:
    """As `pad_sequences`, with every position that can be one an anchor: the collator of evaluation."""
    batch = pad_sequences(rows)
    anchors, keep = draw_anchors(batch["loss_mask"])
    return {**batch, "anchors": anchors, "keep": keep}


def _pad(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
