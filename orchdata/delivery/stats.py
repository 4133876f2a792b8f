"""What a loader has done so far: balance achieved, time by stage, failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from orchdata.building.step import BuiltStep
from orchdata.loaders.errors import DataError, reason_kind
from orchdata.loaders.storage.counted import ReadBytes

_LISTED_FAILURES = 1000
_OVERFLOW = ("truncated", "cut_tokens", "split", "pieces")


class Stats:
    """Sums over delivered steps. Ratios are ratios of sums: the sum of largest loads over the sum of mean loads is
    what the whole epoch loses to waiting, which a mean of per-step ratios is not.

    Args:
        reads: counts what is read of shards; None where samples are not in shards.
    """

    def __init__(self, reads: ReadBytes | None = None) -> None:
        self._reads = reads
        self._steps = 0
        self._samples = 0
        self._loss_tokens = 0
        self._waiting_seconds = 0.0
        self._seconds: Counter[str] = Counter()
        self._loads: dict[str, np.ndarray[Any, np.dtype[np.float64]]] = {}
        self._cost = np.zeros(2)
        self._microbatches = 0
        self._tokens = 0
        self._padded_tokens = 0
        self._filled = np.zeros(2, np.int64)
        self._overflow = np.zeros(4, np.int64)
        self._own_streams: float | None = None
        self._feature_rows: dict[str, np.ndarray[Any, np.dtype[np.int64]]] = {}
        self._sources: dict[str, np.ndarray[Any, np.dtype[np.int64]]] = {}
        self.failures: list[DataError] = []
        self._reasons: Counter[str] = Counter()
        self._failed: set[tuple[str, str]] = set()
        self._lost = 0
        self.num_failures = 0

    def add_step(self, built: BuiltStep, waiting_seconds: float) -> None:
        figures = built.figures
        self._steps += 1
        # Per phase a sample whose parts failed stays, without loss.
        self._samples += figures.samples - (0 if built.plan.parts else len(built.failures))
        self._loss_tokens += figures.loss_tokens
        self._waiting_seconds += waiting_seconds
        self._seconds.update(built.seconds)
        for phase, loads in figures.loads.items():
            self._loads[phase] = self._loads.get(phase, np.zeros(5)) + loads
        self._cost += figures.cost
        self._microbatches += figures.num_microbatches
        if figures.own_streams is not None:
            self._own_streams = (self._own_streams or 0.0) + figures.own_streams
        for phase, rows in figures.feature_rows.items():
            self._feature_rows[phase] = self._feature_rows.get(phase, np.zeros(3, np.int64)) + rows
        for name, counts in zip(built.plan.sources, figures.sources, strict=True):
            kept = self._sources.get(name, np.zeros(4, np.int64))
            self._sources[name] = np.append(kept[:3] + counts[:3], max(kept[3], counts[3]))
        self._tokens += figures.tokens
        self._padded_tokens += figures.padded_tokens
        self._filled += figures.filled or (0, 0)
        self._overflow += figures.overflow

    def add_failures(self, failures: Sequence[DataError], *, lost: int = 0) -> None:
        """Count failures, and `lost` samples that nothing lists, since damage hides them."""
        self._lost += lost
        self.num_failures += len(failures)
        self._reasons.update(reason_kind(failure.reason) for failure in failures)
        self._failed.update((failure.shard, failure.key) for failure in failures)
        self.failures.extend(failures[: _LISTED_FAILURES - len(self.failures)])

    @property
    def num_failed_samples(self) -> int:
        """Distinct ones: a sample that fails in every epoch is one. Lost ones are among them."""
        return len(self._failed) + self._lost

    def as_dict(self) -> dict[str, Any]:
        """Plain values.

        `samples`: delivered to this rank; the pieces of a sample that is split count one by one.
        `overflow`: what `TextPreprocessor.overflow` did to those planned for this rank: samples `truncated`,
        `cut_tokens` that they lost, samples `split` (counted where their first piece is), and their `pieces`. They may
        be added up over ranks.
        `phases[name]`: `imbalance_unbalanced` and `imbalance` (max/mean of rank loads had samples been dealt out in
        turn, and as planned), `lower_bound_over_mean` (what no assignment can beat). Under od.Padded the loads of
        `llm` count padding and the mean does not, so that it shows in all three; dealt out means cut into as many
        microbatches as the plan has. `imbalance_in_micro_steps`: the largest load of each micro-step (the same
        microbatch of all ranks) over the mean of all, where ranks wait for each other in each; equal to `imbalance`
        where a step is one microbatch.
        `microbatches`: of a rank in a step, mean over steps.
        `step_imbalance`: cost of the step over that of a perfectly even one, of the phases that are balanced, by what
        ranks wait for (`Balance.price`): what `orchdata profile` calls the step. In a pipeline it is the makespan of
        the slowest one over that of one with equal microbatches.
        `padding`: share of LLM positions that would be padding, had this rank's microbatches been padded.
        `fill`: under od.Packed(length=...), tokens of samples over those of all ranks' microbatches; else None.
        `own_streams`: where ranks are grouped, the share of this rank's samples drawn from its group's streams, mean
        over steps; else None.
        `features[name]`: where parts are assigned apart, rows that the encoder yields over all ranks, per step, and the
        shares of them that move `within_nodes` and `between_nodes`; the rest stay on their rank. A row is as many bytes
        as the encoder's output has. Where ranks per node are not known each rank counts as a node.
        `sources[name]`: of each source of a mixture, over all ranks and as planned: `samples`, `tokens` (LLM
        positions), `loss_tokens`, and `passes` through it that have begun.
        `read_amplification`: bytes this rank read from storage for each byte of the members that its samples use;
        None where it read none, as where a peer reads for it, and for map-style data sets. Plain tars are a little
        above 1, by the gaps between members read together; Parquet by the rest of each column chunk that a cell is
        in; a compressed tar counts from end to end when it is decompressed into the cache folder, and not again
        while it is kept there. `reads`: the sums behind it (see `ReadBytes`), which may be added up over ranks:
        `storage_bytes`, `cache_bytes` from decompressed copies, and `used_bytes`; None for map-style data sets. They
        cover all that was read, prefetched steps included.
        `milliseconds`: `waiting` is time the training loop waited for a step; the others are busy time, summed over
        threads. All per step. `failures`: `count`, `by_reason`, the first of them in `samples`, and in
        `lost` how many samples damaged shards hide beside those, estimated from their bytes where they do not tell.
        """
        steps = max(1, self._steps)
        return {
            "steps": self._steps,
            "samples": self._samples,
            "loss_tokens": self._loss_tokens,
            "overflow": dict(zip(_OVERFLOW, self._overflow.tolist(), strict=True)),
            "phases": {phase: _ratios(sums) for phase, sums in self._loads.items()},
            "microbatches": self._microbatches / steps,
            "step_imbalance": float(self._cost[0] / self._cost[1]) if self._cost[1] else 1.0,
            "padding": 1 - self._tokens / self._padded_tokens if self._padded_tokens else 0.0,
            "fill": float(self._filled[0] / self._filled[1]) if self._filled[1] else None,
            "own_streams": None if self._own_streams is None else self._own_streams / steps,
            "features": {phase: _shares(rows, steps) for phase, rows in self._feature_rows.items()},
            "sources": {
                name: dict(zip(("samples", "tokens", "loss_tokens", "passes"), counts.tolist(), strict=True))
                for name, counts in self._sources.items()
            },
            "read_amplification": None if self._reads is None else self._reads.amplification,
            "reads": None if self._reads is None else self._reads.as_dict(),
            "milliseconds": {
                "waiting": 1000 * self._waiting_seconds / steps,
                **{
                    stage: 1000 * self._seconds[stage] / steps
                    for stage in ("planning", "reading", "decoding", "packing")
                },
            },
            "failures": {
                "count": self.num_failures + self._lost,
                "lost": self._lost,
                "by_reason": dict(self._reasons.most_common()),
                "samples": [
                    {"shard": f.shard, "key": f.key, "field": f.field, "reason": f.reason} for f in self.failures
                ],
            },
        }


def _shares(rows: np.ndarray[Any, np.dtype[np.int64]], steps: int) -> dict[str, float]:
    total = int(rows.sum())
    _, within, between = (int(way) / max(1, total) for way in rows)
    return {"rows": total / steps, "within_nodes": within, "between_nodes": between}


def _ratios(sums: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    unbalanced, balanced, bound, mean, in_micro_steps = (float(value) for value in sums)
    mean = mean or 1.0
    return {
        "imbalance_unbalanced": unbalanced / mean or 1.0,
        "imbalance": balanced / mean or 1.0,
        "imbalance_in_micro_steps": in_micro_steps / mean or 1.0,
        "lower_bound_over_mean": bound / mean or 1.0,
    }
