"""
Prompts: the user's side of conversations, from JSONL files and from any dataset that `datasets` can stream. A mixture takes
its share from each source, in an order that the seed alone decides.
"""

import dataclasses
import hashlib
import itertools
import json
import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import logging

from dflare.configuration.arguments import Source

logger = logging.get_logger(__name__)
SHUFFLE_BUFFER = 10_000  # rows of a stream among which the next one is drawn
ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user"}


@dataclass(frozen=True)
class Prompt:
    """
    What a user says in one conversation, turn by turn; `id` is the source's name and the row's own id. `format` is what
    the first turn is put into, at {}, when the target is asked; benchmarks are compared with what stands here.
    """

    id: str
    turns: tuple[str, ...]
    system: str | None = None
    format: str = "{}"

    @property
    def opening(self) -> str:
        """The first turn as the target is asked."""
        return self.format.replace("{}", self.turns[0], 1)


def read_prompts(paths: Iterable[str | Path]) -> list[Prompt]:
    """
    The prompts of JSONL files, or of all JSONL files in a folder: `{"id": str, "turns": [str, ...]}` a line, with `system`
    where there is a system prompt.

    Raises:
        ValueError: naming file and line, for a line that is no such object; for two rows with the same id.
    """
    prompts: dict[str, Prompt] = {}
    for prompt in _read("prompts", paths):
        if prompt.id in prompts:
            raise ValueError(f"prompts: two rows are called {prompt.id}; file stem and id together must be unique")
        prompts[prompt.id] = prompt
    return list(prompts.values())


def read_benchmarks(paths: Iterable[str | Path]) -> dict[str, list[str]]:
    """All turns of the benchmark files in `paths`, by the file's stem."""
    turns: dict[str, list[str]] = {}
    for prompt in _read("benchmarks", paths):
        turns.setdefault(prompt.id.partition("/")[0], []).extend(prompt.turns)
    return turns


def stream_prompts(
    paths: Sequence[str], sources: Sequence[Source], seed: int, num_prompts: int | None = None
) -> Iterator[Prompt]:
    """
    The prompts of `paths`, shuffled, and of `sources`, each in its share.

    Args:
        paths: JSONL files and folders, as `read_prompts` takes them; a source without a share, called `prompts`.
        num_prompts: how many to take in all; needed where a source has a share.
    Raises:
        ValueError: as `read_prompts` and `read_source` do, and for shares without `num_prompts`.
    """
    if any(source.share for source in sources) and num_prompts is None:
        raise ValueError("num_prompts is missing; the shares of sources are shares of it")
    streams = [read_source(source, seed) for source in sources]
    if paths:
        local = read_prompts(paths)
        files = {prompt.id.partition("/")[0] for prompt in local}
        if both := files & {source.title for source in sources}:
            raise ValueError(f"sources: one is called {both.pop()!r}, as a file of prompts is; give it another name")
        random.Random(seed).shuffle(local)
        streams.insert(0, iter(local))
    shares = [None] * bool(paths) + [source.share for source in sources]
    return itertools.islice(_mix(streams, shares, num_prompts, [*sources]), num_prompts)


def read_source(source: Source, seed: int) -> Iterator[Prompt]:
    """
    A dataset's prompts, streamed in an order drawn by the seed; rows without a user's text are left out and counted. An id
    ends in the row's place in a dataset of one file, else, since `datasets` counts anew in each file once it shuffles them,
    in a hash of its content; of rows of the same content one is taken.

    Raises:
        ValueError: if the dataset cannot be loaded or lacks a column, naming both.
    """
    from datasets import load_dataset

    kind = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}.get(Path(source.path).suffix)
    place: dict = {"path": source.path, "name": source.subset, "split": source.split, "revision": source.revision}
    if kind and Path(source.path).is_file():
        place = {"path": kind, "data_files": source.path, "split": "train"}
    try:
        rows = load_dataset(**place, streaming=True)
    except Exception as error:  # of many kinds, from hub, network and readers
        raise ValueError(f"sources: {source.path} cannot be loaded: {' '.join(str(error).split())}") from error
    numbered = rows.map(
        lambda row, place: {"place": place, "row": row}, with_indices=True, remove_columns=rows.column_names
    )
    empty, seen = 0, set()
    for entry in numbered.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER):
        prompt = to_prompt(f"{source.title}/{entry['place']}", entry["row"], source)
        if prompt and rows.num_shards > 1:
            prompt = dataclasses.replace(prompt, id=f"{source.title}/{content_hash(prompt)}")
        if prompt and prompt.id not in seen:
            seen.add(prompt.id)
            yield prompt
        empty += prompt is None
    if empty:
        logger.warning(f"{empty} rows of {source.path} hold no text of a user and were left out")


def content_hash(prompt: Prompt) -> str:
    """16 hexadecimal digits that stand for a prompt's texts."""
    return hashlib.sha256(json.dumps([prompt.system, prompt.turns]).encode()).hexdigest()[:16]


def to_prompt(id: str, row: dict, source: Source) -> Prompt | None:
    """
    A dataset's row as a prompt, or None if it holds no user's text. A column may hold a text, several turns, or messages
    (`role` and `content`, or `from` and `value`), of which the assistant's are dropped; several columns' texts are joined.
    """
    system: list[str] = []
    turns: list[str] = []
    for entry in _entries(row, source):
        role, text = ("user", entry) if isinstance(entry, str) else _message(entry)
        {"system": system, "user": turns}.get(role, []).append(text.strip())
    turns = [turn for turn in turns if turn]
    if not turns:
        return None
    return Prompt(id, tuple(turns), "\n\n".join(filter(None, system)) or None, source.format)


def _entries(row: dict, source: Source) -> list[str | dict]:
    """The texts and messages in a source's columns."""
    missing = [column for column in source.columns if column not in row]
    if missing:
        raise ValueError(f"sources: {source.path} has no column {missing[0]!r}; it has {', '.join(row)}")
    values = [row[column] for column in source.columns if row[column]]
    if values and all(isinstance(value, str) for value in values):
        return ["\n\n".join(values)]
    entries: list[Any] = [entry for value in values for entry in (value if isinstance(value, list) else [None])]
    if not all(isinstance(entry, (str, dict)) for entry in entries):
        raise ValueError(
            f"sources: {source.path} holds {str(values)[:80]} in {', '.join(source.columns)}; a text is expected, or a "
            "list of texts or messages"
        )
    return entries


def in_shard(id: str, shard: tuple[int, int]) -> bool:
    """Whether a prompt belongs to shard k of n (k from 1); every id belongs to one."""
    return zlib.crc32(id.encode()) % shard[1] == shard[0] - 1


def _message(entry: dict) -> tuple[str, str]:
    role = ROLES.get(str(entry.get("role", entry.get("from"))), "other")
    content = entry.get("content", entry.get("value"))
    if isinstance(content, list):  # parts, of which the texts count
        content = "\n".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return role, content or ""


def _mix(streams: list, shares: list, total: int | None, sources: list[Source]) -> Iterator[Prompt]:
    """Whole streams first, then those with a share, in turn so that each has its share of the rest at any time."""
    whole_rows = 0
    for stream, share in zip(streams, shares, strict=True):
        for prompt in stream if share is None else ():
            whole_rows += 1
            yield prompt
    parts = [(stream, share) for stream, share in zip(streams, shares, strict=True) if share is not None]
    names = [source.path for source in sources if source.share is not None]
    whole = sum(share for _, share in parts)
    quotas = [round(share / whole * max((total or 0) - whole_rows, 0)) for _, share in parts]
    taken = [0] * len(parts)
    while behind := [place for place, quota in enumerate(quotas) if taken[place] < quota]:
        place = min(behind, key=lambda place: taken[place] / quotas[place])
        prompt = next(parts[place][0], None)
        if prompt is None:
            logger.warning(
                f"{names[place]} ends after {taken[place]} prompts, of {quotas[place]} that its share asks for"
            )
            quotas[place] = taken[place]
            continue
        taken[place] += 1
        yield prompt


def _read(field: str, paths: Iterable[str | Path]) -> Iterator[Prompt]:
    for path in map(Path, paths):
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files or not files[0].is_file():
            raise ValueError(f"{field}: {path} is neither a JSONL file nor a folder with any")
        for file in files:
            with file.open(encoding="utf-8", newline="\n") as lines:  # text may hold other line separators
                for number, line in enumerate(lines, 1):
                    yield _parse(line, file.stem, f"{file}:{number}")


def _parse(line: str, name: str, place: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error}") from None
    turns = row.get("turns") if isinstance(row, dict) else None
    if not turns or not isinstance(turns, list) or not all(isinstance(turn, str) for turn in [*turns, row.get("id")]):
        raise ValueError(f'{place}: expected {{"id": text, "turns": [text, ...]}}, found {line[:80]!r}')
    return Prompt(f"{name}/{row['id']}", tuple(turns), row.get("system"))
