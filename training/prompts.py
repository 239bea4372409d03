"""Prompts from JSONL, and the removal of those that a benchmark holds too."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

NGRAM = 32  # tokens of the target that a training prompt may not share with a benchmark prompt (paper, Settings)


@dataclass(frozen=True)
class Prompt:
    """One user turn; `id` is the file's stem and the row's own id."""

    id: str
    text: str


def read_prompts(paths: Iterable[str | Path]) -> list[Prompt]:
    """
    The prompts of JSONL files, or of all JSONL files in a folder: `{"id": str, "turns": [str]}` a line.

    Raises:
        ValueError: naming file and line, for a line that is no such object or has more than one turn.
    """
    prompts: dict[str, Prompt] = {}
    for id, turns in _read("prompts", paths, single_turn=True):
        if id in prompts:
            raise ValueError(f"prompts: two rows are called {id}; file stem and id together must be unique")
        prompts[id] = Prompt(id, turns[0])
    return list(prompts.values())


def read_benchmark_turns(paths: Iterable[str | Path]) -> list[str]:
    """All turns of the benchmark files in `paths`."""
    return [turn for _, turns in _read("benchmarks", paths, single_turn=False) for turn in turns]


def contaminated(prompts: Iterable[Prompt], benchmark_turns: Iterable[str], tokenizer) -> dict[str, str]:
    """
    Ids of prompts that also stand in a benchmark, each with the reason: `"32-gram"` for a shared run of that many of the
    target's tokens, `"identical"` for the same words (case and punctuation aside), which catches shorter ones.
    """
    turns = list(benchmark_turns)
    grams = {gram for turn in turns for gram in _grams(tokenizer, turn)}
    whole = {_words(turn) for turn in turns}
    reasons = {}
    for prompt in prompts:
        if _words(prompt.text) in whole:
            reasons[prompt.id] = "identical"
        elif any(gram in grams for gram in _grams(tokenizer, prompt.text)):
            reasons[prompt.id] = "32-gram"
    return reasons


def _grams(tokenizer, text: str) -> Iterator[tuple[int, ...]]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return (tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1))


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def _read(field: str, paths: Iterable[str | Path], single_turn: bool) -> Iterator[tuple[str, list[str]]]:
    for path in map(Path, paths):
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files or not files[0].is_file():
            raise ValueError(f"{field}: {path} is neither a JSONL file nor a folder with any")
        for file in files:
            # Split at "\n" alone: text may hold other line separators, such as U+2028.
            for number, line in enumerate(file.read_text(encoding="utf-8").rstrip("\n").split("\n"), 1):
                row = _parse(line, f"{file}:{number}")
                if single_turn and len(row["turns"]) != 1:
                    raise ValueError(f"{file}:{number}: turns holds {len(row['turns'])} turns; one is supported here")
                yield f"{file.stem}/{row['id']}", row["turns"]


def _parse(line: str, place: str) -> dict:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error}") from None
    turns = row.get("turns") if isinstance(row, dict) else None
    if not turns or not isinstance(turns, list) or not all(isinstance(turn, str) for turn in [*turns, row.get("id")]):
        raise ValueError(f'{place}: expected {{"id": text, "turns": [text, ...]}}, found {line[:80]!r}')
    return row
