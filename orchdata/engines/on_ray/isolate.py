"""Does a sample end its process? The samples of a step that was lost are loaded alone, in an actor that Ray does not
restart: one at which two actors end, or hang, is bad. They are on two nodes where there are two with room.

rows --one after another, an actor after another--> (row, why it is bad)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from orchdata.engines.on_ray.deaths import described, is_own_end
from orchdata.engines.on_ray.fleet import ANSWER_SECONDS, ask_whether_it_waits

_ENDS: Final = 2
_MOST_STARTS: Final = 8
_TICK_SECONDS: Final = 0.5

Start = Callable[[str | None], Any]
"""Node to avoid, if another has room, or None -> an actor."""


class Stopped(Exception):
    """The engine is closed."""


class Isolation:
    """Loads samples alone.

    Args:
        start: starts an actor.
        timeout: seconds after which a sample counts as hung; 0 for no limit.
        start_timeout: seconds that an actor may take to start.
        is_stopping: whether to give up.

    Attributes:
        last_loss: why an actor was lost last, other than by its sample; "" if none was.
    """

    def __init__(
        self,
        start: Start,
        *,
        timeout: float,
        start_timeout: float,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._start = start
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._is_stopping = is_stopping
        self._actor: Any = None
        self._node: str | None = None
        self._starts = 0
        self.last_loss = ""

    def bad_rows(self, rows: Sequence[int]) -> Iterator[tuple[int, str]]:
        """Yield the rows at which actors end, and how they ended. Raises Stopped."""
        try:
            for row in rows:
                endings: list[str] = []
                while len(endings) < _ENDS and self._starts < _MOST_STARTS and self._opened(avoid=bool(endings)):
                    ending = self._load(row)
                    if ending is None:
                        break
                    endings += [ending] if ending else []
                if len(endings) == _ENDS:
                    self._starts = 0
                    yield row, " and ".join(dict.fromkeys(endings))
        finally:
            self._end()

    def _opened(self, *, avoid: bool) -> bool:
        """Have an actor that is ready; return whether there is one."""
        import ray

        if self._actor is None:
            self._starts += 1
            self._actor = self._start(self._node if avoid else None)
            reply = self._result(self._actor.start.remote(), self._start_timeout)
            if isinstance(reply, ray.exceptions.RayError):
                self.last_loss = described(reply)
            if isinstance(reply, ray.exceptions.RayError) or reply is None or reply[0]["kind"] != "ready":
                self._end()
                return False
            self._node = reply[0]["node"]
        return True

    def _load(self, row: int) -> str | None:
        """Return how the actor ended while it loaded a sample; "" if that says nothing of the sample; None if it did
        not end.
        """
        result = self._result(self._actor.load_alone.remote(row), self._timeout, can_wait=True)
        if result is not None and not isinstance(result, Exception):
            return None
        self._end()
        if result is None:
            return f"timed out after {self._timeout:g} seconds"
        if is_own_end(result):
            return described(result)
        self.last_loss = described(result)
        return ""

    def _result(self, call: Any, timeout: float, *, can_wait: bool = False) -> Any:
        """Return what a call returns, or Ray's error; None if it takes longer than `timeout`, 0 for no limit.

        Args:
            can_wait: whether the time in which the actor waits for storage does not count.
        """
        import ray

        begun = time.monotonic()
        asked, answer = begun, None
        while not ray.wait([call], timeout=_TICK_SECONDS)[0]:
            if self._is_stopping():
                raise Stopped
            now = time.monotonic()
            if can_wait and answer is None:
                asked, answer = now, ask_whether_it_waits(self._actor)
            if answer is not None and ray.wait([answer], timeout=_TICK_SECONDS)[0]:
                begun, answer = now if _says_so(answer) else begun, None
            elif answer is not None and now - asked < ANSWER_SECONDS:
                continue
            if timeout and now - begun >= timeout:
                return None
        try:
            return ray.get(call)
        except ray.exceptions.RayError as error:
            return error

    def _end(self) -> None:
        if self._actor is not None:
            import ray

            ray.kill(self._actor, no_restart=True)
            self._actor = None


def _says_so(answer: Any) -> bool:
    """Return whether an actor answered that it waits; one that is lost answers nothing, and its call says why."""
    import ray

    try:
        return bool(ray.get(answer))
    except ray.exceptions.RayError:
        return True
