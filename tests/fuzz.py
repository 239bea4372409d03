"""
Random calls of `generate()`: a random target, one to three options of `matrix.py` at once, one to three rows, a drafter
that tells the truth as often as it likes, and a policy that chooses anything. Each must give the tokens of the same call
without a drafter. Prints what did not, and the count.

    python tests/fuzz.py --calls 10000 --seed 0
"""

import argparse
import collections
import copy
import random
import sys
import time
import warnings

import torch
from transformers.utils import logging

import dflare.batches_dflare as batches
from dflare.candidates_dflare import DFlareCandidateGenerator
from dflare.policy_dflare import FixedPolicy
from helpers import prompt_of
from matrix import OPTIONS, compare, drafter_for
from zoo import TARGETS, build

# Options that make sense, or that transformers itself serves, for one row only.
ALONE = {
    "`attention_mask` with left padding",
    "`inputs_embeds`",
    "a cache that holds part of the prompt",
    "a streamer",
    "a stopping criterion of your own",
    "`encoder_no_repeat_ngram_size`",
}
# Two of these together make no sense (a cache of other tokens) or are refused by a clear error, which the tests hold.
APART = ("`attention_mask` with left padding", "`inputs_embeds`", "a cache that holds part of the prompt")
SERVED = [name for name, option in OPTIONS.items() if not option.refused and name != "`num_beams`"]


class Chance:
    """What this case's drafter and policy do."""

    def __init__(self, seed: int, truth: torch.Tensor):
        self.random, self.truth = random.Random(seed), truth
        self.honesty = self.random.choice([0.0, 0.5, 0.8, 1.0])

    def drafts(self, row: int, length: int, logits: torch.Tensor) -> torch.Tensor:
        """Draft tokens (1, k): each is the truth with this case's probability."""
        known = self.truth[row, length : length + logits.shape[1]].tolist()
        known += [0] * (logits.shape[1] - len(known))
        vocabulary = logits.shape[2]
        return torch.tensor(
            [[t if self.random.random() < self.honesty else self.random.randrange(vocabulary) for t in known]],
            dtype=torch.long,
        )

    def policy(self) -> FixedPolicy:
        """One that drafts, and verifies, at random."""
        chance = self

        class Anything(FixedPolicy):
            def wants_draft(self):
                return chance.random.random() < 0.8

            def choose(self, limit, confidences=None):
                return chance.random.randint(0, limit)

        return Anything()


def install(chance: Chance) -> None:
    """Makes all drafting of the next call follow `chance`."""
    DFlareCandidateGenerator._choose = lambda self, ids, logits: (chance.drafts(0, ids.shape[1], logits), logits)

    def draft(self, anchors, limit, original=batches.BatchDecoder.original_draft):
        _, logits = original(self, anchors, limit)
        rows = [chance.drafts(row, self.texts[row].shape[1], logits) for row in self.rows]
        return torch.cat(rows), logits

    batches.BatchDecoder._draft = draft
    for module in ("candidates_dflare", "batches_dflare"):
        sys.modules[f"dflare.{module}"].policy_for = lambda *args, **kwargs: chance.policy()


def one_case(seed: int, targets: dict) -> tuple[str, str]:
    """The case of this seed: "same", "refused", "not served" (by transformers without a drafter), or "wrong", and why."""
    dice = random.Random(seed)
    name = dice.choice(list(targets))
    target, rows, length = targets[name], dice.choice([1, 1, 2, 3]), dice.randint(9, 24)
    labels = dice.sample(SERVED, dice.randint(1, 3))
    if rows > 1:
        labels = [label for label in labels if label not in ALONE and "returned" not in label]
    labels = [label for label in labels if label not in APART or label == min(set(APART) & set(labels))]
    prompt = torch.cat([prompt_of(length, seed=seed + row) for row in range(rows)])
    truth = target.generate(input_ids=prompt, do_sample=False, max_new_tokens=40)
    arguments = arguments_of(labels, target, prompt, truth, dice)
    case = f"seed {seed}: {name}, {rows} rows, {labels}"
    try:
        expected = [call(target, arguments, row) for row in range(rows)]
    except Exception:
        return "not served", ""
    longest = max(len(tokens) for tokens, _, _ in expected)
    texts = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _, _ in expected])
    install(Chance(seed, texts if dice.random() < 0.8 else truth))
    try:
        found = call(target, arguments, assistant_model=drafter_for(target))
    except Exception as error:
        if any(part in str(error) for label in labels for part in OPTIONS[label].refused_on_some):
            return "refused", ""
        return "wrong", f"{case}: {type(error).__name__}: {error}"
    difference = compare((texts, *expected[0][1:]), (torch.tensor(found[0]), *found[1:]))
    return ("wrong", f"{case}: {difference}") if difference else ("same", "")


def arguments_of(labels: list[str], target, prompt: torch.Tensor, truth: torch.Tensor, dice) -> dict:
    """All options at once; more rows than one get some padding."""
    arguments: dict = {
        "input_ids": prompt,
        "do_sample": False,
        "max_new_tokens": dice.randint(1, 30),
        "pad_token_id": 0,
    }
    if len(prompt) > 1:
        padding = torch.tensor([dice.choice([0, 0, dice.randint(1, 6)]) for _ in prompt]).unsqueeze(1)
        arguments["attention_mask"] = (torch.arange(prompt.shape[1]) >= padding).long()
    for label in labels:
        given = OPTIONS[label].arguments(target, prompt, truth)
        if {"max_length", "max_new_tokens"} & set(given):
            del arguments["max_length" if "max_length" in arguments else "max_new_tokens"]
        arguments |= given
    return {key: value for key, value in arguments.items() if value is not None}


def call(target, arguments: dict, row: int | None = None, **more) -> tuple[list, list | None, dict]:
    """Tokens of all rows, or of one that is alone; what was streamed, and what else was returned."""
    arguments = copy.deepcopy(arguments)  # a cache or a streamer is filled by a call
    for key in ("input_ids", "attention_mask") if row is not None else ():
        if key in arguments:
            arguments[key] = arguments[key][row : row + 1]
    output = target.generate(**arguments, **more)
    streamer = arguments.get("streamer")
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    returned = {} if isinstance(output, torch.Tensor) else output
    return sequences.tolist() if row is None else sequences[0].tolist(), streamer and streamer.tokens, returned


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    batches.BatchDecoder.original_draft = batches.BatchDecoder._draft
    targets = {name: build(name) for name in TARGETS}
    counts: collections.Counter = collections.Counter()
    start = time.time()
    for number in range(args.calls):
        outcome, problem = one_case(args.seed + number, targets)
        counts[outcome] += 1
        if problem:
            print(problem, flush=True)
        if number % 500 == 499 or number + 1 == args.calls:
            print(f"{number + 1} calls: {dict(counts)}, {time.time() - start:.0f} s", flush=True)
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
