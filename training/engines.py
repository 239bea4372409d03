"""
Who answers prompts: the target in this process, or any server with OpenAI's completions interface that takes and returns
token ids (vLLM and SGLang do, with `return_token_ids`). Both are asked for a batch of prompts and a seed of each.
"""

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Decoding:
    """How responses are decoded; `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 leave all tokens in."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True)
class Answer:
    """The tokens generated, the end token among them if it came (`stop`), and why they end there (`stop`, `length`)."""

    token_ids: list[int]
    finish_reason: str


class Engine(Protocol):
    """Answers batches of prompts."""

    def answer(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Answer]:
        """One answer for each prompt (token ids); the same prompts and seeds give the same answers."""


class TransformersEngine:
    """The target in this process: a batch is decoded together, by the first of its seeds."""

    def __init__(self, target, decoding: Decoding):
        self.target, self.decoding = target, decoding
        ends = target.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends])

    @torch.inference_mode()
    def answer(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Answer]:
        inputs, mask = left_pad(prompts)
        torch.manual_seed(seeds[0])
        output = self.target.generate(
            input_ids=inputs.to(self.target.device),
            attention_mask=mask.to(self.target.device),
            max_new_tokens=self.decoding.max_new_tokens,
            pad_token_id=0,
            **self._sampling(),
        )
        return [self._cut(tokens) for tokens in output[:, inputs.shape[1] :].tolist()]

    def _sampling(self) -> dict:
        if not self.decoding.temperature:
            return {"do_sample": False}
        return {key: getattr(self.decoding, key) for key in ("temperature", "top_p", "top_k")} | {"do_sample": True}

    def _cut(self, tokens: list[int]) -> Answer:
        end = next((place for place, token in enumerate(tokens) if token in self.ends), None)
        return Answer(tokens, "length") if end is None else Answer(tokens[: end + 1], "stop")


class ServerEngine:
    """
    A server with OpenAI's completions interface, asked for up to `concurrency` answers at a time. What fails for a while
    (connections, time-outs, 429 and 5xx) is tried again with growing pauses.

    Args:
        url: of the interface, such as http://localhost:8000/v1; the key is taken from OPENAI_API_KEY.
        model: as the server calls the target; None for the one that it serves.
        retries: tries after the first.
        timeout: seconds for one answer.
    Raises:
        ValueError: if the server serves no such model, or returns no token ids.
        ConnectionError: once all tries have failed.
    """

    def __init__(
        self,
        url: str,
        decoding: Decoding,
        *,
        model: str | None = None,
        concurrency: int = 64,
        retries: int = 8,
        timeout: float = 3600,
    ):
        from openai import OpenAI

        self.decoding, self.concurrency = decoding, concurrency
        self.access: dict = {
            "base_url": url,
            "api_key": os.environ.get("OPENAI_API_KEY", "none"),
            "max_retries": retries,
            "timeout": timeout,
        }
        with OpenAI(**self.access) as client, _told(url):
            served = [entry.id for entry in client.models.list()]
        if not served or (model is not None and model not in served):
            raise ValueError(f"server_model is {model!r}, but {url} serves {served}")
        self.model = model or served[0]

    def answer(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Answer]:
        with _told(self.access["base_url"]):
            return asyncio.run(self._answer_all(prompts, seeds))

    async def _answer_all(self, prompts, seeds) -> list[Answer]:
        from openai import AsyncOpenAI

        places = asyncio.Semaphore(self.concurrency)
        async with AsyncOpenAI(**self.access) as client:

            async def one(prompt, seed) -> Answer:
                async with places:
                    return await self._ask(client, prompt, seed)

            return await asyncio.gather(*map(one, prompts, seeds))

    async def _ask(self, client, prompt: Sequence[int], seed: int) -> Answer:
        # What is not sent, a server takes from the model's generation config; -1 means all tokens.
        options = {"return_token_ids": True, "top_k": self.decoding.top_k or -1}
        completion = await client.completions.create(
            model=self.model,
            prompt=list(prompt),
            max_tokens=self.decoding.max_new_tokens,
            temperature=self.decoding.temperature,
            top_p=self.decoding.top_p,
            seed=seed,
            extra_body=options,
        )
        choice = completion.choices[0]
        token_ids = getattr(choice, "token_ids", None)
        if token_ids is None:
            raise ValueError(
                "the server returns no token_ids, and text is not to be tokenised again; vLLM from 0.10.2 on and SGLang "
                "since July 2026 return them (return_token_ids)"
            )
        return Answer(list(token_ids), choice.finish_reason)


@contextlib.contextmanager
def _told(url: str) -> Iterator[None]:
    """The client's errors as one kind that names the server."""
    from openai import OpenAIError

    try:
        yield
    except OpenAIError as error:
        raise ConnectionError(f"server: {url} failed: {' '.join(str(error).split())}") from error


def left_pad(sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask (b, longest), padded with zeros on the left."""
    longest = max(map(len, sequences))
    ids = [[0] * (longest - len(s)) + list(s) for s in sequences]
    mask = [[0] * (longest - len(s)) + [1] * len(s) for s in sequences]
    return torch.tensor(ids), torch.tensor(mask)
