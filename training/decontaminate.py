"""
Prompts that stand in a benchmark too must not be trained on (paper, Settings): those that share a run of 32 of the target's
tokens with a benchmark prompt, and those with the same words, which catches prompts shorter than that.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .prompts import Prompt

NGRAM = 32  # tokens that a training prompt may not share with a benchmark prompt; a power of two
MULTIPLIER = 0x9E3779B97F4A7C15  # of the rolling hash, odd


@dataclass(frozen=True)
class Hit:
    """Why a prompt is removed: `reason` is `"32-gram"` or `"identical"`; the names of the benchmarks that hold it."""

    id: str
    reason: str
    benchmarks: tuple[str, ...]


class BenchmarkIndex:
    """
    The runs of tokens and the words of benchmark prompts, for finding them in others.

    Args:
        benchmarks: the turns of each, by its name.
        tokenizer: the target's.
    """

    def __init__(self, benchmarks: Mapping[str, Sequence[str]], tokenizer):
        self.tokenizer = tokenizer
        self.grams: dict[bytes, set[str]] = {}
        self.texts: dict[str, set[str]] = {}
        hashes = [np.zeros(0, dtype=np.uint64)]
        for name, turns in benchmarks.items():
            for turn, ids in zip(turns, self._ids(turns), strict=True):
                self.texts.setdefault(words_of(turn), set()).add(name)
                hashes.append(gram_hashes(ids))
                for place in range(len(ids) - NGRAM + 1):
                    self.grams.setdefault(ids[place : place + NGRAM].tobytes(), set()).add(name)
        self.hashes = np.unique(np.concatenate(hashes))
        self.counts: Counter = Counter()  # of removed prompts, by benchmark and reason

    def find(self, prompts: Sequence[Prompt]) -> list[Hit | None]:
        """For each prompt why it is to be removed, or None; what is found is counted."""
        texts = [(place, text) for place, prompt in enumerate(prompts) for text in _texts(prompt)]
        shared = self._shared_grams([text for _, text in texts])
        identical: dict[int, set[str]] = {}
        alike: dict[int, set[str]] = {}
        for (place, text), names in zip(texts, shared, strict=True):
            identical.setdefault(place, set()).update(self.texts.get(words_of(text), ()))
            alike.setdefault(place, set()).update(names)
        hits: list[Hit | None] = [None] * len(prompts)
        for place, prompt in enumerate(prompts):
            for reason, names in (("identical", identical[place]), ("32-gram", alike[place])):
                if names and hits[place] is None:
                    hits[place] = Hit(prompt.id, reason, tuple(sorted(names)))
                    self.counts.update((name, reason) for name in names)
        return hits

    def _shared_grams(self, texts: Sequence[str]) -> list[set[str]]:
        """For each text the benchmarks with a run of its tokens: hashes find them, the tokens themselves confirm."""
        found: list[set[str]] = [set() for _ in texts]
        if not texts or not len(self.hashes):
            return found
        rows = self._ids(texts)
        ids = np.concatenate(rows)
        owners = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        hashes = gram_hashes(ids)
        nearest = self.hashes[np.searchsorted(self.hashes, hashes).clip(max=len(self.hashes) - 1)]
        inside = owners[: len(hashes)] == owners[len(ids) - len(hashes) :]
        for place in np.nonzero((nearest == hashes) & inside)[0]:
            found[owners[place]] |= self.grams.get(ids[place : place + NGRAM].tobytes(), set())
        return found

    def _ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        if not texts:
            return []
        encoded = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return [np.asarray(ids, dtype=np.uint32) for ids in encoded]


def gram_hashes(ids: np.ndarray) -> np.ndarray:
    """Hashes (N - 31,) of all runs of 32 tokens, modulo 2**64: a run's hash is made of its two halves', five times over."""
    hashes, width = ids.astype(np.uint64) + np.uint64(1), 1
    if len(ids) < NGRAM:
        return hashes[:0]
    while width < NGRAM:
        power = np.uint64(pow(MULTIPLIER, width, 2**64))
        hashes = hashes[:-width] * power + hashes[width:]
        width *= 2
    return hashes


def words_of(text: str) -> str:
    """A text's words, case and punctuation aside."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def _texts(prompt: Prompt) -> Iterator[str]:
    yield from prompt.turns
    if prompt.system:
        yield prompt.system
