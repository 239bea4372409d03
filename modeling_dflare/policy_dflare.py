"""
How many drafts are worth verifying, judged while `generate()` runs: by what a round costs on this machine (wall time, since
the accept decision waits for the device anyway) and by how often drafts of a given confidence were accepted. A choice never
depends on the tokens drawn in its own round, only on the distributions they are drawn from, so sampling stays unbiased.
"""

import itertools
import operator
import statistics
import time
import weakref
from collections import deque
from collections.abc import Sequence

KEPT_TIMES = 9  # rounds of a kind whose median is their cost
PLAIN_SAMPLES = 3  # plain steps measured before their cost is trusted
REFRESH = 64  # every so many rounds a plain step, so that their cost stays known
LOOK_AGAIN = (8, 128)  # plain steps before drafting is tried again, when it did not pay: at first, at most
MEMORY = 0.8  # weight that what earlier drafted rounds gained keeps with each new one
BUCKETS = 16  # of confidences
PRIOR = 4.0  # drafts that a bucket's confidence itself counts for
FORGET = 256.0  # drafts in a bucket above which all its counts are halved

_known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # drafter -> target -> kind of call -> its statistics


class PairStatistics:
    """
    What is known of a drafter and its target on this machine, shared by their calls: costs and acceptance. Threads may
    share it; a lost update costs an estimate its newest value, no more.
    """

    def __init__(self) -> None:
        self.times: dict[int | None, deque[float]] = {}  # None: plain steps; k: rounds that verified k drafts
        self.counts: dict[tuple, tuple[float, float]] = {}  # accepted and reached drafts of a bucket
        self.pause, self.next_pause = 0, LOOK_AGAIN[0]  # plain steps still to take, and how many when it fails next

    def note_time(self, drafts: int | None, seconds: float) -> None:
        """One round's wall time; `drafts` is None for a plain step."""
        self.times.setdefault(drafts, deque(maxlen=KEPT_TIMES)).append(seconds)

    def note_drafts(self, buckets: Sequence[tuple], accepted: int) -> None:
        """The outcome of a round's drafts: those up to the first rejected one were reached."""
        for place, bucket in enumerate(buckets[: accepted + 1]):
            old = self.counts.get(bucket, (PRIOR * bucket[1], PRIOR))
            share = 0.5 if old[1] > FORGET else 1.0
            self.counts[bucket] = (share * old[0] + (place < accepted), share * old[1] + 1)

    def chance(self, bucket: tuple) -> float:
        """How likely a draft of this bucket is accepted if all before it were."""
        accepted, reached = self.counts.get(bucket, (bucket[1], 1.0))
        return accepted / reached

    @property
    def plain_seconds(self) -> float | None:
        """Median cost of a plain step, or None before enough were seen."""
        seen = list(self.times.get(None, ()))
        return statistics.median(seen) if len(seen) >= PLAIN_SAMPLES else None

    def round_seconds(self, limit: int) -> list[float] | None:
        """
        Estimated cost of rounds that verify 0..limit drafts, or None where nothing is known. Between known costs it is
        interpolated; beyond the last it stays level, so that longer drafts are tried until they prove dear.
        """
        known = sorted((k, statistics.median(list(t))) for k, t in self.times.items() if k is not None)
        if not known:
            return None
        plain = self.plain_seconds
        if plain is not None and known[0][0] > 0:
            known.insert(0, (0, plain))
        return [_interpolate(known, k) for k in range(limit + 1)]


class FixedPolicy:
    """Every round drafts, and verifies as much as it may."""

    wants_confidences = False

    def begin_round(self) -> None:
        """A round starts."""

    def wants_draft(self) -> bool:
        """Whether this round drafts at all."""
        return True

    def choose(self, limit: int, confidences: Sequence[float] | None = None) -> int:
        """How many of `limit` drafts to verify, given each one's confidence where those are wanted."""
        return limit

    def end_round(self, drafts: int | None, accepted: Sequence[int], cut: bool = False) -> None:
        """
        A round's outcome: `drafts` is None for a plain step, `accepted` holds each row's count, `cut` says that something
        else than a rejection ended it.
        """


class AdaptivePolicy(FixedPolicy):
    """
    Verifies the prefix of the draft with the most expected tokens per second; takes plain steps where drafting does not
    pay, and looks again now and then.

    Args:
        known: the pair's statistics.
        wants_confidences: whether to judge drafts by their confidence; otherwise by their place in the block alone, which
            spares a GPU one wait for the host.
    """

    def __init__(self, known: PairStatistics, wants_confidences: bool):
        self.known = known
        self.wants_confidences = wants_confidences
        self.start = 0.0
        self.buckets: list = []  # of this round's drafts
        self.expected = 1.0  # tokens of this round
        # tokens and seconds of the drafted rounds since the last pause, the latest weighing most
        self.gained = [0.0, 0.0]
        self.steps = 0

    def begin_round(self) -> None:
        self.start = time.perf_counter()

    def wants_draft(self) -> bool:
        self.steps += 1
        if self.known.pause:
            self.known.pause -= 1
            return False
        return self.steps % (REFRESH if self.known.plain_seconds else 2) != 0

    def choose(self, limit: int, confidences: Sequence[float] | None = None) -> int:
        buckets = [bucket_of(place, c) for place, c in enumerate(confidences or [None] * limit)]
        chances, seconds = [self.known.chance(b) for b in buckets], self.known.round_seconds(limit)
        count = limit if seconds is None else best_prefix(chances, seconds)
        self.buckets, self.expected = buckets[:count], expected_tokens(chances[:count])
        return count

    def end_round(self, drafts: int | None, accepted: Sequence[int], cut: bool = False) -> None:
        seconds = time.perf_counter() - self.start
        self.known.note_time(drafts, seconds)
        if drafts is not None and accepted:
            for count in accepted:
                self.known.note_drafts(self.buckets[: count if cut else drafts], count)
            # What was expected is steadier than what came, but only what came can prove it wrong.
            tokens = (self.expected + sum(accepted) / len(accepted) + 1) / 2
            self.gained = [MEMORY * old + new for old, new in zip(self.gained, (tokens, seconds), strict=True)]
            self._pause_if_it_does_not_pay()

    def _pause_if_it_does_not_pay(self) -> None:
        plain, (tokens, seconds) = self.known.plain_seconds, self.gained
        if plain is None:
            return
        if tokens * plain >= seconds:
            self.known.next_pause = max(LOOK_AGAIN[0], self.known.next_pause // 2)
        else:
            self.gained = [0.0, 0.0]
            self.known.pause = self.known.next_pause
            self.known.next_pause = min(2 * self.known.next_pause, LOOK_AGAIN[1])


def policy_for(drafter, target, generation_config, batch_size: int = 1) -> FixedPolicy:
    """The policy of one call of `generate()`, by the drafter's `draft_policy`."""
    if drafter.config.draft_policy == "fixed":
        return FixedPolicy()
    pairs = _known.setdefault(drafter, weakref.WeakKeyDictionary())
    kind = (bool(generation_config.do_sample), batch_size)
    known = pairs.setdefault(target, {}).setdefault(kind, PairStatistics())
    return AdaptivePolicy(known, wants_confidences=drafter.device.type == "cpu" and batch_size == 1)


def expected_tokens(chances: Sequence[float]) -> float:
    """Tokens that a round gives on average, the target's own included, if each draft holds with its chance."""
    return 1.0 + sum(itertools.accumulate(chances, operator.mul))


def best_prefix(chances: Sequence[float], seconds: Sequence[float]) -> int:
    """
    The number of drafts with the most expected tokens per second.

    Args:
        chances: for each draft, that it is accepted if all before it were. seconds: cost of verifying 0..len(chances).
    """
    return max(range(len(chances) + 1), key=lambda count: expected_tokens(chances[:count]) / seconds[count])


def bucket_of(place: int, confidence: float | None) -> tuple[int, float]:
    """The drafts that one is counted with, as a key and the acceptance to start from."""
    if confidence is None:
        return (-1 - place, 0.5)
    bucket = min(int(confidence * BUCKETS), BUCKETS - 1)
    return (bucket, (bucket + 0.5) / BUCKETS)


def _interpolate(known: Sequence[tuple[int, float]], at: int) -> float:
    """The value at `at` on the broken line through `known`, level beyond its ends."""
    below = [point for point in known if point[0] <= at]
    above = [point for point in known if point[0] >= at]
    if not below or not above:
        return (below[-1] if below else above[0])[1]
    (x0, y0), (x1, y1) = below[-1], above[0]
    return y0 if x0 == x1 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)
