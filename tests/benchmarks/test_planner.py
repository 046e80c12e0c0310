"""The planner's benchmark measures what it says: its swarms have the published shares, its jitter only slows."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.planner import CITIES, crowd, jittered, many_peers, published_instance, slower


def test_larger_swarms_have_the_cities_and_the_shares_of_the_published_one():
    instance = many_peers(100, arranged=True)
    assert instance.stage_sizes == (25, 15, 15, 15, 15, 15)
    assert instance.total_microbatches == 150
    published = published_instance("geo-distributed")
    assert instance.link_s[3, 5] == published.link_s[3, 5]
    assert instance.link_s[0, CITIES] == published.link_s[0, CITIES] < 0.5
    assert many_peers(40).stage_of is None


def test_a_crowd_has_about_the_links_of_the_cities():
    """Three dimensions cannot hold twelve cities exactly; half a second of 3.8 is near enough to plan with."""
    people = crowd(2 * CITIES)
    place_ND, access_N = np.asarray(people.coordinates_s), np.asarray(people.access_s)
    away_NN = np.linalg.norm(place_ND[:, None] - place_ND, axis=2) + access_N[:, None] + access_N
    link_s = published_instance("geo-distributed").link_s[:CITIES, :CITIES]
    near = link_s < 4  # but the link that is slow by a slip of units
    assert np.abs(away_NN[:CITIES, :CITIES] - link_s)[near & (link_s > 0)].mean() < 0.5
    assert away_NN[0, CITIES] < 0.8


def test_jitter_lengthens_all_times_by_a_fifth_at_most():
    instance = published_instance("geo-distributed")
    (one,) = slower(instance, 1)
    assert (one.forward_s >= instance.forward_s).all()
    assert (one.link_s <= 1.2 * instance.link_s).all()
    assert jittered(instance, 2) == pytest.approx(0.96, abs=0.03)
