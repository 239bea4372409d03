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

KEPT_TIMES = 5  # rounds of a kind whose median is their cost
PLAIN_SAMPLES = 3  # plain steps measured before the first draft
REFRESH = (16, 64)  # every so many rounds a plain step, so that their cost stays known: where the gain is small, else
SMALL_GAIN = 1.15
HARM = 0.01  # share of the time that may be lost on looking whether drafting pays again
PAUSES = (8, 256)  # plain steps between such looks at most: after the first that failed (for each row), doubling to
MEMORY = 0.95  # weight that what earlier drafted rounds gained keeps with each new one
HOPE = (2, 2.5)  # drafted rounds (of one row), of so many tokens each, that are believed in before any was seen
PAST = 0.25  # weight that all of it keeps when drafting pauses
BUCKETS = 16  # of confidences
PRIOR = 4.0  # drafts that a bucket's confidence itself counts for
TRUST = 2.0  # drafts that confidences are believed for before any was seen
FORGET = 256.0  # drafts above which counts are halved

_known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # drafter -> target -> kind of call -> its statistics


class PairStatistics:
    """
    What is known of a drafter and its target on this machine, shared by their calls: costs and acceptance. Threads may
    share it; a lost update costs an estimate its newest value, no more.

    Args:
        num_rows: sequences decoded together; a round says as much as that many rounds of one.
    """

    def __init__(self, num_rows: int = 1) -> None:
        self.num_rows = num_rows
        self.times: dict[int | None, deque[float]] = {}  # None: plain steps; k: rounds that verified k drafts
        self.counts: dict[tuple, tuple[float, float]] = {}  # accepted and reached drafts of a bucket
        self.total = (0.0, 0.0)  # drafts accepted, and how many the confidences of those reached promised
        self.drafting: deque[float] = deque(maxlen=KEPT_TIMES)  # seconds of the draft alone
        self.gained: tuple[float, float] | None = None  # tokens and seconds of drafted rounds, the latest weighing most
        self.pause = 0  # plain steps to take before drafting is tried again
        self.shortest_pause = min(PAUSES[0] * num_rows, PAUSES[1])
        self.longest_pause = self.shortest_pause
        self.looking = True  # whether drafting is to be judged anew

    def note_time(self, drafts: int | None, seconds: float) -> None:
        """One round's wall time; `drafts` is None for a plain step."""
        self.times.setdefault(drafts, deque(maxlen=KEPT_TIMES)).append(seconds)

    def note_drafts(self, buckets: Sequence[tuple], accepted: int) -> None:
        """The outcome of a round's drafts: those up to the first rejected one were reached."""
        for place, bucket in enumerate(buckets[: accepted + 1]):
            self.counts[bucket] = _counted(self.counts.get(bucket, (0.0, 0.0)), place < accepted, 1.0)
            self.total = _counted(self.total, place < accepted, bucket[1])

    def note_gain(self, tokens: float, seconds: float) -> float:
        """
        A drafted round's worth; returns how many times faster than plain steps drafting has lately been. Where it was not,
        a pause begins, the longer the more a round loses and the oftener that was seen; the past then keeps little
        weight, so that one good round can end the pauses.
        """
        hope = HOPE[0] / self.num_rows
        past = self.gained or (hope * HOPE[1], hope * seconds)
        self.gained = (MEMORY * past[0] + tokens, MEMORY * past[1] + seconds)
        plain = self.plain_seconds or seconds
        gain = self.gained[0] * plain / self.gained[1]
        self.looking = gain < 1
        if self.looking:
            self.gained = (PAST * self.gained[0], PAST * self.gained[1])
            self.pause = min(1 + int((1 - gain) * seconds / plain / HARM), self.longest_pause)
        self.longest_pause = min(2 * self.longest_pause, PAUSES[1]) if self.looking else self.shortest_pause
        return gain

    def chance(self, bucket: tuple) -> float:
        """
        How likely a draft of this bucket is accepted if all before it were: as often as such drafts were, starting from
        its confidence times how far confidences in general could be trusted.
        """
        accepted, reached = self.counts.get(bucket, (0.0, 0.0))
        trust = (self.total[0] + TRUST) / (self.total[1] + TRUST)
        return min((accepted + PRIOR * trust * bucket[1]) / (reached + PRIOR), 1.0)

    @property
    def plain_seconds(self) -> float | None:
        """Median cost of a plain step, or None before enough were seen."""
        seen = list(self.times.get(None, ()))
        return statistics.median(seen) if len(seen) >= PLAIN_SAMPLES else None

    def round_seconds(self, limit: int) -> list[float]:
        """
        Estimated cost of rounds that verify 0..limit drafts. No round costs more than a wider one; between known costs it
        is interpolated, and beyond the last level, so that longer drafts are tried until they prove dear.
        """
        known = sorted((k, statistics.median(list(t))) for k, t in list(self.times.items()) if k is not None)
        if 0 not in self.times and self.plain_seconds is not None and self.drafting:
            known.insert(0, (0, self.plain_seconds + statistics.median(list(self.drafting))))
        lowest = list(itertools.accumulate((cost for _, cost in reversed(known)), min))[::-1]
        known = [(k, cost) for (k, _), cost in zip(known, lowest, strict=True)]
        return [_interpolate(known, k) if known else 1.0 for k in range(limit + 1)]


class FixedPolicy:
    """Every round drafts, and verifies as much as it may."""

    wants_confidences = False

    def begin_round(self) -> None:
        """A round starts."""

    def wants_draft(self) -> bool:
        """Whether this round drafts at all."""
        return True

    def choose(self, limit: int, confidences: Sequence[Sequence[float]] | None = None) -> int:
        """How many of `limit` drafts to verify, given each row's confidence in each where those are wanted."""
        return limit

    def end_round(self, drafts: int | None, accepted: Sequence[int | None], cut: bool = False) -> None:
        """
        A round's outcome: `drafts` is None for a plain step, `accepted` holds each row's count (None if its text ended),
        `cut` says that something else than a rejection ended it.
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
        self.buckets: list[list[tuple]] = []  # of this round's drafts: for each row, or one for all
        self.expected = 1.0  # tokens of this round
        self.refresh = REFRESH[0]
        self.steps = 0  # since the last plain step

    def begin_round(self) -> None:
        self.start = time.perf_counter()

    def wants_draft(self) -> bool:
        if self.known.pause > 0:
            self.known.pause -= 1
        elif self.known.plain_seconds is not None and self.steps < self.refresh:
            self.steps += 1
            return True
        self.steps = 0
        return False

    def choose(self, limit: int, confidences: Sequence[Sequence[float]] | None = None) -> int:
        self.known.drafting.append(time.perf_counter() - self.start)
        rows: Sequence[Sequence[float | None]] = confidences or [[None] * limit]
        self.buckets = [[bucket_of(*draft) for draft in enumerate(row)] for row in rows]
        tokens = expected_tokens([[self.known.chance(bucket) for bucket in row] for row in self.buckets])
        least = min(limit, int(self.known.looking))  # only verified drafts can tell whether drafting pays
        count = best_prefix(tokens, self.known.round_seconds(limit), least)
        self.expected = tokens[count]
        return count

    def end_round(self, drafts: int | None, accepted: Sequence[int | None], cut: bool = False) -> None:
        seconds = time.perf_counter() - self.start
        self.known.note_time(drafts, seconds)
        counts = [count for count in accepted if count is not None]
        if drafts is None or not counts:
            return
        for count, buckets in zip(accepted, itertools.cycle(self.buckets)):
            if count is not None:
                self.known.note_drafts(buckets[: count if cut else drafts], count)
        # What was expected is steadier than what came, but only what came can prove it wrong.
        tokens = (self.expected + statistics.fmean(counts) + 1) / 2
        self.refresh = REFRESH[self.known.note_gain(tokens, seconds) > SMALL_GAIN]


def policy_for(drafter, target, generation_config, num_rows: int = 1) -> FixedPolicy:
    """The policy of one call of `generate()`, by the drafter's `draft_policy`."""
    if drafter.config.draft_policy == "fixed":
        return FixedPolicy()
    pairs = _known.setdefault(drafter, weakref.WeakKeyDictionary())
    kind = (bool(generation_config.do_sample), num_rows)
    known = pairs.setdefault(target, {}).setdefault(kind, PairStatistics(num_rows))
    return AdaptivePolicy(known, wants_confidences=drafter.device.type == "cpu")


def expected_tokens(chances: Sequence[Sequence[float]]) -> list[float]:
    """
    Tokens that a round gives on average, the target's own included, if 0, 1, ... drafts are verified and each holds with
    its chance; the mean of the rows.
    """
    rows = [list(itertools.accumulate(itertools.accumulate(row, operator.mul), initial=1.0)) for row in chances]
    return [statistics.fmean(column) for column in zip(*rows, strict=True)]


def best_prefix(tokens: Sequence[float], seconds: Sequence[float], least: int = 0) -> int:
    """The number of drafts, from `least` on, with the most tokens per second, given what each gives and costs."""
    return max(range(least, len(tokens)), key=lambda count: tokens[count] / seconds[count])


def bucket_of(place: int, confidence: float | None) -> tuple[int, float]:
    """The drafts that one is counted with, as a key and the acceptance to start from."""
    if confidence is None:
        return (-1 - place, 0.5)
    bucket = min(int(confidence * BUCKETS), BUCKETS - 1)
    return (bucket, (bucket + 0.5) / BUCKETS)


def _counted(old: tuple[float, float], first: float, second: float) -> tuple[float, float]:
    """Both counts with one more outcome; what is long past fades."""
    share = 0.5 if old[1] > FORGET else 1.0
    return (share * old[0] + first, share * old[1] + second)


def _interpolate(known: Sequence[tuple[int, float]], at: int) -> float:
    """The value at `at` on the broken line through `known`, level beyond its ends."""
    below = [point for point in known if point[0] <= at]
    above = [point for point in known if point[0] >= at]
    if not below or not above:
        return (below[-1] if below else above[0])[1]
    (x0, y0), (x1, y1) = below[-1], above[0]
    return y0 if x0 == x1 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)
