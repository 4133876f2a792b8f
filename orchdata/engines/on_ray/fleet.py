"""The actors of one rank: started with the user's options, and started again elsewhere to load samples alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

from orchdata.engines.jobs import Job
from orchdata.engines.on_ray.actor import StepActor
from orchdata.engines.on_ray.cluster import outside_of_groups
from orchdata.engines.on_ray.compare import expected_by
from orchdata.engines.on_ray.parcel import make_parcel
from orchdata.engines.work import WorkerSpec, alone
from orchdata.loaders.errors import one_line

_TASK_RETRIES: Final = 2
"""How often Ray calls an actor again that was lost, before we look for the reason."""

_SMALL_BYTES: Final = 64 << 10
ASK_SECONDS: Final = 1.0
"""How often an actor is asked whether it waits."""
ANSWER_SECONDS: Final = 10.0
"""An actor that does not answer for so long hangs."""
_ASKED: Final = "asked"
"""Group of calls that an actor answers while it builds."""


@dataclass(eq=False)
class Member:
    """One worker: an actor, and what it does.

    Attributes:
        actor: None while there is none.
        is_ready: whether it has opened the spec.
        jobs: under way, by number.
        asked: since when it has not answered whether it waits; None if it is not asked now.
        heard: when it answered last.
        address: of the node where it was ready.
    """

    number: int
    actor: Any = None
    is_ready: bool = False
    jobs: dict[int, Job] = field(default_factory=dict)
    asked: float | None = None
    heard: float = 0.0
    address: str = ""


class Fleet:
    """Starts actors.

    Args:
        first: the spec of worker 0.
        options: of an actor, with Ray's names.

    Raises:
        TypeError: the spec does not pickle.
        ValueError: Ray does not know an option.
    """

    def __init__(self, first: WorkerSpec, options: dict[str, Any]) -> None:
        self.options = {"num_cpus": first.num_loading_threads, "scheduling_strategy": outside_of_groups()} | options
        self.members = [Member(number) for number in range(first.workers.num_workers)]
        self._first = first
        self._chooses_node = "scheduling_strategy" not in options
        self._concurrency = first.workers.prefetch_factor if first.workers.num_threads else 1
        self._expected = expected_by(first.spec)
        self._parcels = [self._put(replace(first, number=member.number)) for member in self.members]
        self._alone: Any = None

    def start(self, member: Member) -> None:
        """Give a worker an actor, which Ray starts again as often as needed."""
        member.is_ready, member.asked = False, None
        member.actor = self._actor(
            self.options
            | {
                "max_restarts": -1,
                "max_task_retries": _TASK_RETRIES,
                "max_concurrency": self._concurrency,
                # Else an actor that was lost waits for the calls that were given up meanwhile, and makes no other.
                "allow_out_of_order_execution": True,
            },
            member.number,
            self._parcels[member.number],
        )

    def start_alone(self, avoid: str | None) -> Any:
        """Return an actor that loads samples alone, and that Ray does not restart: not on this node, if another has
        room.
        """
        if self._alone is None:
            self._alone = self._put(alone(self._first))
        options = self.options | {"max_restarts": 0, "max_task_retries": 0}
        if avoid is not None and self._chooses_node and (other := _other_node(avoid)) is not None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                other, soft=True, _spill_on_unavailable=True
            )
        return self._actor(options, 0, self._alone)

    def end(self, member: Member) -> None:
        """End the actor of a worker, if it has one."""
        import ray

        if member.actor is not None:
            ray.kill(member.actor, no_restart=True)
        member.actor, member.is_ready = None, False

    def _put(self, worker: WorkerSpec) -> Any:
        """Return a worker's parcel as an argument of actors: large ones are sent once to a node."""
        import ray

        parcel = make_parcel(worker, self._expected)
        return parcel if len(parcel) <= _SMALL_BYTES else ray.put(parcel)

    def _actor(self, options: dict[str, Any], number: int, parcel: Any) -> Any:
        import ray

        # With a group of its own for questions, an actor does not run the others in its main thread.
        remote: Any = ray.remote  # its types do not know all options
        try:
            return remote(concurrency_groups={_ASKED: 1})(StepActor).options(**options).remote(number, parcel)
        except (ValueError, TypeError) as error:
            raise ValueError(f"RayEngine({', '.join(self.options)}): {one_line(error)}") from error


def ask_whether_it_waits(actor: Any) -> Any:
    """Ask an actor that builds a step: see `StepActor.waits`. Returns a reference to the answer."""
    return actor.waits.options(concurrency_group=_ASKED).remote()


def actor_state(actor: Any) -> str:
    """Return what Ray says of an actor: "ALIVE", "RESTARTING", "PENDING_CREATION" or "DEAD"."""
    from ray._private.state import actors

    return str(actors(actor._actor_id.hex()).get("State", ""))


def waits_for_room(actor: Any) -> bool:
    """Return whether no node has taken an actor yet."""
    from ray._private.state import actors

    known = actors(actor._actor_id.hex())
    return known.get("State") != "ALIVE" and not known.get("Address", {}).get("IPAddress")


def num_restarts(actor: Any) -> int:
    """Return how often Ray has started an actor again."""
    from ray._private.state import actors

    return int(actors(actor._actor_id.hex()).get("NumRestarts") or 0)


def _other_node(avoid: str) -> str | None:
    import ray

    nodes = (each["NodeID"] for each in ray.nodes() if each["Alive"] and each["Resources"].get("CPU"))
    return next((str(node) for node in nodes if node != avoid), None)
