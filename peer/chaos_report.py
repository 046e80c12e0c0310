"""What a swarm made of chaos: for each blow what was done about it and how long it took, and what it cost in all.

Everything is read from the flight recorders. A retry names the peer that was lost, a recovery its stage; so each is put
down to the last blow before it at that peer or stage. What names neither is put down to the last blow of all.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from peer.chaos import Blow, Strike
from peer.flights import TAIL, Counted, Finished, Flights, LossPoint, loss_ratio
from peer.status import PeerStatus
from protocols.run_spec import RunSpec

RECOVERED, RETRIED = "recovery-done", "retry"
TOLD = {
    "microbatch-given-up": "given up",
    "stage-adopted": "adoption",
    "left-behind": "start over",
    "donor-failed": "donor failed",
    "recovery-refused": "recovery refused",
    "round-deadline": "round deadline",
}
"""Count to its word in the report. A recovery is told by its source: catch-up, merge, copy and so on."""

_STAGE = re.compile(r"stage (\d+): (.+)")
_ADOPTED = re.compile(r"stage \d+ -> (\d+)")
_ATTEMPT = re.compile(r"m:(\w+)/(\d+)#\d+ (.+)")  # the originator's tail, the counter, why


@dataclass(slots=True, kw_only=True)
class Answer:
    """`microbatch_s`: to the next that finished; `redone_s`: until all that had to be sent again were finished.

    None: there was none, or not before the end.
    """

    strike: Strike
    microbatch_s: float | None = None
    redone_s: float | None = None
    rungs: Counter[str] = field(default_factory=Counter[str])
    disturbed: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])


def answers(strikes: Sequence[Strike], flights: Flights, spec: RunSpec) -> list[Answer]:
    """One for each strike, in their order."""
    found = [Answer(strike=strike) for strike in strikes]
    for counted in flights.counted:
        _put_down(found, counted)
    usual_skips = spec.num_stages - spec.path_stages
    for microbatch in flights.trained:
        if len(microbatch.skipped) > usual_skips:
            answer = _culprit(found, microbatch.at_s, _of_stages(microbatch.skipped))
            if answer is not None:
                answer.rungs["skip"] += 1
    done = [each for each in flights.finished if each.loss is not None]
    for answer in found:
        _time(answer, done)
    return found


def _put_down(found: Sequence[Answer], counted: Counted) -> None:
    if counted.name == RETRIED:
        attempt = _ATTEMPT.fullmatch(counted.detail)
        answer = _culprit(found, counted.at_s, _of_peer(attempt[3])) if attempt is not None else None
        if answer is not None and attempt is not None:
            answer.rungs["reroute"] += 1
            answer.disturbed.add((attempt[1], int(attempt[2])))
        return
    if counted.name == RECOVERED:
        told = _STAGE.fullmatch(counted.detail)
        stage, word = (int(told[1]), told[2]) if told else (None, "recovery")
    elif counted.name in TOLD:
        adopted = _ADOPTED.search(counted.detail)
        stage, word = int(adopted[1]) if adopted else None, TOLD[counted.name]
    else:
        return
    answer = _culprit(found, counted.at_s, _of_stages(() if stage is None else (stage,)))
    if answer is not None:
        answer.rungs[word] += 1


def _of_peer(why: str) -> Callable[[Strike], bool]:
    return lambda strike: any(victim.peer[-TAIL:] in why for victim in strike.victims)


def _of_stages(stages: Iterable[int]) -> Callable[[Strike], bool]:
    wanted = set(stages)
    return lambda strike: any(victim.stage in wanted for victim in strike.victims)


def _culprit(found: Sequence[Answer], at_s: float, fits: Callable[[Strike], bool]) -> Answer | None:
    """The last blow before `at_s` that fits, else the last before it."""
    before = [answer for answer in found if answer.strike.at_s <= at_s]
    fitting = [answer for answer in before if fits(answer.strike)]
    return (fitting or before or [None])[-1]


def _time(answer: Answer, done: Sequence[Finished]) -> None:
    since_s = answer.strike.at_s
    after = [each for each in done if each.at_s > since_s]
    answer.microbatch_s = next((each.at_s - since_s for each in after if each.train), None)
    disturbed = [each.at_s for each in after if (each.originator, each.counter) in answer.disturbed]
    if disturbed:
        answer.redone_s = max(disturbed) - since_s


# ---- words and numbers ----------------------------------------------------------------------------------------------


def summary(
    spec: RunSpec,
    found: Sequence[Answer],
    flights: Flights,
    statuses: Sequence[PeerStatus],
    undisturbed: Flights | None = None,
) -> dict[str, Any]:
    """All of it as plain values; `statuses` are of the peers that lived to the end."""
    curve = flights.curve(spec.tokens_per_microbatch)
    against = undisturbed.curve(spec.tokens_per_microbatch) if undisturbed is not None else []
    begun_s = found[0].strike.at_s if found else 0.0
    counters: Counter[str] = Counter()
    for status in statuses:
        counters.update({name: int(value) for name, value in status.counters.items()})
    return {
        "run_id": spec.run_id,
        "round_s": flights.round_s(),
        "tokens": len(flights.trained) * spec.tokens_per_microbatch,
        "validation_loss": curve[-1].loss if curve else None,
        "loss_ratio": loss_ratio(curve, against) if against else None,
        "curve": _plain_curve(curve),
        "undisturbed": _plain_curve(against),
        "events": [_plain_answer(answer, begun_s) for answer in found],
        "rungs": dict(sum((answer.rungs for answer in found), Counter[str]())),
        "counters_of_the_living": dict(counters),
    }


def _plain_curve(curve: Sequence[LossPoint]) -> list[dict[str, float]]:
    return [{"round": point.round, "tokens": point.tokens, "loss": point.loss} for point in curve]


def _plain_answer(answer: Answer, begun_s: float) -> dict[str, Any]:
    strike = answer.strike
    return {
        "at_s": strike.at_s - begun_s,
        "round": strike.round,
        "blow": strike.blow.value,
        "victims": [asdict(victim) for victim in strike.victims],
        "away_s": strike.away_s,
        "microbatch_s": answer.microbatch_s,
        "redone_s": answer.redone_s,
        "rungs": dict(answer.rungs),
    }


def in_words(found: Sequence[Answer], told: Mapping[str, Any]) -> str:
    """A table of the blows, then what they cost."""
    rows = [("round", "what happened", "what was done", "next microbatch", "all redone")]
    rows += [
        (
            str(answer.strike.round),
            answer.strike.what,
            ", ".join(f"{number} {rung}" for rung, number in answer.rungs.most_common())
            or "nothing was needed",
            _seconds(answer.microbatch_s),
            _seconds(answer.redone_s),
        )
        for answer in found
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    kills = [a.microbatch_s for a in found if a.strike.blow is not Blow.FREEZE and a.microbatch_s is not None]
    if kills:
        lines.append(
            f"from a kill to the next finished microbatch: median {median(kills):.2f} s, worst {max(kills):.2f} s;"
            f" a round takes {told['round_s']:.2f} s"
        )
    if told["validation_loss"] is not None:
        ratio = told["loss_ratio"]
        beside = "" if ratio is None else f", {ratio:.4f} times that of the undisturbed run at equal tokens"
        lines.append(f"validation loss {told['validation_loss']:.3f}{beside}")
    return "\n".join(lines)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"
