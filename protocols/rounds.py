"""Round accounting of one replica: when is everything done that was announced to it?

`round` counts the inner steps that the replica's weights have seen. Round r is finished when every originator that
keeps step (it has announced round r - 1 or later) has announced round r, and no attempt of a round <= r is
outstanding. Released attempts are subtracted; an attempt that arrives unannounced (a retry on another path) is added.
An originator further behind (it was paused, stopped, or has just joined) is served but not waited for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from protocols.messages import WorkKey
from protocols.swarm import PeerId

AWAY_ROUND = 1 << 40  # announced by an originator that pauses or leaves: wait for none of my rounds
_UNHEARD = -1  # has not spoken yet: waited for in round 0 only
_ABSENT = -2  # paused, gone or silent: not waited for until it speaks again
CLOSED_MAX = 4096  # remembered attempts that are over, so that a late message cannot reopen one


class RoundLedger:
    """Invariant: no key is both expected and closed."""

    def __init__(self, round_: int = 0) -> None:
        self.round = round_
        self._announced: dict[PeerId, int] = {}
        self._expected: dict[WorkKey, int] = {}
        self._closed: OrderedDict[WorkKey, None] = OrderedDict()

    def announce(self, originator: PeerId, round_: int, keys: tuple[WorkKey, ...]) -> list[WorkKey]:
        """The plan of a new round lists all live attempts that come here; returns those that thereby are over.

        So a Release that was lost is made good one round later. The plan of a retry repeats an older round and adds.
        """
        known = self._announced.get(originator, _UNHEARD)
        if round_ >= AWAY_ROUND:
            self._announced[originator] = _ABSENT
            return []
        self._announced[originator] = max(known, round_)
        for key in keys:
            self.expect(key, round_)
        if round_ <= known:
            return []
        return [key for key in self._expected if key.originator == originator and key not in keys]

    def expect(self, key: WorkKey, round_: int) -> None:
        if key not in self._closed:
            self._expected.setdefault(key, round_)

    def close(self, key: WorkKey) -> None:
        """Done or released."""
        self._expected.pop(key, None)
        self._closed[key] = None
        self._closed.move_to_end(key)
        if len(self._closed) > CLOSED_MAX:
            self._closed.popitem(last=False)

    def is_closed(self, key: WorkKey) -> bool:
        return key in self._closed

    def forget_originator(self, originator: PeerId) -> list[WorkKey]:
        """It is gone: nothing of it is waited for any more. Returns the keys that were still expected."""
        self._announced[originator] = _ABSENT
        gone = [key for key in self._expected if key.originator == originator]
        for key in gone:
            self.close(key)
        return gone

    def restart(self, round_: int) -> None:
        """Other weights are in place: what was announced for the old ones concerns us no more."""
        self.round = round_
        self._expected.clear()

    def _in_step(self, originators: Iterable[PeerId]) -> list[int]:
        """The announced rounds of those that are waited for."""
        announced = [self._announced.get(peer, _UNHEARD) for peer in originators]
        return [round_ for round_ in announced if round_ >= self.round - 1]

    def is_finished(self, originators: Iterable[PeerId]) -> bool:
        """`originators`: those in the view. Without one that keeps step, no round finishes."""
        if any(round_ <= self.round for round_ in self._expected.values()):
            return False
        return min(self._in_step(originators), default=_ABSENT) >= self.round

    def silent(self, originators: Iterable[PeerId]) -> list[PeerId]:
        """Those without whose word the current round cannot finish."""
        return [peer for peer in originators if self._announced.get(peer, _UNHEARD) == self.round - 1]

    def has_begun(self) -> bool:
        """Somebody announced the current round (or a later one)."""
        return any(round_ >= self.round for round_ in self._announced.values())

    def give_up(self, originators: Iterable[PeerId]) -> list[WorkKey]:
        """The round's time is over: expect the outstanding no more, wait no longer for those that kept silent.

        An attempt that still arrives counts in the round of that moment.
        """
        for peer in originators:
            if self._announced.get(peer, _UNHEARD) < self.round:
                self._announced[peer] = _ABSENT
        late = [key for key, round_ in self._expected.items() if round_ <= self.round]
        for key in late:
            del self._expected[key]
        return late

    def lowest_announced(self, originators: Iterable[PeerId]) -> int:
        """The round that every originator in step has reached."""
        return min(self._in_step(originators), default=self.round)

    def newest_announced(self) -> int:
        """How far the originator in front is, as far as we have heard."""
        return max(self._announced.values(), default=_UNHEARD)

    def outstanding(self) -> int:
        return len(self._expected)

    def advance(self) -> None:
        self.round += 1
