"""What was made last is kept while there is room, and made by one thread."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from orchdata.loaders.shards.shard import Recent


def test_the_least_recently_used_are_let_go() -> None:
    recent: Recent[str] = Recent(10)
    for name in "abc":
        recent.made(name, lambda name=name: (name.upper(), 3))
    assert recent.get("a") == "A"
    recent.made("d", lambda: ("D", 4))  # 13 bytes, of which b has waited longest
    assert [recent.get(name) for name in "abcd"] == ["A", None, "C", "D"]
    recent.made("e", lambda: ("E", 11))
    assert [recent.get(name) for name in "acde"] == ["A", "C", "D", None], "more than all room is not kept"


def test_a_value_is_made_by_one_thread_while_others_wait() -> None:
    recent: Recent[int] = Recent(100)
    begun, go_on = threading.Event(), threading.Event()
    made: list[int] = []

    def make() -> tuple[int, int]:
        made.append(len(made))
        begun.set()
        assert go_on.wait(30)
        return made[-1], 1

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(recent.made, "name", make) for _ in range(4)]
        assert begun.wait(30)
        assert recent.made("other", lambda: (7, 1)) == 7, "another name does not wait"
        go_on.set()
        assert [future.result(30) for future in futures] == [0] * 4
    assert made == [0]
