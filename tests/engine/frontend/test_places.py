"""`Places`: what is free is anybody's, and a fair share is a client's own."""

from __future__ import annotations

from fractions import Fraction

from realizar.engine.frontend.places import Places
from realizar.request import NO_CLIENT, Client


def filled(places: Places, client: Client, num_places: int) -> int:
    """Take as many as the client gets; their number."""
    count = 0
    while places.has_room(client, 1, num_places):
        places.take(client)
        count += 1
    return count


def test_a_lone_client_has_all_and_whoever_comes_after_has_a_share() -> None:
    places = Places()
    assert filled(places, Client("a"), 60) == 60
    assert [filled(places, Client(name), 60) for name in "bcd"] == [30, 20, 15]
    places.give(Client("a"), 40)
    assert filled(places, Client("a"), 60) == 0  # 20 are more than a quarter, and none is free
    places.give(Client("a"), 10)
    assert filled(places, Client("a"), 60) == 5
    for name, count in (("a", 15), ("b", 30), ("c", 20)):
        places.give(Client(name), count)
    assert filled(places, Client("d"), 60) == 45
    places.give(Client("d"), 60)
    assert places.num_taken == 0
    assert filled(places, Client("b"), 60) == 60


def test_shares_follow_weights() -> None:
    places = Places()
    heavy, light = Client("heavy", 3), Client("light", 1)
    assert (filled(places, light, 40), filled(places, heavy, 40)) == (40, 30)
    assert not places.has_room(light, 1, 40)


def test_each_of_very_many_clients_gets_a_place() -> None:
    """The sum stays near what a harmonic series says."""
    places = Places()
    assert filled(places, NO_CLIENT, 32) == 32
    for number in range(100):
        assert places.has_room(Client(f"{number}"), 1, 32)
        filled(places, Client(f"{number}"), 32)
    assert places.num_taken <= 100 + 32 * sum(Fraction(1, place) for place in range(1, 33))


def test_a_request_beyond_the_share_is_refused_as_a_whole() -> None:
    places = Places()
    places.take(Client("a"), 10)
    assert places.has_room(Client("b"), 5, 10)
    assert not places.has_room(Client("b"), 6, 10)
