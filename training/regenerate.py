"""
Responses of the target itself, which is what its drafter has to foresee: prompts are kept, every response is generated,
and later turns see the generated earlier ones. A row holds one turn: exactly the ids that the target was given and exactly
those that it generated. (Chat templates may show an earlier turn otherwise than it was generated, without its thinking for
instance, so a conversation need not be one sequence.)
"""

import functools
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from transformers.utils import logging

from .engines import Engine
from .prompts import Prompt
from .store import SCHEMA, turn_id

logger = logging.get_logger(__name__)
WINDOW = 64  # batches that are sorted by length together


@dataclass
class Conversations:
    """
    Turns prompts into rows.

    Args:
        tokenizer: the target's, with its chat template.
        make_engine: makes the one that answers, when it is needed.
        temperature: what the engine decodes with, for the rows.
        max_prompt_tokens: a conversation ends before a turn whose prompt is longer.
        seed: of the answers, with each row's id.
        template: further arguments of the chat template (`enable_thinking`).
    """

    tokenizer: Any
    make_engine: Callable[[], Engine]
    temperature: float
    max_prompt_tokens: int
    seed: int = 0
    template: Mapping[str, Any] = field(default_factory=dict)
    left_out: int = 0  # prompts that were too long

    @functools.cached_property
    def engine(self) -> Engine:
        """Who answers."""
        return self.make_engine()

    def batches(self, prompts: Iterable[Prompt], batch_size: int) -> Iterator[list[Prompt]]:
        """
        Batches of prompts of like length. They depend on the prompts and their order alone, so a run that goes on answers
        the same ones together. First turns above `max_prompt_tokens` are left out; within a window the longest come first,
        so that a batch that is too large fails at once.
        """
        for window in batched(prompts, WINDOW * batch_size):
            lengths = [len(ids) for ids in self.encode([self._opening(prompt) for prompt in window])]
            fitting = [place for place, length in enumerate(lengths) if length <= self.max_prompt_tokens]
            self.left_out += len(window) - len(fitting)
            fitting.sort(key=lambda place: -lengths[place])
            for places in batched(fitting, batch_size):
                yield [window[place] for place in places]

    def answer(self, prompts: Sequence[Prompt]) -> list[dict]:
        """
        The rows of a batch of conversations, columns as in `SCHEMA`, all first turns answered together, then all second
        ones. A conversation ends with a response that the limit cut (finish reason `length`).
        """
        chats = {prompt.id: self._opening(prompt) for prompt in prompts}
        rows: list[dict] = []
        alive = list(prompts)
        for turn in range(max(len(prompt.turns) for prompt in prompts)):
            encoded = self.encode([chats[prompt.id] for prompt in alive])
            asked = [(p, ids) for p, ids in zip(alive, encoded, strict=True) if len(ids) <= self.max_prompt_tokens]
            if not asked:
                break
            names = [turn_id(prompt.id, turn) for prompt, _ in asked]
            answers = self.engine.answer([ids for _, ids in asked], [self.seed_of(name) for name in names])
            alive = []
            for name, (prompt, ids), answer in zip(names, asked, answers, strict=True):
                row = (name, ids, answer.token_ids, self.temperature, answer.finish_reason)
                rows.append(dict(zip(SCHEMA.names, row, strict=True)))
                if answer.finish_reason == "stop" and turn + 1 < len(prompt.turns):
                    alive.append(prompt)
                    chats[prompt.id].append(self._message(answer.token_ids))
                    chats[prompt.id].append({"role": "user", "content": prompt.turns[turn + 1]})
            if not alive:
                break
        return rows

    def encode(self, chats: Sequence[list[dict]]) -> list[list[int]]:
        """Ids in the target's chat template, generation prompt included."""
        options = {**self.template, "add_generation_prompt": True, "return_dict": True}
        return self.tokenizer.apply_chat_template(list(chats), **options)["input_ids"]

    def seed_of(self, name: str) -> int:
        """The seed of one row's answer."""
        return zlib.crc32(f"{self.seed} {name}".encode())

    @functools.cached_property
    def takes_system(self) -> bool:
        """Whether the template has a place for a system prompt; some refuse it."""
        try:
            self.encode([[{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]])
        except TemplateError:
            logger.warning(
                "the target's chat template refuses system prompts; each is put before the first turn instead"
            )
            return False
        return True

    def _opening(self, prompt: Prompt) -> list[dict]:
        if not prompt.system:
            return [{"role": "user", "content": prompt.opening}]
        if not self.takes_system:
            return [{"role": "user", "content": f"{prompt.system}\n\n{prompt.opening}"}]
        return [{"role": "system", "content": prompt.system}, {"role": "user", "content": prompt.opening}]

    def _message(self, token_ids: list[int]) -> dict:
        """A response as the template wants it in later turns; tokenizers that tell thinking from content do so."""
        if getattr(self.tokenizer, "response_schema", None):
            return self.tokenizer.parse_response(self.tokenizer.decode(token_ids))
        return {"role": "assistant", "content": self.tokenizer.decode(token_ids, skip_special_tokens=True).strip()}


def batched(items: Iterable, size: int) -> Iterator[list]:
    """Lists of `size` items, the last one shorter."""
    stream = iter(items)
    while batch := list(itertools.islice(stream, size)):
        yield batch
