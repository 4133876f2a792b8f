"""Runtime: the running parts of a loader, apart from its position.

Arguments --checked--> LoaderOptions --data set--> PreparedDataset --> Runtime --(an iteration)--> Stream
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from orchdata.balancers.checks import checked_count, checked_epoch
from orchdata.batch.batch import ModelInputs
from orchdata.building.map_items import MapContent
from orchdata.building.step import Builder
from orchdata.caching.start import checked_cache, filler_of, place_of
from orchdata.dataset.arguments import (
    Arguments,
    check_combination,
    check_cost_id,
    check_workers,
    engine_choice,
    options_of,
    warming_of,
)
from orchdata.dataset.describe import describe_loader
from orchdata.dataset.options import (
    PreparedDataset,
    check_functions,
    listed_rows,
)
from orchdata.dataset.prepare import prepare
from orchdata.dataset.resume.restore import restore
from orchdata.delivery.delivery import Delivery
from orchdata.delivery.policy import FailureBudget
from orchdata.delivery.stats import Stats
from orchdata.engines.threads import can_pin
from orchdata.engines.torch_workers import IterableContent, set_epoch
from orchdata.engines.work import WorkerSeeds
from orchdata.finalizers import Ending, wait_for_finalizers
from orchdata.loaders.errors import BLANK, StateError
from orchdata.loop.loop import EpochLoop, Stream
from orchdata.loop.planned import Engines, LoopContext, PlannedStream
from orchdata.loop.position import Position, Progress
from orchdata.loop.state import check_allowed, dump_state, known_count
from orchdata.loop.torch_stream import IterableSource, IterableStream, MapSource, MapStream
from orchdata.notices import warn_once, warn_user
from orchdata.order.sampler import SamplerSteps
from orchdata.order.stateful import StateGetter
from orchdata.order.steps import Draw, OrderedSteps, StreamSteps, begin_of
from orchdata.ranks.agreement import Agreement
from orchdata.ranks.parallel import Rank


class Runtime:
    """The running parts of a loader.

    Args:
        rank: rank of this process among the data-parallel ranks.
        agreement: compares with the loaders of the other ranks.

    Attributes:
        prepared: the data set.
        batch_size: samples of this rank in a step; None if another size was given.
        is_single_rank: a torch data set on one rank: states may store things of this rank alone.
        is_as_torch: it is read by torch's loader: an iteration continues after a step that failed.
    """

    def __init__(self, arguments: Arguments, rank: Rank, agreement: Agreement) -> None:
        # Check all arguments before the data set is read.
        check_workers(arguments)
        check_functions(collate_fn=arguments.collate_fn, worker_init_fn=arguments.worker_init_fn)
        check_cost_id(arguments)
        cache = checked_cache(arguments.cache, in_shards=arguments.in_shards)
        listed = listed_rows(arguments.shuffle, in_shards=arguments.in_shards)
        if not arguments.in_shards:
            check_combination(arguments)
        if isinstance(arguments.collate_fn, ModelInputs) and getattr(arguments.balance, "teams", None) is not None:
            arguments = replace(arguments, collate_fn=arguments.collate_fn.in_slices())
        self.rank = rank
        self.agreement = agreement
        self.is_single_rank = not arguments.in_shards and rank.size == 1
        by_torch = arguments.by_torch(rank)
        self.is_as_torch = self.is_single_rank and by_torch
        in_order = arguments.in_order or not self.is_as_torch
        choice = engine_choice(arguments, rank, in_order=in_order)
        self.batch_size, options = options_of(arguments, rank, listed, agreement.reaches_all)
        options = replace(options, cache=cache)
        pin_memory = arguments.pin_memory and can_pin()
        warming = warming_of(arguments, options)

        # Prepare the data set; ranks that would plan different steps raise an error.
        def build() -> tuple[PreparedDataset, Builder | None]:
            prepared = prepare(arguments, options)
            return prepared, None if prepared.is_iterable else prepared.spec.open()

        self.prepared, self.builder = agreement.make(
            build, lambda built: describe_loader(arguments.dataset, built[0], options, arguments.dp)
        )

        # Create the parts that run once a step is requested.
        self.seeds = WorkerSeeds(
            arguments.generator, persistent=arguments.persistent_workers and bool(arguments.num_workers)
        )
        self.stats = Stats(None if self.builder is None else self.builder.reads)
        reads = None if self.builder is None else self.builder.reads
        self._filler = filler_of(self.prepared.spec, rank, cache, reads, forks=choice.forks)
        if self._filler is not None:
            Ending(self, self._filler.stop)
        num_samples = self.prepared.num_indexed + self.prepared.num_lost
        budget = FailureBudget(options.policy, self.stats, num_samples, rank.size)
        inputs = arguments.collate_fn if isinstance(arguments.collate_fn, ModelInputs) else None
        self._scales_loss = arguments.in_shards and not callable(arguments.collate_fn)
        has_our_names = inputs is None and self._scales_loss
        unnamed = [name for rows in self.prepared.rows for name in rows.dataset.recipe.of_processor if has_our_names]
        delivery = Delivery(
            self.prepared.spec,
            rank,
            policy=options.policy,
            budget=budget,
            stats=self.stats,
            timeout=arguments.timeout,
            inputs=inputs,
            unnamed=tuple(dict.fromkeys(unnamed)),
        )
        self.context = LoopContext(steps=self.prepared.steps, rank=rank, agreement=agreement, delivery=delivery)
        self._engines = Engines(choice, warming, pin_memory=pin_memory, persistent=arguments.persistent_workers)
        self._torch: IterableSource | MapSource | None = None
        content = self.prepared.spec.content
        if isinstance(content, IterableContent):
            self._torch = IterableSource(content, choice.workers, in_order=in_order, pin_memory=pin_memory)
        elif isinstance(content, MapContent) and by_torch:
            self._torch = MapSource(content, choice.workers, rank, in_order=in_order, pin_memory=pin_memory)
        self._in_shards = arguments.in_shards
        self._raises = options.policy.action == "raise"
        self.keep_dataset_state = not arguments.num_workers or arguments.persistent_workers
        if not arguments.in_order and in_order and arguments.num_workers:
            why = "steps are planned over ranks, or are of shards, and a state of them is a position"
            warn_once("in_order=False", f"in_order=False has no effect: batches stay in order, because {why}")
        budget.start(self.prepared.failures, lost=self.prepared.num_lost)

    @property
    def has_microbatches(self) -> bool:
        """Whether a step may have several microbatches."""
        plan = self.prepared.spec.plan
        return bool(plan.balance.caps) or plan.accumulate > 1

    @property
    def accumulate(self) -> int:
        """Microbatches that every step has; 1 if it has as many as caps need."""
        return self.prepared.spec.plan.accumulate

    @property
    def scales_loss(self) -> bool:
        """Whether batches carry a `loss_scale` that covers the whole optimizer step."""
        return self.has_microbatches or self._scales_loss

    def begin(self, progress: Progress) -> EpochLoop:
        """Begin an iteration at the loader's position. Raises ValueError if the data set chooses no sample."""
        if chosen_by := self.prepared.none_chosen:
            raise ValueError(
                f"no sample is chosen by {chosen_by}, so there is no step to iterate: choose other bounds, or iterate "
                "only if len(dataset) is not 0"
            )
        loop = EpochLoop(
            progress,
            self._open_stream,
            keep_dataset_state=self.keep_dataset_state,
            stores_seed=self.is_single_rank,
            on_first_step=self.prepared.on_first_step,
        )
        # The base seed of the workers. An iteration that continues from a state may use the state's.
        if self.is_single_rank:
            origin = loop.origin
            # Workers without a state must not repeat for later steps the draws of the first ones.
            again = origin.is_drawn and (not origin.step or origin.workers or self.prepared.is_iterable)
            known = origin.base_seed if again else None
            loop.base_seed = self.seeds.draw() if known is None else self.seeds.follow(known)
            progress.seed(loop.base_seed)
        elif not self._in_shards:
            loop.base_seed = self.seeds.draw()
        return loop

    @property
    def follows(self) -> bool:
        """Whether samples are drawn from the loader's sampler as it is now: the user may have changed it."""
        return self.is_single_rank and isinstance(self.prepared.steps, SamplerSteps)

    def follow(self, sampler: Any) -> None:
        """Draw from this sampler, or batch sampler, from now on: the user may have replaced the loader's own."""
        assert isinstance(self.prepared.steps, SamplerSteps)
        self.prepared.steps.follow(sampler)

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set, if it has epochs: workers that are kept have copies of it."""
        content: Any = self.prepared.spec.content
        if not self._in_shards and set_epoch(content.dataset, epoch):
            self.close()

    def count(self, position: Position) -> int:
        """Return the optimizer steps of its epoch, for the user. Raises TypeError if they are known only at its end."""
        steps = self.prepared.steps
        num_steps = steps.count(position.epoch, position.draw)
        if isinstance(steps, StreamSteps):
            steps.asked_length = num_steps
        return num_steps

    def known_count(self, position: Position) -> int | None:
        """Return the optimizer steps of its epoch; None if they are known only at its end."""
        return known_count(self.prepared.steps, position.epoch, position.draw)

    def warn_if_empty(self, *, drop_last: bool) -> None:
        """Warn if the first epoch has no steps: a training would end at once."""
        prepared = self.prepared
        if self.known_count(Position(0)) != 0:
            return
        if prepared.none_chosen:
            warn_user(f"the loader has no steps: no sample is chosen by {prepared.none_chosen}")
            return
        size = ", ".join(f"{name}={value}" for name, value in prepared.spec.plan.batches.describe().items())
        way_out = ": make the batch smaller, or leave out drop_last" if prepared.num_samples and drop_last else ""
        warn_user(
            f"the loader has no steps: {prepared.num_samples} usable rows of {prepared.num_indexed} samples, {size} "
            f"over all ranks, drop_last={drop_last}{way_out}"
        )

    def state_before(self) -> tuple[StateGetter, ...]:
        """Return the data set's own state before its first step, if it is read in this process and has one."""
        return () if self._torch is None else self._torch.state_before()

    def state(self, progress: Progress) -> dict[str, Any]:
        """Return the loader's state: see `DataLoader.state_dict`."""
        prepared, position = self.prepared, progress.position
        if self.is_single_rank:
            position = progress.promised(self.seeds.draw, prepared.steps.draw)
            if not position.workers:
                position = replace(position, workers=self.state_before())
        state = dump_state(position, prepared.bound_fingerprint, prepared.steps)
        return state | prepared.state_of_order(state)

    def even_tail(self) -> None:
        """From now on, the last step of an epoch of map-style data has as many samples on each rank, with repeats."""
        spec = self.prepared.spec
        if not isinstance(spec.content, MapContent) or self.rank.size == 1:
            return
        if spec.content.batched:
            plan = replace(spec.plan, evens_tail=True)
            self.install(replace(self.prepared, spec=replace(spec, plan=plan)))
        elif self.prepared.num_samples % self.rank.size:
            warn_once(
                "gathering with batch_size=None",
                "the last step of an epoch repeats a sample on some ranks, and with batch_size=None "
                "accelerator.gather_for_metrics cannot leave the repeats out: give batch_size=1",
            )

    def num_in_tail(self, position: Position) -> int:
        """Return the samples of the last step of its epoch, without repeats; -1 if ranks may have other numbers."""
        plan, epoch = self.prepared.spec.plan, position.epoch
        if not plan.evens_tail:
            return -1
        begin = begin_of(position.draw) if isinstance(self.prepared.steps, OrderedSteps) else None
        start, stop = plan.batches.bounds(plan.last_step(epoch, begin), plan.order.length(epoch), epoch, begin)
        return stop - start

    def load_state(self, state: dict[str, Any], allow: Sequence[str], num_workers: int) -> Position:
        """Return the position of a state, after the order that it stores was installed."""
        check_allowed(allow)
        prepared, position = restore(self.prepared, state, allow, num_workers)
        if prepared.is_iterable and position.step and not position.workers:
            raise StateError("the state does not say how far each worker has iterated the data set")
        if prepared is not self.prepared:
            self.install(prepared)
        if self.is_single_rank:
            self.close()  # persistent workers are at a later position
        return position

    def step_again(self, draw: Draw | None, *, epoch: int, step: int, rank: int | None) -> list[Any]:
        """Return the microbatches of any step: see `DataLoader.step_at`."""
        rank = self.rank.rank if rank is None else rank
        if checked_count(rank, "rank", 0) >= self.prepared.spec.plan.num_ranks:
            raise ValueError(f"rank must be below the loader's {self.prepared.spec.plan.num_ranks} ranks, got {rank}")
        task = self.prepared.steps.again(checked_epoch(epoch), checked_count(step, "step", 0), draw)
        built = replace(self.prepared.spec, rank=rank).open().build(task)
        failures = [failure for failure in built.failures if failure.reason != BLANK]
        if failures and self._raises:
            raise failures[0]
        return self.context.delivery.named(built.batches)

    def install(self, prepared: PreparedDataset) -> None:
        """Continue with another order of the same data set."""
        assert self.builder is not None
        self.close()  # persistent workers would continue with the former order
        self.prepared = prepared
        self.builder = self.builder.planned_by(prepared.spec.plan)
        if self._filler is not None:
            self._filler.order = prepared.spec.plan.order
        self.context.delivery.follow(prepared.spec)
        self.context = replace(self.context, steps=prepared.steps)

    def close(self) -> None:
        """Stop persistent workers or threads, and what fills the cache."""
        self._engines.close()
        if self._filler is not None:
            self._filler.stop()
        if self._torch is not None:
            self._torch.close()
        wait_for_finalizers()

    def _open_stream(self, loop: EpochLoop) -> Stream:
        """Open the steps of one iteration: from torch's own loader, or from an engine."""
        wait_for_finalizers()  # what an iteration before has left
        steps, spec = self.context.steps, self.prepared.spec
        if isinstance(self._torch, IterableSource) and isinstance(steps, StreamSteps):
            return IterableStream(self._torch, steps, loop, self.stats.torch)
        if isinstance(self._torch, MapSource):
            return MapStream(self.context, self._torch, spec, loop, self.stats.torch)
        assert self.builder is not None
        engine = self._engines.open(spec, self.builder, self.context.delivery, base_seed=loop.base_seed)
        stream = PlannedStream(self.context, loop, engine, self._engines.leave)
        if self._filler is not None and not self.context.delivery.receives:
            self._filler.begin(place_of(stream, self.known_count(loop.origin)))
        return stream
