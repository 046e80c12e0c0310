"""The search for paths: many small exchanges between pairs of rows, cooled down; several searches side by side.

A step pairs rows at random and lets each pair exchange a relay: two relays of one stage, or two stages with their
relays. Whatever the exchange leaves, a row runs in its fastest legal order. Loads and visits stay as they were, so
every state is a legal plan. Rows add up independently, so that all pairs of a step are judged at once, in numpy.

The value of a row is its estimated seconds to a high power: the sum then stands for the slowest row, and still
rewards making the others faster, which is what survives when times vary. (Simulated annealing with the thresholds
drawn rather than exponential: no function whose last bit depends on the machine.)
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (numpy's stubs leave the types of reductions, .T and .copy() open)

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocols.planning.draws import Draws
from protocols.planning.instance import Floats, Instance, Ints
from protocols.planning.rows import ABSENT, Rows
from protocols.planning.stage_sets import StageSets, stage_sets

FOCUS_ROWS = 32  # of a large plan, a step looks at the slowest and a few others
BLOCK_STEPS = 32  # after so many, a large plan's focus moves on, and new random numbers are drawn
HOT, COLD = 2.0, 0.01  # thresholds, as shares of the slowest row's value
DOUBLINGS = 4  # a row counts with its 16th power
FAR_US = 1 << 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much to search: searches side by side, and steps of each."""

    searches: int
    steps: int

    @classmethod
    def for_rows(cls, num_rows: int, *, brief: bool = False) -> Effort:
        """Side by side costs little more than one alone: most of a step is numpy's overhead."""
        if brief:
            return cls(searches=12 if num_rows <= 8 else 4, steps=180)
        return cls(searches=16 if num_rows <= 64 else 8, steps=min(220 + 16 * num_rows, 1000))


@dataclass(frozen=True, slots=True, eq=False)
class Judge:
    """Estimates what rows take, and finds their fastest orders."""

    sets: StageSets
    next_SWL: Ints
    round_trip_us: Ints
    relay_us: Ints
    origin_us: Ints
    turns_N: Floats  # of an originator's slots that its microbatches need
    queue_us: Ints  # [N] what a relay's other microbatches occupy it for

    @classmethod
    def of(cls, instance: Instance, rows: Rows) -> Judge:
        sets = stage_sets(instance.rules)
        loads_N = rows.loads_N(instance.num_peers)
        loads_N[loads_N == 0] = rows.weights_A.max(initial=1)  # on the bench: what it would get
        return cls(
            sets=sets,
            next_SWL=np.roll(sets.orders_SWL, -1, axis=2),
            round_trip_us=instance.round_trip_us,
            relay_us=instance.relay_us,
            origin_us=instance.origin_us,
            turns_N=instance.microbatches / instance.origin_slots,
            queue_us=(loads_N - 1) * instance.relay_us,
        )

    def trips_us(self, holders_nK: Ints, sets_n: Ints) -> Ints:
        """[n, W] Unloaded seconds of a microbatch there and back, for each order of the row's set."""
        rows = np.arange(len(holders_nK))[:, None, None]
        hops_nWL = holders_nK[rows, self.sets.orders_SWL[sets_n]]
        next_nWL = holders_nK[rows, self.next_SWL[sets_n]]
        return self.round_trip_us[hops_nWL, next_nWL].sum(axis=2)

    def rows_us(self, holders_nK: Ints, sets_n: Ints) -> Floats:
        """[n] Seconds that a row's originator needs for all its microbatches, if all went this way."""
        present = holders_nK[:, 1:] != ABSENT
        relays = holders_nK[:, 1:]
        owners = holders_nK[:, 0]
        work_us = self.origin_us[owners] + (self.relay_us[relays] * present).sum(axis=1)
        trip_us = self.trips_us(holders_nK, sets_n).min(axis=1) + work_us
        queue_us = (self.queue_us[relays] * present).max(axis=1, initial=0)
        return np.maximum(trip_us * self.turns_N[owners], trip_us + queue_us)

    def estimate(self, rows: Rows) -> tuple[float, float]:
        """Of a whole plan, for a first choice among many: its slowest row, and all rows together."""
        rows_us = self.rows_us(rows.holders_AK, rows.sets_A(self.sets))[rows.weights_A > 0]
        return float(rows_us.max()), math.fsum(rows_us.tolist())

    def best_orders(self, rows: Rows) -> Ints:
        """[A, L] The fastest order of each row; the bench has that of the first set."""
        sets_A = np.maximum(rows.sets_A(self.sets), 0)
        best_A = self.trips_us(rows.holders_AK, sets_A).argmin(axis=1)
        return self.sets.orders_SWL[sets_A, best_A]


def anneal(instance: Instance, start: Rows, effort: Effort, *, seed: int, free: bool = False) -> list[Rows]:
    """One state for each search. `free`: relays and originators may change their stage; each is in one row only."""
    search = _Search(instance, start, effort, seed=seed, free=free)
    cooling = (COLD / HOT) ** (1 / effort.steps)
    temperature = HOT
    for step in range(effort.steps):
        search.step(step % BLOCK_STEPS, temperature)
        temperature *= cooling
    return search.states()


class _Search:
    """C searches of A rows each, one below the other: row `a` of search `c` is line c * A + a."""

    def __init__(self, instance: Instance, start: Rows, effort: Effort, *, seed: int, free: bool) -> None:
        self._judge = Judge.of(instance, start)
        self._sets = self._judge.sets
        self._draws = Draws(seed)
        self._weights_A = start.weights_A
        self._free = free
        self._searches, self._rows = effort.searches, len(start.weights_A)
        self._focus = min(FOCUS_ROWS, self._rows) // 2 * 2
        self._holders = np.tile(start.holders_AK, (effort.searches, 1))
        self._weights = np.tile(start.weights_A, effort.searches)
        self._shares = self._weights / instance.microbatches
        self._chosen = np.tile(start.sets_A(self._sets), effort.searches)
        self._stages = self._sets.orders_SWL[
            self._chosen, 0
        ]  # that a line may exchange; the bench has one alone
        bench = self._chosen == ABSENT
        self._stages[bench] = (self._holders[bench] != ABSENT).argmax(axis=1)[:, None]
        self._scale_us = max(1.0, float(self._judge.rows_us(self._holders, self._chosen)[~bench].max()))
        self._values = self._value(self._holders, self._chosen, self._shares)

    def states(self) -> list[Rows]:
        stacked = self._holders.reshape(self._searches, self._rows, -1)
        return [Rows(holders_AK, self._weights_A) for holders_AK in stacked]

    def step(self, number: int, temperature: float) -> None:
        """Pair rows, let each pair exchange something, keep what is better or not much worse."""
        if number == 0:
            self._draw_block()
        a, b = self._pairs[number, :, 0], self._pairs[number, :, 1]
        picks_2P = self._picks[number]
        allowed, holders_a, holders_b, chosen_a, chosen_b = self._exchange(a, b, picks_2P)
        kept = np.flatnonzero(allowed)
        lines = np.concatenate((a[kept], b[kept]))
        holders = np.concatenate((holders_a[kept], holders_b[kept]))
        chosen = np.concatenate((chosen_a[kept], chosen_b[kept]))
        values = self._value(holders, chosen, self._shares[lines])
        gains = values - self._values[lines]
        worst = self._values.reshape(self._searches, self._rows).max(axis=1)[a[kept] // self._rows]
        pairs = len(kept)
        accepted = gains[:pairs] + gains[pairs:] < temperature * worst * self._thresholds[number][kept]
        both = np.concatenate((accepted, accepted))
        self._replace(lines[both], holders[both], chosen[both], values[both])

    def _value(self, holders: Ints, chosen: Ints, shares: Floats) -> Floats:
        powers = self._judge.rows_us(holders, chosen) / self._scale_us
        for _ in range(DOUBLINGS):
            powers = powers * powers
        return np.where(shares > 0, powers * shares, 0.0)

    def _draw_block(self) -> None:
        """Choose the rows that the next steps look at, their pairs, and what each pair tries."""
        focus = self._focused_lines()
        keys = self._draws.uniform(BLOCK_STEPS, self._searches, self._focus)
        shuffled = np.argsort(keys, axis=2, kind="stable")
        self._pairs = focus[np.arange(self._searches)[:, None], shuffled].reshape(BLOCK_STEPS, -1, 2)
        pairs, path_stages = self._pairs.shape[1], self._stages.shape[1]
        self._picks = (self._draws.uniform(BLOCK_STEPS, 2, pairs) * path_stages).astype(np.int64)
        self._thresholds = self._draws.uniform(BLOCK_STEPS, pairs) ** 2

    def _focused_lines(self) -> Ints:
        """[C, focus] All rows (but one of an odd number); of a large plan, the slowest and a quarter of others."""
        keys = self._draws.uniform(self._searches, self._rows)
        values = self._values.reshape(self._searches, self._rows)
        slowest = np.argsort(-values, axis=1, kind="stable")[:, : self._focus * 3 // 4]
        searches = np.arange(self._searches)[:, None]
        keys[searches, slowest] = -1.0
        return np.argsort(keys, axis=1, kind="stable")[:, : self._focus] + searches * self._rows

    def _exchange(self, a: Ints, b: Ints, picks_2P: Ints) -> tuple[NDArray[np.bool_], Ints, Ints, Ints, Ints]:
        """What the pairs would become, and which of them may."""
        pair = np.arange(len(a))
        holders_a, holders_b = self._holders[a], self._holders[b]
        chosen_a, chosen_b = self._chosen[a], self._chosen[b]
        stage_a, stage_b = self._stages[a, picks_2P[0]], self._stages[b, picks_2P[1]]
        allowed = np.ones(len(a), dtype=np.bool_)
        if not self._free:
            shared = holders_b[pair, stage_a] != ABSENT  # both run it: exchange its relays
            stage_b = np.where(shared, stage_a, stage_b)
            stage_a = np.where(shared | (holders_a[pair, stage_b] == ABSENT), stage_a, stage_b)
            flip = np.where(stage_a == stage_b, 0, (1 << stage_a) | (1 << stage_b))
            weights_a, weights_b = self._weights[a], self._weights[b]
            chosen_a, valid_a = self._changed(chosen_a, flip)
            chosen_b, valid_b = self._changed(chosen_b, flip)
            allowed = valid_a & valid_b & ((weights_a == weights_b) | (weights_a * weights_b == 0))
        relays_a, relays_b = holders_a[pair, stage_a], holders_b[pair, stage_b]
        if not self._free:
            holders_a[pair, stage_a] = ABSENT
            holders_b[pair, stage_b] = ABSENT
            stage_a, stage_b = stage_b, stage_a
        holders_a[pair, stage_a] = relays_b
        holders_b[pair, stage_b] = relays_a
        return allowed, holders_a, holders_b, chosen_a, chosen_b

    def _changed(self, chosen: Ints, flip: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Sets after the exchange of two stages; the bench can exchange none."""
        found = self._sets.find(self._sets.masks_S[chosen] ^ flip)
        changed = np.where(flip == 0, chosen, found)
        return changed, (flip == 0) | ((found != ABSENT) & (chosen != ABSENT))

    def _replace(self, lines: Ints, holders: Ints, chosen: Ints, values: Floats) -> None:
        self._holders[lines] = holders
        self._chosen[lines] = chosen
        self._values[lines] = values
        runs = chosen != ABSENT
        self._stages[lines[runs]] = self._sets.orders_SWL[chosen[runs], 0]
