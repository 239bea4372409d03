"""Regenerated responses as training sequences: token ids, and a mask over exactly what the target generated."""

import glob
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from datasets import Dataset, Features, List, Value

from .anchors import draw_anchors
from .store import SCHEMA, opened

# Columns of training sequences, as small as they can be: there may be billions of tokens.
SEQUENCE = Features(
    {
        "length": Value("int64"),
        "input_ids": List(Value("int32")),
        "loss_mask": List(Value("int8")),
        "greedy": Value("bool"),
    }
)


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

    def join(rows: dict) -> dict:
        joined: dict[str, list] = {name: [] for name in SEQUENCE}
        for prompt, response, temperature in zip(*(rows[name] for name in columns), strict=True):
            response = response[: max(max_length - len(prompt), 0)]
            if len(response) >= 2:
                joined["length"].append(len(prompt) + len(response))
                joined["input_ids"].append(np.concatenate([prompt, response]))
                joined["loss_mask"].append(np.repeat(np.array([0, 1], np.int8), [len(prompt), len(response)]))
                joined["greedy"].append(temperature == 0.0)
        return joined

    columns = ["prompt_ids", "response_ids", "temperature"]
    options: dict = {"batched": True, "keep_in_memory": True, "remove_columns": rows.column_names, "features": SEQUENCE}
    return rows.with_format("numpy").map(join, **options, desc="Joining prompts and responses").with_format(None)


def response_token_ids(rows: Dataset, limit: int | None = None) -> torch.Tensor:
    """The distinct token ids of all responses, or the `limit` most frequent of them, ascending."""
    counts = Counter(token for ids in rows["response_ids"] for token in ids)
    return torch.tensor(sorted(token for token, _ in counts.most_common(limit)))


def pad_sequences(rows: Sequence[dict]) -> dict[str, torch.Tensor]:
    """
    A batch of sequences, a row each, padded at their ends: the collator of training, which draws anchors later, by the
    step. `starts` (b, S) says where each token's sequence begins in its row.
    """
    ids = _pad(_tensors(rows, "input_ids"))
    return {
        "input_ids": ids,
        "loss_mask": _pad(_tensors(rows, "loss_mask")),
        "starts": torch.zeros_like(ids),
        **_per_sequence(rows),
    }


def pack_sequences(rows: Sequence[dict]) -> dict[str, torch.Tensor]:
    """As `pad_sequences`, but one row (1, S) with all sequences one after the other, so that nothing is padding."""
    own = _per_sequence(rows)
    ends = own["length"].cumsum(0)
    return {
        "input_ids": torch.cat(_tensors(rows, "input_ids"))[None],
        "loss_mask": torch.cat(_tensors(rows, "loss_mask"))[None],
        "starts": (ends - own["length"]).repeat_interleave(own["length"])[None],
        **own,
    }


def unjoined(batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The ids of each sequence of a batch of either kind."""
    ids, lengths = batch["input_ids"], batch["length"].tolist()
    if len(ids) < len(lengths):
        return list(ids[0].split(lengths))
    return [row[:length] for row, length in zip(ids, lengths, strict=True)]


def joined_like(batch: dict[str, torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """(b, S, ...), where `values` (length, ...) belong to the sequences of a batch of either kind."""
    packed = len(batch["input_ids"]) < len(values)
    return torch.cat(values)[None] if packed else _pad(values)


def pad_with_every_anchor(rows: Sequence[dict]) -> dict[str, torch.Tensor]:
    """As `pad_sequences`, with every position that can be one an anchor: the collator of evaluation."""
    batch = pad_sequences(rows)
    anchors, keep = draw_anchors(batch["loss_mask"])
    return {**batch, "anchors": anchors, "keep": keep}


def _per_sequence(rows: Sequence[dict]) -> dict[str, torch.Tensor]:
    return {
        "greedy": torch.tensor([bool(row["greedy"]) for row in rows]),
        "length": torch.tensor([len(row["input_ids"]) for row in rows]),
    }


def _tensors(rows: Sequence[dict], name: str) -> list[torch.Tensor]:
    return [torch.as_tensor(row[name]) for row in rows]


def _pad(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
