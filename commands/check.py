"""`dflare check`: what to expect of a target and a drafter on this machine, before relying on them."""

import statistics
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from dflare.checks_dflare import CACHE_NAME
from dflare.configuration.arguments import CheckArguments
from dflare.configuration.targets import load_pair

from .generate import encode, timed

TOLERANCE = 1e-4  # of the largest logit, in fp32: what feeding tokens together may change
WIDTH = 8  # tokens fed together


@dataclass
class Fitness:
    """How a target answers tokens fed together against the same tokens one by one."""

    difference: float  # largest difference of a logit
    scale: float  # largest logit
    ties: int  # positions whose two likeliest tokens lie closer together than the largest difference
    positions: int

    @property
    def exact(self) -> bool:
        """Whether it is rounding alone."""
        return self.difference <= TOLERANCE * self.scale


def run(args: CheckArguments) -> int:
    """Prints the findings; status 1 if the pair cannot be used losslessly."""
    console = Console(highlight=False)
    disable_progress_bar()
    target, drafter, tokenizer = load_pair(args.target, args.drafter, args.dtype)
    drafter.check_target(target, target.generation_config)
    prompts = [encode(prompt, tokenizer).to(target.device) for prompt in args.prompts]
    table = Table(
        title=f"{args.target} with {args.drafter}, {str(target.dtype).removeprefix('torch.')}", show_header=False
    )
    table.add_column()
    table.add_column(justify="right")
    table.add_row("belong together", "yes")
    speeds, same, answers = race(target, drafter, prompts, args.max_new_tokens)
    fitness = measure_fitness(target, answers)
    inexact = "NO" if target.dtype == torch.float32 else "up to rounding"
    verdict = (
        f"{'yes' if fitness.exact else inexact} (off by {fitness.difference:.2g}, logits up to {fitness.scale:.3g})"
    )
    table.add_row(f"verifies {WIDTH} tokens at once like one by one", verdict)
    table.add_row("near-ties that this can turn", f"{fitness.ties} of the last {fitness.positions} tokens")
    table.add_row("answers identical to ordinary decoding", f"{same} of {len(prompts)}")
    table.add_row("speed-up, median of the prompts", f"{statistics.median(speeds):.2f}")
    console.print(table)
    lossless = fitness.exact and same == len(prompts)
    return 0 if lossless or target.dtype != torch.float32 else 1


@torch.no_grad()
def measure_fitness(target, sequences: list[torch.Tensor]) -> Fitness:
    """Feeds the end of each sequence (1, n) in pieces of `WIDTH` tokens and one by one."""
    found = Fitness(0.0, 0.0, 0, 0)
    for ids in sequences:
        start = max(1, ids.shape[1] - 8 * WIDTH)
        together, single = (fed_in_pieces(target, ids, start, width) for width in (WIDTH, 1))
        top, apart = single.topk(2, dim=-1).values, (together - single).abs().amax(dim=-1)
        found.difference = max(found.difference, float(apart.max()))
        found.scale = max(found.scale, float(single.abs().max()))
        found.ties += int((top[..., 0] - top[..., 1] < apart).sum())
        found.positions += single.shape[1]
    return found


def fed_in_pieces(target, ids: torch.Tensor, start: int, width: int) -> torch.Tensor:
    """Logits (1, n - start, V) of the tokens from `start` on, fed `width` at a time on the cache of those before."""
    cache, logits = target(input_ids=ids[:, :start], use_cache=True)[CACHE_NAME], []
    for place in range(start, ids.shape[1], width):
        outputs = target(input_ids=ids[:, place : place + width], use_cache=True, **{CACHE_NAME: cache})
        logits.append(outputs.logits.float())
    return torch.cat(logits, dim=1)


def race(target, drafter, prompts: list, max_new_tokens: int) -> tuple[list[float], int, list[torch.Tensor]]:
    """Speed-up of each prompt, how many answers were identical, and the ordinary answers."""
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    for assistant in (None, drafter):
        target.generate(**prompts[0], **{**options, "max_new_tokens": 16}, assistant_model=assistant)
    ratios, same, answers = [], 0, []
    for inputs in prompts:
        ordinary, slow = timed(lambda inputs=inputs: target.generate(**inputs, **options))
        ours, fast = timed(lambda inputs=inputs: target.generate(**inputs, **options, assistant_model=drafter))
        ratios.append(slow / fast * ours.shape[1] / ordinary.shape[1])
        same += torch.equal(ordinary, ours)
        answers.append(ordinary)
    return ratios, same, answers
