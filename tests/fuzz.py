"""
Random calls of `generate()`: a random target, one to three options of `matrix.py` at once, one to three rows, a drafter
that tells the truth as often as it likes, and a policy that chooses anything. Each must give the tokens of the same call
without a drafter. Prints what did not, and the count.

    python tests/fuzz.py --calls 10000 --seed 0
"""

import argparse
import random
import sys
import time

import torch

import dflare.batches_dflare as batches
from dflare.candidates_dflare import DFlareCandidateGenerator
from dflare.policy_dflare import FixedPolicy
from helpers import Collect, prompt_of
from matrix import OPTIONS, drafter_for
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


def one_case(seed: int, targets: dict) -> str:
    """Runs the case of this seed; empty, or how it went wrong."""
    dice = random.Random(seed)
    name = dice.choice(list(targets))
    target, rows, length = targets[name], dice.choice([1, 1, 2, 3]), dice.randint(9, 24)
    labels = dice.sample(SERVED, dice.randint(1, 3))
    if rows > 1:
        labels = [label for label in labels if label not in ALONE and "returned" not in label]
    prompt = torch.cat([prompt_of(length, seed=seed + row) for row in range(rows)])
    truth = target.generate(input_ids=prompt, do_sample=False, max_new_tokens=40)
    budget = dice.randint(1, 30)

    def call(**more) -> tuple:
        arguments: dict = {"input_ids": prompt, "do_sample": False, "max_new_tokens": budget, "pad_token_id": 0}
        for label in labels:
            given = OPTIONS[label].arguments(target, prompt, truth)
            if "max_length" in given:
                arguments.pop("max_new_tokens", None)
            arguments |= given
        if "max_length" in arguments and "max_new_tokens" in arguments:
            del arguments["max_length"]
        output = target.generate(**{key: value for key, value in arguments.items() if value is not None}, **more)
        streamer = arguments.get("streamer")
        tokens = output if isinstance(output, torch.Tensor) else output.sequences
        return tokens.tolist(), streamer.tokens if isinstance(streamer, Collect) else None

    case = f"seed {seed}: {name}, {rows} rows, {labels}, budget {budget}"
    try:
        expected = call()
    except Exception:  # what transformers itself does not serve
        return ""
    install(Chance(seed, torch.tensor(expected[0]) if dice.random() < 0.8 else truth))
    try:
        found = call(assistant_model=drafter_for(target))
    except Exception as error:
        if any(part in str(error) for label in labels for part in OPTIONS[label].refused_on_some):
            return ""
        return f"{case}: {type(error).__name__}: {error}"
    return "" if found == expected else f"{case}: other tokens"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    batches.BatchDecoder.original_draft = batches.BatchDecoder._draft
    targets = {name: build(name) for name in TARGETS}
    wrong, start = 0, time.time()
    for number in range(args.calls):
        if problem := one_case(args.seed + number, targets):
            wrong += 1
            print(problem, flush=True)
        if number % 500 == 499:
            print(f"{number + 1} calls, {wrong} mismatches, {time.time() - start:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
