"""How many drafts are verified: the choice pays, never harms, and never changes a token."""

import random

import pytest
import torch

import dflare.policy_dflare as policy_dflare
from dflare.candidates_dflare import DFlareCandidateGenerator
from dflare.policy_dflare import AdaptivePolicy, FixedPolicy, PairStatistics, best_prefix, expected_tokens
from helpers import greedy, make_oracle, prompt_of, prompts_of, tiny_drafter, tiny_target

PLAIN, DRAFT, VERIFY = 1.0, 0.2, 0.1  # seconds of a plain step, a draft, and each draft verified


def test_the_best_prefix():
    flat, dear = [1.2] * 5, [1.2, 1.5, 1.8, 2.1, 2.4]
    for chances, seconds, best in (
        ([[0.9, 0.9, 0.9, 0.9]], flat, 4),
        ([[0.9, 0.2, 0.2, 0.2]], dear, 1),
        ([[0.1, 0.9, 0.9, 0.9]], dear, 0),
        ([[0.1, 0.9, 0.9, 0.9], [0.9, 0.9, 0.9, 0.9]], dear, 4),  # rows share one width
    ):
        assert best_prefix(expected_tokens(chances), seconds) == best
    assert expected_tokens([[0.5, 0.5], [1.0, 1.0]]) == [1.0, 1.75, 2.375]


def test_acceptance_is_learnt_by_confidence():
    known = PairStatistics()
    high, low = policy_dflare.bucket_of(0, 0.97), policy_dflare.bucket_of(0, 0.12)
    assert known.chance(high) > 0.9 and known.chance(low) < 0.2
    for _ in range(1000):
        known.note_drafts([high, low, low], accepted=1)
    assert known.chance(high) > 0.95 and known.chance(low) < 0.05  # the third draft was never reached


def test_costs_are_medians_and_interpolated():
    known = PairStatistics()
    assert known.plain_seconds is None and known.round_seconds(2) == [1.0, 1.0, 1.0]  # nothing known: all alike
    for seconds in (1.0, 1.1, 50.0, 0.9, 1.0):
        known.note_time(None, seconds)
    for seconds in (3.0, 3.0, 40.0):
        known.note_time(4, seconds)
    assert known.plain_seconds == 1.0
    known.drafting.append(0.2)
    assert known.round_seconds(6) == pytest.approx([1.2, 1.65, 2.1, 2.55, 3.0, 3.0, 3.0])
    known.note_time(2, 9.0)  # a hiccup: more drafts cannot cost less
    assert known.round_seconds(6) == pytest.approx([1.2, 2.1, 3.0, 3.0, 3.0, 3.0, 3.0])


def simulate(monkeypatch, accepts, rounds: int = 1000, rows: int = 1) -> float:
    """Tokens per plain step's time and row of a policy, on a machine with the costs above."""
    now = 0.0
    monkeypatch.setattr(policy_dflare.time, "perf_counter", lambda: now)
    policy = AdaptivePolicy(PairStatistics(rows), wants_confidences=True)
    tokens = 0
    for number in range(rounds):
        policy.begin_round()
        drafts, accepted = None, 0
        if policy.wants_draft():
            drafts = policy.choose(7, [(0.5,) * 7] * rows)
            accepted = min(accepts(number), drafts)
            now += DRAFT + VERIFY * drafts
        now += PLAIN
        policy.end_round(drafts, [accepted] * rows)
        tokens += accepted + 1
    return tokens / now * PLAIN


def test_where_drafts_fail_it_costs_next_to_nothing(monkeypatch):
    assert simulate(monkeypatch, lambda number: 0) > 0.98


def test_the_rows_of_a_batch_tell_it_sooner(monkeypatch):
    alone, together = (simulate(monkeypatch, lambda number: 0, rounds=60, rows=rows) for rows in (1, 16))
    assert alone < 0.96 and together > 0.97


def test_where_drafts_hold_it_takes_them(monkeypatch):
    best = 8 / (PLAIN + DRAFT + 7 * VERIFY)
    assert simulate(monkeypatch, lambda number: 7) > 0.93 * best


def test_it_comes_back_when_drafts_hold_again(monkeypatch):
    assert simulate(monkeypatch, lambda number: 0 if number < 300 else 7, rounds=1300) > 2.0


class RandomPolicy(FixedPolicy):
    """Anything goes."""

    wants_confidences = True

    def __init__(self):
        self.random = random.Random(0)

    def wants_draft(self):
        return self.random.random() < 0.7

    def choose(self, limit, confidences=None):
        assert all(len(row) == limit and all(0 <= c <= 1 for c in row) for row in confidences)
        return self.random.randint(0, limit)


@pytest.mark.parametrize("spoiled", [None, 1, 3])
def test_no_choice_changes_a_token(monkeypatch, spoiled):
    target = tiny_target()
    drafter = tiny_drafter(target, block_size=6)
    prompt = prompt_of(5)
    ordinary = greedy(target, prompt, max_new_tokens=60)
    make_oracle(drafter, greedy(target, prompt, max_new_tokens=80), spoiled)
    monkeypatch.setattr("dflare.candidates_dflare.policy_for", lambda *args: RandomPolicy())
    monkeypatch.setattr("dflare.drafting_dflare.MAX_WAITING", 3)
    with drafter.record_drafts() as records:
        assert torch.equal(ordinary, greedy(target, prompt, max_new_tokens=60, assistant_model=drafter))
    assert len({r.drafted for r in records[0].rounds}) > 3


def test_states_that_waited_make_the_same_drafts(monkeypatch):
    """Plain steps leave their states for later; the drafts after them are those of a run that drafted all along."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    seen: dict[str, dict[int, torch.Tensor]] = {"always": {}, "rarely": {}}
    for name, every in (("always", 1), ("rarely", 5)):

        class Rarely(FixedPolicy):
            steps = 0

            def wants_draft(self, every=every):
                self.steps += 1
                return self.steps % every == 0

        monkeypatch.setattr("dflare.candidates_dflare.policy_for", lambda *args, kind=Rarely: kind())
        original = drafter.make_candidate_generator

        def make(target, original=original, name=name, **call):
            generator = original(target, **call)
            choose = generator._choose

            def look(input_ids, logits):
                seen[name][input_ids.shape[1]] = logits.clone()
                return choose(input_ids, logits)

            generator._choose = look
            return generator

        drafter.make_candidate_generator = make
        greedy(target, prompt_of(5), max_new_tokens=40, assistant_model=drafter)
        del drafter.make_candidate_generator
    common = set(seen["always"]) & set(seen["rarely"])
    assert len(common) >= 3
    for length in common:
        shared = min(seen["always"][length].shape[1], seen["rarely"][length].shape[1])
        torch.testing.assert_close(seen["always"][length][:, :shared], seen["rarely"][length][:, :shared])


def test_the_confidence_threshold_is_honoured():
    target = tiny_target()
    drafter = tiny_drafter(target)
    for threshold, drafted in ((0.999999, {0}), (1e-9, {3})):
        options = {"assistant_confidence_threshold": threshold, "assistant_model": drafter, "max_new_tokens": 20}
        for rows in (1, 2):
            with drafter.record_drafts() as records:
                greedy(target, prompts_of(rows, 5), **options)
            assert {r.drafted for record in records for r in record.rounds[:3]} == drafted


def test_the_default_policy_is_exact_too():
    target = tiny_target()
    drafter = tiny_drafter(target, draft_policy="adaptive")
    for seed in range(3):
        prompt = prompt_of(6, seed=seed)
        ordinary = greedy(target, prompt, max_new_tokens=80)
        make_oracle(drafter, greedy(target, prompt, max_new_tokens=90), None)
        assert torch.equal(ordinary, greedy(target, prompt, max_new_tokens=80, assistant_model=drafter))


def test_every_pass_but_the_prefill_is_accounted_for(monkeypatch):
    """Rounds and plain steps add up to the tokens, and they are timed but for the last, whose end nobody sees."""
    target = tiny_target()
    drafter = tiny_drafter(target, draft_policy="adaptive")
    noted = []
    monkeypatch.setattr(PairStatistics, "note_time", lambda self, drafts, seconds: noted.append(seconds))
    with drafter.record_drafts() as records:
        greedy(target, prompt_of(6), max_new_tokens=30, assistant_model=drafter)
    record = records[0]
    assert sum(r.length for r in record.rounds) + record.plain_steps == 29
    assert len(noted) == len(record.rounds) + record.plain_steps - 1 and record.plain_steps > 0
    assert max(noted) < 60


def test_a_round_asks_the_device_for_nothing_but_its_outcome(monkeypatch):
    """On a GPU each number that the host reads is a wait; where confidences are not wanted, a draft reads none."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    asked, inside = [], []
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy"):
        original = getattr(torch.Tensor, name)

        def watched(self, *args, original=original, name=name):
            if inside:
                asked.append(name)
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, watched)
    for name in ("get_candidates", "update_candidate_strategy"):
        method = getattr(DFlareCandidateGenerator, name)

        def entered(self, *args, method=method, **kwargs):
            inside.append(True)
            try:
                return method(self, *args, **kwargs)
            finally:
                inside.pop()

        monkeypatch.setattr(DFlareCandidateGenerator, name, entered)
    with drafter.record_drafts() as records:
        greedy(target, prompt_of(6), max_new_tokens=20, assistant_model=drafter)
    assert len(records[0].rounds) > 5
    assert len(asked) <= len(records[0].rounds) and set(asked) <= {"__int__"}
