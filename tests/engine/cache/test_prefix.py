"""Known beginnings: what is found, for whom, and what goes when there is no room."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from engine.cache.pages import PageId, PagePool, SnapshotId, SnapshotPool
from engine.cache.prefix import NOTHING, Block, Chain, PrefixCache
from engine.messages import Picture
from tests.fakes.pipeline import a_plan_of_caches

SIZE = 4  # tokens a page


def a_picture(position: int, tokens: int, digest: str) -> Picture:
    return Picture(b"", (1, 1, tokens), position, tokens, digest)


def keys(
    *tokens: int, salt: str = "", pictures: tuple[Picture, ...] = (), size: int = SIZE
) -> list[bytes]:
    return Chain(salt, pictures, size).reach(tokens, len(tokens) // size)


class Keeper:
    """A pool and a cache of its pages, and sequences that run and end."""

    def __init__(self, *, pages: int = 16, snapshots: int = 8, budget: int = 100) -> None:
        plan = a_plan_of_caches(
            pages=pages, page_tokens=SIZE, snapshots=snapshots, reuse_bytes=budget
        )
        self.pool = PagePool(pages, SIZE)
        self.cache = PrefixCache(plan, self.pool)

    def run(self, chain: list[bytes], *snapshots: int) -> None:
        """A sequence that computes all of its pages, saves behind some of them, and ends."""
        with self.pool.reserve(len(chain)) as pages:
            held: list[Block] = []
        taken = [(page, self.cache.take_snapshot()) for page in snapshots]
        saved = {page: place for page, place in taken if place is not None}
        self.cache.enter(held, chain, pages, saved)
        for place in saved.values():
            self.cache.snapshots.release(place)
        self.end(held, pages)

    def end(self, held: list[Block], pages: tuple[PageId, ...]) -> None:
        self.cache.leave(held)
        self.pool.release(pages)

    def found(self, chain: list[bytes]) -> tuple[int, int]:
        """Pages that can be used, and pages that are known."""
        match = self.cache.find(chain)
        return len(match.blocks), match.known


def test_a_beginning_is_found_up_to_its_last_snapshot() -> None:
    """glm5_next.md 13: recurrent layers need their state at exactly that row."""
    keeper = Keeper()
    keeper.run(keys(*range(20)), 0, 2)

    assert keeper.found(keys(*range(20))) == (3, 5)
    assert keeper.found(keys(*range(9), 99, 99, 99)) == (1, 2)
    assert keeper.found(keys(99, *range(1, 20))) == (0, 0)


def test_the_same_ids_at_another_place_are_not_found() -> None:
    keeper = Keeper()
    keeper.run(keys(1, 1, 1, 1, 2, 2, 2, 2), 0, 1)

    assert keeper.found(keys(2, 2, 2, 2)) == (0, 0)


def test_salts_separate() -> None:
    """O25."""
    keeper = Keeper()
    keeper.run(keys(*range(8), salt="a"), 1)

    assert keeper.found(keys(*range(8), salt="a")) == (2, 2)
    assert keeper.found(keys(*range(8), salt="b")) == (0, 0)
    assert keeper.found(keys(*range(8))) == (0, 0)


def test_a_page_with_rows_of_a_picture_is_found_by_that_picture_only() -> None:
    """Rule 38, O59: the text in front of another picture is found, the picture is not."""
    keeper = Keeper()
    ids = (1, 2, 3, 4, 5, 90, 90, 90, 90, 90, 6, 7)
    keeper.run(keys(*ids, pictures=(a_picture(5, 5, "red"),)), 0, 1, 2)

    assert keeper.found(keys(*ids, pictures=(a_picture(5, 5, "red"),))) == (3, 3)
    assert keeper.found(keys(*ids, pictures=(a_picture(5, 5, "sky"),))) == (1, 1)
    # Two pictures whose rows change hands inside a page are not one.
    parts = (a_picture(5, 3, "red"), a_picture(8, 2, "red"))
    assert keeper.found(keys(*ids, pictures=parts)) == (1, 1)


def test_a_chain_grows_with_its_tokens() -> None:
    chain = Chain("", (), SIZE)

    assert chain.reach([1, 2, 3, 4, 5], 1) == keys(1, 2, 3, 4)
    assert chain.reach([1, 2, 3, 4, 5, 6, 7, 8], 2) == keys(1, 2, 3, 4, 5, 6, 7, 8)


def test_what_is_held_is_not_evicted_and_what_is_idle_is_room() -> None:
    keeper = Keeper(pages=4)
    keeper.run(keys(*range(8)), 0, 1)
    keeper.run(keys(*range(50, 58)), 1)
    assert (keeper.pool.free, keeper.cache.idle) == (0, 4)

    match = keeper.cache.find(keys(*range(8)))
    pages = keeper.cache.hold(match)

    assert keeper.cache.idle == 2
    assert not keeper.cache.evict(3)
    assert keeper.pool.free == 2
    assert keeper.found(keys(*range(8))) == (2, 2)
    assert [keeper.pool.owners(page) for page in pages] == [2, 2]


def test_the_end_of_the_least_recently_used_chain_goes_first() -> None:
    keeper = Keeper(pages=6)
    keeper.run(keys(*range(12)), 0, 1, 2)
    keeper.run(keys(*range(50, 62)), 0, 1, 2)

    keeper.cache.evict(1)
    assert keeper.found(keys(*range(12))) == (2, 2)

    match = keeper.cache.find(keys(*range(12)))
    pages = keeper.cache.hold(match)
    keeper.cache.leave(match.blocks)
    keeper.pool.release(pages)
    keeper.cache.evict(1)
    assert keeper.found(keys(*range(12))) == (2, 2)
    assert keeper.found(keys(*range(50, 62))) == (2, 2)


def test_the_budget_counts_pages_and_snapshots() -> None:
    keeper = Keeper(budget=7)
    keeper.run(keys(*range(16)), 1, 3)
    assert keeper.cache.size == 6

    keeper.run(keys(*range(50, 66)), 3)

    assert keeper.cache.size <= 7
    assert keeper.found(keys(*range(50, 66))) == (4, 4)
    keeper.cache.clear()
    assert (keeper.cache.size, keeper.cache.idle, keeper.cache.blocks) == (0, 0, 0)
    assert keeper.pool.free == keeper.pool.total
    assert keeper.cache.snapshots.out == 0


def test_what_failed_is_found_by_nobody_nor_is_what_was_computed_behind_it() -> None:
    """R66, rule 87."""
    keeper = Keeper()
    first = keys(*range(4))
    with keeper.pool.reserve(1) as pages:
        failing: list[Block] = []
    place = keeper.cache.take_snapshot()
    assert place is not None
    keeper.cache.enter(failing, first, pages, {0: place})
    match = keeper.cache.find(first)
    shared = keeper.cache.hold(match)  # another sequence goes on from there
    held = list(match.blocks)
    with keeper.pool.reserve(1) as own:
        keeper.cache.enter(held, keys(*range(8)), shared + own, {})

    keeper.cache.forget(failing)
    keeper.end(failing, pages)
    keeper.cache.enter(held, keys(*range(8)), shared + own, {})
    keeper.end(held, shared + own)
    keeper.cache.snapshots.release(place)

    assert keeper.found(keys(*range(8))) == (0, 0)
    assert keeper.pool.free == keeper.pool.total
    assert keeper.cache.snapshots.out == 0


def test_without_a_budget_nothing_is_kept() -> None:
    keeper = Keeper(budget=0)
    keeper.run(keys(*range(8)), 0, 1)

    assert not keeper.cache.on
    assert keeper.cache.find(keys(*range(8))) is NOTHING
    assert keeper.cache.take_snapshot() is None


def test_a_snapshot_place_is_free_when_its_last_owner_let_it_go() -> None:
    pool = SnapshotPool(1)
    place = pool.take()
    assert place is not None
    pool.share(place)
    pool.release(place)
    assert pool.take() is None
    pool.release(place)
    assert (pool.out, pool.take()) == (0, place)
    with pytest.raises(KeyError):
        pool.release(SnapshotId(5))


class Plain:
    """The same, slow and obvious: prefixes as tuples of ids, oldest use first, one list."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.known: OrderedDict[tuple[int, ...], bool] = OrderedDict()  # prefix -> has a snapshot

    @property
    def size(self) -> int:
        return len(self.known) + sum(self.known.values())

    def found(self, ids: tuple[int, ...]) -> tuple[int, int]:
        usable = known = 0
        for end in range(SIZE, len(ids) + 1, SIZE):
            if ids[:end] not in self.known:
                break
            known = end // SIZE
            usable = known if self.known[ids[:end]] else usable
        return usable, known

    def run(self, ids: tuple[int, ...], snapshot: int) -> None:
        """Pages first to last, each making room for itself; then used, the first page last."""
        ends = range(SIZE, len(ids) + 1, SIZE)
        mine: set[tuple[int, ...]] = set()
        self._make_room(1, mine)
        waiting = 1  # the snapshot has its place before any page is entered
        for end in ends:
            prefix = ids[:end]
            if prefix not in self.known:
                if not self._make_room(1 + waiting, mine):
                    break
                if end > SIZE and ids[: end - SIZE] not in self.known:
                    break
                self.known[prefix] = False
                mine.add(prefix)
            if end == (snapshot + 1) * SIZE and not self.known[prefix]:
                self.known[prefix] = True
                waiting = 0
        for end in reversed(ends):
            if ids[:end] in self.known and ids[:end] not in mine:
                self.known.move_to_end(ids[:end])
        for end in reversed(ends):
            if ids[:end] in mine:
                self.known.move_to_end(ids[:end])

    def _make_room(self, more: int, mine: set[tuple[int, ...]]) -> bool:
        while self.size + more > self.budget:
            old = next((p for p in self.known if p not in mine), None)
            if old is None:
                return False
            for prefix in [p for p in self.known if p[: len(old)] == old]:
                del self.known[prefix]
                mine.discard(prefix)
        return True


@pytest.mark.parametrize("seed", range(10))
def test_it_finds_what_the_slow_and_obvious_one_finds(seed: int) -> None:
    """Random sequences over a tiny alphabet, so that beginnings meet and part; a small budget."""
    draw = random.Random(seed)
    budget = draw.choice([6, 12, 30])
    keeper, plain = Keeper(pages=60, snapshots=60, budget=budget), Plain(budget)
    hits = 0

    for _ in range(400):
        pages = draw.randint(1, 5)
        ids = tuple(page for _ in range(pages) for page in [draw.randint(0, 1)] * SIZE)
        want = plain.found(ids)
        assert keeper.found(keys(*ids)) == want
        hits += want[0]
        snapshot = draw.randrange(pages)
        keeper.run(keys(*ids), snapshot)
        plain.run(ids, snapshot)
        assert keeper.cache.size == plain.size
        assert keeper.cache.idle == keeper.cache.blocks == len(plain.known)
        assert keeper.pool.free == 60 - len(plain.known)

    assert hits > 50
    keeper.cache.clear()
    assert (keeper.pool.free, keeper.cache.snapshots.out) == (60, 0)
