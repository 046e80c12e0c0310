"""When is a round over for a replica?"""

from __future__ import annotations

from protocols.rounds import AWAY_ROUND, CLOSED_MAX, RoundLedger
from tests.protocols.builders import key


def test_a_round_is_over_when_all_announced_work_is_done():
    ledger = RoundLedger()
    ledger.announce("a1", 0, (key(0), key(1)))
    assert not ledger.is_finished(["a1"])
    ledger.close(key(0))
    ledger.close(key(1))
    assert ledger.is_finished(["a1"])


def test_the_first_round_waits_for_everybody_in_the_view():
    """Nobody has spoken yet; whoever is in the table will."""
    ledger = RoundLedger()
    ledger.announce("a1", 0, ())
    assert not ledger.is_finished(["a1", "a2"])
    assert ledger.silent(["a1", "a2"]) == ["a2"]
    ledger.announce("a2", 0, ())
    assert ledger.is_finished(["a1", "a2"])


def test_no_round_ends_without_an_originator():
    """Else a relay whose originators all died would run through all rounds on its own."""
    ledger = RoundLedger()
    assert not ledger.is_finished([])
    ledger.announce("a1", 0, ())
    ledger.forget_originator("a1")
    assert not ledger.is_finished(["a1"])


def test_a_paused_originator_ends_nobodys_run():
    """Found by the simulator: with all originators paused, relays jumped to the last round of the run."""
    ledger = RoundLedger(3)
    ledger.announce("a1", 3, ())
    ledger.announce("a1", AWAY_ROUND, ())
    assert not ledger.is_finished(["a1"])
    assert ledger.lowest_announced(["a1"]) == 3


def test_an_originator_that_comes_back_is_waited_for_again():
    ledger = RoundLedger(3)
    ledger.announce("a1", 3, ())
    ledger.announce("a2", AWAY_ROUND, ())
    assert ledger.is_finished(["a1", "a2"])
    ledger.advance()
    ledger.announce("a2", 3, (key(7, originator="a2"),))
    ledger.announce("a1", 4, ())
    assert not ledger.is_finished(["a1", "a2"])


def test_a_laggard_is_served_but_not_waited_for():
    """It slept through twenty rounds: the others must not stand still until it has done them."""
    ledger = RoundLedger(20)
    ledger.announce("a1", 20, ())
    ledger.announce("a2", 1, ())
    assert ledger.is_finished(["a1", "a2"])


def test_a_retry_that_was_not_announced_is_added():
    ledger = RoundLedger()
    ledger.announce("a1", 0, ())
    ledger.expect(key(0, 2), 0)
    assert not ledger.is_finished(["a1"])
    ledger.close(key(0, 2))
    assert ledger.is_finished(["a1"])


def test_a_closed_attempt_stays_closed():
    """A plan that was overtaken by its own release must not bring the attempt back to life."""
    ledger = RoundLedger()
    ledger.close(key(0))
    ledger.announce("a1", 0, (key(0),))
    assert ledger.outstanding() == 0
    assert ledger.is_closed(key(0))


def test_the_next_plan_makes_a_lost_release_good():
    """Found by the simulator: behind a cut link a relay waited its whole round deadline for a released attempt."""
    ledger = RoundLedger()
    ledger.announce("a1", 0, (key(0), key(1)))
    assert ledger.announce("a1", 1, (key(1), key(2))) == [key(0)]
    assert ledger.announce("a1", 1, (key(2, 2),)) == []  # a retry's plan adds
    assert ledger.announce("a1", 0, (key(1, 2),)) == []


def test_a_plan_that_repeats_an_open_attempt_leaves_it_in_its_round():
    ledger = RoundLedger()
    ledger.announce("a1", 0, (key(0),))
    ledger.announce("a1", 1, (key(0),))
    assert not ledger.is_finished(["a1"])


def test_a_deadline_expects_nothing_more_of_the_silent():
    ledger = RoundLedger()
    ledger.announce("a1", 0, (key(0),))
    assert ledger.give_up(["a1", "a2"]) == [key(0)]
    assert ledger.is_finished(["a1", "a2"])


def test_other_weights_begin_with_clean_books():
    """Found by the simulator: an adopter waited 90 s for work that was announced to its old stage."""
    ledger = RoundLedger()
    ledger.announce("a1", 0, (key(0),))
    ledger.restart(5)
    assert ledger.round == 5
    assert ledger.outstanding() == 0


def test_the_memory_of_closed_attempts_is_bounded():
    ledger = RoundLedger()
    for counter in range(CLOSED_MAX + 10):
        ledger.close(key(counter))
    assert not ledger.is_closed(key(0))
    assert ledger.is_closed(key(CLOSED_MAX + 9))
