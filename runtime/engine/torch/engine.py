"""The torch engine: computes a worker's share of a model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

import torch

from cost_model.errors import InputError
from runtime import native
from runtime.engine.base import HopOutcome, OnLayer, RangeEngine, Rows
from runtime.engine.rank import Rank
from runtime.engine.torch.collectives import Collectives, connect_store, open_store
from runtime.engine.torch.gpu.room import check_room
from runtime.engine.torch.headwise.connections import Connections
from runtime.engine.torch.headwise.heads import Heads
from runtime.engine.torch.headwise.profiling import measured
from runtime.engine.torch.models import load_stage
from runtime.engine.torch.range_runner import RangeRunner
from runtime.kv_cache.formats import kv_format
from runtime.kv_cache.layout import held
from runtime.kv_cache.pool import CacheShape, PagedCache
from runtime.kv_cache.windows import numbered
from runtime.kv_transfer.memory import SharedPool, shared_cache
from runtime.protocol.between_workers import HeadsProfiled, Step, StepResult
from runtime.protocol.to_workers import Configure, Connect, WindowedLayers

_ALL_LOADED = "all workers have loaded"
_LOAD_LIMIT = timedelta(hours=6)
_FREED_S = 10.0
"""How long receivers that have mapped a pool in GPU memory may take to let go of it."""


class TorchEngine(RangeEngine):
    """Computes a pipeline stage's layers, split over the ranks of its tensor-parallel group."""

    def __init__(self, config: Configure, rank: Rank) -> None:
        super().__init__()
        self._config, self._rank = config, rank
        torch.set_num_threads(config.threads)
        size = len(rank.workers)
        self._store = open_store(config.host, size) if rank.is_driver and size > 1 else None
        self.store_port = self._store.port if self._store else 0

    def load(self) -> None:
        config, device = self._config, torch.device(self._config.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._collectives = Collectives(self._rank, device)
        stage = load_stage(config.checkpoint, config.dtype, device, self._collectives)
        self.spec, self.weight_bytes = stage.spec, stage.checkpoint.bytes_read
        self.row_bytes = stage.spec.hidden * stage.dtype.itemsize
        self._on_gpu = device.type == "cuda"
        self._stage = stage
        self._shape = replace(stage.cache_shape, format=kv_format(config.kv_format))
        self._heads: Heads | None = None
        if config.lanes:
            self._make_heads()
        else:
            self._make_cache()
        native.use_large_pages()

    def _make_heads(self) -> None:
        """The cache of a worker in a replica with attention workers."""
        config, number = self._config, self._rank.workers.index(self._config.worker)

        def lost(attention_worker: str) -> None:
            self._attention_workers.lost(attention_worker)

        self._heads = Heads(number, config.lanes[number], self._shape, config.block_tokens, lost)
        self.cache = self._heads.cache
        self._runner = RangeRunner(self._stage, self.cache, self._heads)

    def turn(self, config: Configure) -> None:
        self._config = config
        if self._blocks() == self.cache_blocks:
            return
        for shared in (self.shared, self.windowed_shared):
            if shared is not None:
                shared.close()
        del self.cache, self.shared, self._runner
        self.windowed_cache = self.windowed_shared = None
        self._make_cache()

    def _blocks(self) -> tuple[int, int]:
        """Blocks that `cache` and `windowed_cache` are to have."""
        config, windowed = self._config, self._config.windowed
        apart = windowed.kv_budget_tokens // config.block_tokens if windowed else 0
        return config.kv_budget_tokens // config.block_tokens, apart

    def _make_cache(self) -> None:
        (blocks, apart), limited = self._blocks(), self._config.windowed
        if limited is None:
            self._check_room([(self._shape, blocks)])
            self.cache, self.shared = self._pool(self._shape, blocks)
            self._runner = RangeRunner(
                self._stage,
                self.cache,
                most=self._config.max_batch,
                most_tokens=max(self._config.max_prefill_tokens, self._config.max_mixed_tokens),
            )
            return
        self._check_windows(limited)
        others = [layer for layer in range(self._stage.spec.layers) if layer not in limited.layers]
        shapes = self._shape_of(others), self._shape_of(limited.layers)
        self._check_room([(shapes[0], blocks), (shapes[1], apart)])
        self.cache, self.shared = self._pool(shapes[0], blocks)
        self.windowed_cache, self.windowed_shared = self._pool(shapes[1], apart)
        places = {layer: (False, number) for number, layer in enumerate(others)}
        places |= {layer: (True, number) for number, layer in enumerate(limited.layers)}
        self._runner = RangeRunner(
            self._stage, self.cache, windowed=(self.windowed_cache, places.__getitem__)
        )

    def _check_room(self, caches: Sequence[tuple[CacheShape, int]]) -> None:
        if self._on_gpu:
            check_room(self._stage, caches, self._config)

    def _shape_of(self, layers: Sequence[int]) -> CacheShape:
        """What a cache of some layers of the model holds here, with these numbered from 0."""
        heads = self._stage.spec.kv_heads
        return replace(
            self._shape, part=held(numbered(self._rank.stages, layers), self._config.worker, heads)
        )

    def _check_windows(self, limited: WindowedLayers) -> None:
        """Refuse to forget tokens that a layer attends to.

        Raises
        ------
        InputError : config.json has a longer window, or none, for one of these layers
        """
        windows = self._stage.windows
        for layer in limited.layers:
            found = windows[layer] if windows else None
            if found is None or found > limited.window:
                problem = f"layer {layer} attends to {found or 'all'} tokens, not to {limited.window}"
                source = f"{self._config.checkpoint}/config.json"
                raise InputError(source, "sliding_window", problem, "search the placement with this model")

    def _pool(self, shape: CacheShape, blocks: int) -> tuple[PagedCache, SharedPool | None]:
        """A cache of so many blocks; waits until memory that was freed is there."""
        deadline_s = time.monotonic() + _FREED_S
        while True:
            try:
                cache, shared = shared_cache(shape, blocks, self._config.block_tokens)
                break
            except torch.cuda.OutOfMemoryError:
                if time.monotonic() > deadline_s:
                    raise
                torch.cuda.ipc_collect()
                torch.cuda.empty_cache()
                time.sleep(0.05)
        if shared is not None:
            shared.populate()
        return cache, shared

    def join(self, addresses: Connect) -> None:
        """Create the replica's process groups once all its workers have loaded."""
        if self._heads is not None:
            self._attention_workers = Connections(self._config, self._heads, self.report)
            self._attention_workers.join(addresses.peers)
            if self._config.measure_heads:
                self._measure(self._heads)
        size = len(self._rank.workers)
        if size == 1:
            return
        store = self._store
        if store is not None:
            store.set(_ALL_LOADED, "")
        else:
            driver = addresses.peers[self._rank.workers[0]]
            store = connect_store(driver[0], addresses.store_port, size)
            store.wait([_ALL_LOADED], _LOAD_LIMIT)
        self._collectives.join(self._config.host, store)

    def _measure(self, heads: Heads) -> None:
        """Measure attention on the devices of this worker's lane, and tell the driver."""
        heads.connect()
        profiles = tuple(profile.numbers for profile in measured(heads, self._rank.tp))
        self.report(HeadsProfiled(worker=self._config.worker, profiles=profiles))

    def reconnect(self, addresses: Connect) -> None:
        if self._heads is not None:
            self._attention_workers.reconnect(addresses.peers)

    def begin(self, step: Step) -> None:
        self._runner.begin(step)

    def forget(self, request_id: str) -> None:
        self._runner.forget(request_id)

    def run(
        self,
        step: Step,
        tables: Mapping[str, list[int]],
        windowed_tables: Mapping[str, list[int]],
        on_layer: OnLayer | None,
    ) -> StepResult | None:
        if on_layer is None:
            return self._runner.run(step, tables, windowed_tables, None)

        def computed(layer: int) -> None:
            ready = None
            if self._on_gpu:
                ready = torch.cuda.Event()
                ready.record()
            on_layer(layer, ready)

        return self._runner.run(step, tables, windowed_tables, computed)

    def run_hop(
        self,
        step: Step,
        tables: Mapping[str, list[int]],
        windowed_tables: Mapping[str, list[int]],
        entering: Sequence[Rows | None],
    ) -> HopOutcome:
        return self._runner.run_hop(step, tables, windowed_tables, entering)
