"""The ZeRO engine: plain data parallelism (stage 0) and full partitioning (stage 3) behind one protocol."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from zerotune.checkpoints import WeightFiles, load_weights
from zerotune.config.errors import RunFailed, UsageError
from zerotune.config.knobs import Knobs
from zerotune.engine import LedgerKeeper, RankGroup, StepResult
from zerotune.engine.meeting import together
from zerotune.models.access import AccessWatch, make_plain
from zerotune.models.deferred import leave_meta
from zerotune.models.units import LeafModules, cut_into_units, largest_block, layout_of
from zerotune.models.uses import UseWatcher, tensors_in
from zerotune.records import ByteClass, Ledger
from zerotune.schedule import (
    Gather,
    Layout,
    ParamRef,
    ParamSize,
    ReleasePlan,
    Schedule,
    UnitSize,
    resolve_knobs,
)
from zerotune.zero.alone import LoneCollector
from zerotune.zero.checkpointing import CheckpointMixin
from zerotune.zero.collector import Collector
from zerotune.zero.comm import Communicator
from zerotune.zero.executor import Executor
from zerotune.zero.first_values import FirstValues
from zerotune.zero.full_state import FullStateMixin
from zerotune.zero.gatherer import Gatherer
from zerotune.zero.managed import ManagedParameters
from zerotune.zero.norms import clip_factor, norm_part, norm_type_of, whole_norm
from zerotune.zero.optimizer import (
    OptimizerFactory,
    frozen_homes,
    regroup,
    shard_optimizer,
)
from zerotune.zero.planning import Planner, plans_release
from zerotune.zero.pool import BufferPool
from zerotune.zero.precision import DtypeChoice, Precision, PrecisionName
from zerotune.zero.reducer import Reducer
from zerotune.zero.refusals import LoopCalls, refuse_what_cannot_work
from zerotune.zero.scaler import LossScaler, LossScaling, RankTrouble, SkippedSteps, in_words
from zerotune.zero.shards import ShardedParam, ShardStore
from zerotune.zero.told import Told, check_order, tell
from zerotune.zero.updater import Updater

logger = logging.getLogger(__name__)


class ZeroEngine(FullStateMixin, CheckpointMixin):
    """A model trained under ZeRO on the ranks of a group.

    The module is taken over: its parameters stay its own, but outside of a forward or backward pass their storage is
    empty (at stage 3), and what the optimizer updates are this rank's slices. The mathematics is that of plain data
    parallelism under every setting of the knobs.

    Use it in a loop of your own, started with torchrun or any other launcher::

        engine = zerotune.ZeroEngine(model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4))
        for x, y in batches:
            loss = loss_function(engine(x), y)
            engine.backward(loss)
            engine.step()

    Args:
        module: The model, built alike on every rank; rank 0's values win.
        optimizer: An elementwise torch optimizer built on the model's parameters, or a callable that builds one from
            parameter groups, or ``None`` for AdamW.
        knobs: What moves time and memory. Default: stage 3 with every size ``auto``.
        group: The ranks. Default: the default group of ``torch.distributed``, or a single process.
        precision: ``fp32``, or ``bf16`` or ``fp16`` with fp32 master weights and optimizer state; ``fp16`` scales
            losses.
        clip_norm: Largest global norm of the gradient; ``None`` for no clipping.
        clip_norm_type: Which norm, 2 or infinity.
        gradient_dtype: ``fp32``, or ``compute`` to keep gradients, and sum them over micro-batches, in the compute
            dtype.
        reduce_dtype: In which gradients travel: in the ``compute`` dtype, or in ``fp32``. They are summed in fp32.
        weights: A safetensors file, or a folder of them, to load instead of the model's first values; see
            :meth:`load_weights`. What it holds is not initialised at all, so that the model may be on the meta device.
        strict_weights: Whether it must hold exactly what the model's ``state_dict()`` does.
        loss_scaling: How the loss scale of ``fp16`` moves.
        max_skipped_steps: A step is skipped on all ranks if a gradient is not finite on one of them; so many in a row
            end the run.
        accumulate: ``reduce`` adds every micro-batch's gradients to the shards; ``local`` lets full gradients
            accumulate on every rank and reduces them once per step. Stage 1 always does the latter.
        leaf_modules: Names or class names of modules through which ranks may take different branches: each is one
            unit with everything inside. ``auto`` finds mixtures of experts.
        collective_timeout_s: How long to wait for a collective. Default: the group's own time-out. Ranks that provably
            run different modules end within seconds in any case.

    Raises:
        UsageError: Something in the model or the optimizer cannot work; the message names the parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | OptimizerFactory | None = None,
        knobs: Knobs | None = None,
        group: RankGroup | None = None,
        precision: PrecisionName = "fp32",
        clip_norm: float | None = None,
        accumulate: Literal["reduce", "local"] = "reduce",
        leaf_modules: LeafModules = "auto",
        collective_timeout_s: float | None = None,
        *,
        clip_norm_type: float | str = 2,
        gradient_dtype: DtypeChoice = "fp32",
        reduce_dtype: DtypeChoice = "compute",
        loss_scaling: LossScaling | None = None,
        max_skipped_steps: int = 50,
        weights: str | Path | None = None,
        strict_weights: bool = True,
    ) -> None:
        self.module = module
        self.group = group or RankGroup.default()
        self.precision = precision
        self.dtypes = Precision.of(precision, gradient_dtype, reduce_dtype)
        self._dtype = self.dtypes.compute
        self._clip_norm = clip_norm
        if clip_norm is not None and not clip_norm >= 0:
            raise UsageError(f"clip_norm {clip_norm} is not a number of at least 0")
        self._norm_type = norm_type_of(clip_norm_type)
        self._scaler = LossScaler((loss_scaling or LossScaling()) if precision == "fp16" else None)
        self._skipped = SkippedSteps(max_skipped_steps)
        files = (
            None
            if weights is None
            else together(self.group, f"opening {weights}", lambda: WeightFiles(weights))
        )
        loaded = frozenset(files.shapes if files else ())
        leave_meta(module, self.group.device, loaded)
        refuse_what_cannot_work(module, self.group.device)
        self.knobs = resolve_knobs(knobs or Knobs(), largest_block(module, leaf_modules))
        is_planned = plans_release(self.knobs) and self.group.size > 1  # one rank has nothing to release
        self._is_replicated = self.knobs.stage == 0
        self._accumulates_locally = accumulate == "local" or self.knobs.stage == 1

        self.ledger = LedgerKeeper(self.group.rank)
        self._comm = Communicator(self.group, self.ledger, self.knobs.overlap_comm, collective_timeout_s)
        self._pool = BufferPool(self.group.device, self.ledger)
        first_values = FirstValues(module, self.group, self._comm, loaded)
        first_values.agree()
        self._units = cut_into_units(module, self.knobs.unit_size, leaf_modules)
        self._partition(first_values)
        self._make_executor()
        self._frozen_homes = frozen_homes(optimizer, self.shards.params)
        self.optimizer = shard_optimizer(optimizer, self.shards.trainable, self._slice_of)
        self._updater = Updater(
            self.optimizer,
            self.shards,
            self._executor,
            self._gatherer,
            self.ledger,
            has_copies=not self._is_replicated and self.group.size > 1,
            refresh_bucket=None if self.knobs.stage == 3 else int(self.knobs.allgather_bucket_size),
        )
        uses = {unit.module: (unit.label, (index,)) for index, unit in enumerate(self._units)}
        self._planner = self._make_planner() if is_planned else None
        self._watcher = UseWatcher(module, uses, self._planner or self._executor)
        self._managed = ManagedParameters(module, self.shards.params)
        self._loop_calls = LoopCalls(module, self.optimizer, self.zero_grad)
        for sharded in self.shards.units:
            sharded.report_reads(self._note_read)
        self._is_spoiled = False
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.group.device)
        self._weight_sum = 0.0
        self.steps = 0
        if files is not None:
            try:
                load_weights(self._as_saved, files, strict_weights)
            except BaseException:
                self.close()
                raise
        self.ledger.reset_peaks()

    # -------------------------------------------------------------------------------------------- a training step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass; floating-point inputs are cast to the compute dtype."""
        if self._dtype is not torch.float32:
            args, kwargs = _cast(args, self._dtype), _cast(kwargs, self._dtype)
        self._clean_up()
        with self._clean_on_error():
            return self.module(*args, **kwargs)

    def backward(
        self, loss: torch.Tensor, weight: float = 1.0, *, retain_graph: bool = False, same_items: bool = False
    ) -> None:
        """Add the gradients of a micro-batch.

        Args:
            loss: Scalar mean over the micro-batch's items.
            weight: Number of items it is the mean of. The step's gradient is that of ``sum(weight * loss) /
                sum(weight)`` over all ranks and micro-batches, however items fall.
            retain_graph: Keep the graph for another backward pass through it.
            same_items: The loss is one more term over items that an earlier call counted (a second loss of the same
                batch): its gradient is added, its weight is not counted again.
        """
        if loss.numel() != 1:
            raise UsageError(
                f"the loss has shape {tuple(loss.shape)}", "reduce it to a scalar mean before backward"
            )
        self._loss_sum += loss.detach().to(torch.float64) * weight
        if not same_items:
            self._weight_sum += weight
        with self._clean_on_error(in_backward=True):
            # Activations are at their most: what lies idle goes, buffers are made anew as reductions need them.
            self._pool.flush()
            self._executor.begin_backward(self.module)
            self._watcher.begin_backward()
            scale = weight * self._scaler.factor
            (_widened(loss) * scale if scale != 1.0 else loss).backward(retain_graph=retain_graph)
            self._watcher.end_backward()
            self._managed.check_unchanged()
            self._executor.end_backward()
        if self._accumulates_locally:
            self._reducer.count_waiting()
        self._executor.window_position += 1

    def step(self) -> StepResult:
        """Reduce, clip, update the parameters, and begin the next accumulation window.

        If a gradient is not finite on some rank, all ranks skip the update, and the result says so.

        Raises:
            RunFailed: There was no backward pass, the ranks ran different schedules, or too many steps in a row were
                skipped.
        """
        self._clean_up()
        self._executor.finish_open_passes()
        if self._executor.window_position == 0:
            raise RunFailed("step() without a backward pass before it")
        if self._accumulates_locally:
            self._executor.reduce_accumulated()
            self._reducer.count_waiting()
        self._reducer.drain()
        told = tell(
            self.group,
            self._loss_sum,
            self._weight_sum,
            self._norm_part(torch.float32),
            self.shards.trainable,
            self._reducer.first_trouble,
            self._executor.digests,
        )
        self._comm.check_tags()
        check_order(told, self.steps)
        weight = math.fsum(each.weight for each in told)
        if weight <= 0:
            raise RunFailed("the step has no items: every micro-batch on every rank had weight 0")
        loss = math.fsum(each.loss for each in told) / weight
        parts = [each.norm for each in told]
        if self._norm_type == "2" and not all(map(math.isfinite, parts)):
            # A square may leave the range of fp32 where the gradient itself does not.
            parts = [row[0] for row in self.group.gather_numbers([self._norm_part(torch.float64)])]
        divisor = weight * self._scaler.factor
        norm = whole_norm(parts, self._norm_type) / divisor
        is_skipped = not all(map(math.isfinite, parts))
        if not is_skipped:
            unused = self._unused_everywhere() if any(each.untouched for each in told) else set()
            self._updater.update(1.0 / divisor * clip_factor(norm, self._clip_norm), unused)
        else:
            self._executor.open_next_window()
        result = StepResult(loss, weight, norm, is_skipped, self._scaler.scale)
        self._begin_window()
        self._scaler.update(is_skipped, weight / self.group.size)
        self.steps += 1
        self._note_skip(result, told, parts)
        if self._planner is not None:
            self._planner.after_step()
        return result

    def zero_grad(self) -> None:
        """Drop the gradients of the open accumulation window, on all ranks alike; :meth:`step` does it by itself.

        What ``zero_grad()`` of the optimizer and of the module do once the engine has taken over.
        """
        self._executor.finish_open_passes()
        self._reducer.clear()
        for param in self.shards.params:
            param.param.grad = None
        self.shards.forget_grads()
        self._reducer.count_waiting()
        self._begin_window()

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped because a gradient was not finite."""
        return self._skipped.total

    def flush(self) -> None:
        """Drop everything that is only held to be fast: after it nothing is live, and pools are empty."""
        self._clean_up()
        self._executor.finish_open_passes()
        self._reducer.drain()
        self._executor.drop_opening()
        self._pool.flush()

    def train(self, mode: bool = True) -> ZeroEngine:
        """As the module's own ``train``."""
        self.module.train(mode)
        return self

    def eval(self) -> ZeroEngine:
        """As the module's own ``eval``."""
        return self.train(False)

    # -------------------------------------------------------------------------------------------------- state

    def refresh(self) -> None:
        """Rebuild every derived copy from the masters, after they were written from outside."""
        self._executor.drop_opening()
        self._updater.publish()

    def at_rest(self) -> dict[ByteClass, int]:
        """Bytes by class that this rank holds now."""
        return self.ledger.totals

    def begin_ledger(self) -> None:
        """Record the ledger from here on."""
        self.ledger.begin()

    def end_ledger(self) -> Ledger:
        """Stop recording; return what was recorded since :meth:`begin_ledger`."""
        return self.ledger.end()

    @property
    def peak_live_elements(self) -> int:
        """Largest number of live elements since the ledger began."""
        return self.ledger.peak_live_elements

    @property
    def next_opening(self) -> tuple[Gather, ...]:
        """The declared prefetch of the next step: all that is live between two steps, until :meth:`flush`."""
        return self._executor.next_opening

    @property
    def schedules(self) -> list[Schedule]:
        """The schedules compiled so far, for inspection."""
        return self._executor.book.schedules

    def close(self) -> None:
        """Take the hooks off the module and drop all storage; the module is left without parameters' values."""
        if self._planner is not None:
            self._planner.close()
        self._watcher.remove()
        self._executor.reset()
        self._pool.flush()
        self._loop_calls.give_back()
        for param in self.shards.params:
            make_plain(param.param)
            param.param.grad = None
            param.param.grad_dtype = self._dtype
            param.param.data = torch.empty(0, dtype=self._dtype, device=self.group.device)
        self.optimizer.state.clear()
        self.optimizer.param_groups.clear()
        self.shards.release_everything()
        self._gatherer.forget()
        self._reducer.forget()
        self._executor.forget()
        self._managed.forget()

    # ------------------------------------------------------------------------------------------------ inside

    def _partition(self, first_values: FirstValues) -> None:
        """Cut every parameter into slices, and keep this rank's."""
        threshold = int(self.knobs.param_persistence_threshold)
        self.layout = layout_of(self._units, self.group.size, threshold, self.knobs.stage)
        self.shards = ShardStore(
            self._units,
            self.layout,
            self.group.rank,
            self.knobs.stage,
            self._dtype,
            self.group.device,
            self.ledger,
            self.dtypes.gradient,
            sums_full_grads=self._accumulates_locally,
            values=first_values.of,
        )
        if not self.shards.trainable:
            raise UsageError("the model has nothing to train: no parameter requires a gradient")
        self._say_what_persists()

    def _make_executor(self) -> None:
        """What carries out schedules, and by what means."""
        self._gatherer = Gatherer(
            self.shards, self.group.size, self._comm, self._pool, self.ledger, self._dtype
        )
        self._reducer: Collector = self._make_collector()
        self._executor = Executor(
            self.knobs,
            self.layout,
            self._gatherer,
            self._reducer,
            self.ledger,
            not self._accumulates_locally,
            self._access_watch,
            self._before_window,
        )

    def _make_collector(self) -> Collector:
        if self.group.size == 1:
            return LoneCollector(self.shards, self.ledger, self.dtypes.reduce)
        return Reducer(
            self.shards,
            self.layout,
            self._comm,
            self._pool,
            self.ledger,
            self.dtypes.reduce,
            self._is_replicated,
        )

    @contextmanager
    def _clean_on_error(self, in_backward: bool = False) -> Iterator[None]:
        """Remember that a forward or backward raised, so that what it left behind is cleaned up before the next."""
        try:
            yield
        except BaseException:
            self._watcher.reset()
            self._executor.passes_cut_short()
            self._is_spoiled |= in_backward
            raise

    def _clean_up(self) -> None:
        """Drop what a pass that raised left behind; with a backward, the gradients of its window, which it had begun to
        mix with its own."""
        self._executor.drop_what_was_cut_short()
        if self._is_spoiled:
            self._is_spoiled = False
            logger.warning("a backward pass raised: the gradients of its accumulation window are dropped")
            self.zero_grad()

    def _say_what_persists(self) -> None:
        if self.knobs.stage == 3 and self.group.rank == 0:
            kept = self.shards.persistent
            logger.info(
                "%d of %d parameters persist: %d elements, %d bytes on every rank",
                len(kept),
                len(self.shards.params),
                sum(param.numel for param in kept),
                sum(param.full_bytes for param in kept),
            )

    def _before_window(self) -> None:
        """Before the first forward of a window: is every parameter still managed, and which ones train?"""
        self._managed.check_storages()
        if not self._managed.has_changed():
            return
        self._managed.accept()
        self._reducer.drain()
        self.shards.note_trainable()
        if not self.shards.trainable:
            raise UsageError("the model has nothing to train: no parameter requires a gradient any more")
        self._frozen_homes.update(regroup(self.optimizer, self.shards.params, self._frozen_homes))
        self._use_layout(
            lambda ref, size: replace(size, trainable=self.shards[ref].param.requires_grad),
            lambda index, unit: unit,
        )

    def _access_watch(self) -> AbstractContextManager[object]:
        owners = {p.rows.untyped_storage()._cdata: p.ref.unit for p in self.shards.params if not p.persistent}
        return AccessWatch(owners, self._note_access) if owners else nullcontext()

    def _note_read(self, param: ShardedParam) -> None:
        """A call of torch is given a partitioned parameter; hooks announced it, or it is gathered, or refused."""
        if param.persistent:
            return
        if self._executor.is_idle:
            if param.ref.unit in self._gatherer.complete:
                return  # within gathered()
            raise UsageError(
                f"{param.name} is partitioned: outside of forward and backward its values are not on this rank",
                "read it within `with engine.gathered():`; engine.state_dict() and engine.load_state_dict() copy all",
            )
        self._note_access(param.ref.unit)

    def _note_access(self, unit: int) -> None:
        """An operation reads a unit; if no hook announced it, this becomes a use that is announced from now on."""
        if not self._executor.on_access(unit):
            return
        if self._watcher.is_running:
            self._watcher.add_use(unit)
            self._executor.hold(unit)
            self._use_layout(
                lambda ref, size: size,
                lambda index, size: replace(size, backward_needs_weights=True) if index == unit else size,
            )
            return
        logger.warning(
            "%s is read outside of the model's forward pass (by a loss function?): it stays full on every rank",
            self.layout.units[unit].name,
        )
        self._gatherer.keep_for_good(unit)
        self._use_layout(
            lambda ref, size: replace(size, persistent=True) if ref.unit == unit else size,
            lambda index, size: size,
        )

    def _use_layout(
        self, param: Callable[[ParamRef, ParamSize], ParamSize], unit: Callable[[int, UnitSize], UnitSize]
    ) -> None:
        """Go on with a layout whose parameters and units are changed by two functions."""
        self.layout = self._layout_with(param, unit)
        self._executor.use_layout(self.layout)

    def _layout_with(
        self, param: Callable[[ParamRef, ParamSize], ParamSize], unit: Callable[[int, UnitSize], UnitSize]
    ) -> Layout:
        units = [
            unit(
                index,
                replace(size, params=tuple(param(ParamRef(index, i), p) for i, p in enumerate(size.params))),
            )
            for index, size in enumerate(self.layout.units)
        ]
        return Layout(tuple(units), self.group.size)

    def _make_planner(self) -> Planner:
        return Planner(
            self._executor,
            self._comm,
            self.group,
            self.knobs,
            (self._dtype.itemsize, self.dtypes.reduce.itemsize),
            not self._accumulates_locally,
            self._use_plan,
            self._flushed_bytes,
        )

    def _use_plan(self, plan: ReleasePlan) -> None:
        """Go on with a choice for every unit, between steps; units that become persistent are gathered for good."""
        self._executor.drop_opening()
        now = self._executor.plan.persistent
        for unit in sorted(now - plan.persistent):
            self._gatherer.end_keeping(unit)
        for unit in sorted(plan.persistent - now):
            self._gatherer.gather((unit,), "persist")
            self._gatherer.wait((unit,))
            self._gatherer.keep_for_good(unit)
        self.layout = self._layout_with(
            lambda ref, size: replace(size, persistent=self.shards[ref].persistent),
            lambda index, size: size,
        )
        self._executor.use_plan(plan, self.layout)

    def _flushed_bytes(self) -> int:
        self.flush()
        return sum(self.at_rest().values())

    def _norm_part(self, dtype: torch.dtype) -> torch.Tensor:
        return norm_part(
            self.shards.trainable,
            self.group.size,
            self.group.rank,
            self._is_replicated,
            self._norm_type,
            dtype,
            self.group.device,
        )

    def _note_skip(self, result: StepResult, told: list[Told], parts: list[float]) -> None:
        """Say that a step was skipped, and why; look closer in the steps that follow."""
        self._skipped.note(result.skipped)
        self._reducer.looks_for_trouble = result.skipped
        if not result.skipped:
            return
        trainable = self.shards.trainable
        troubles = [
            RankTrouble(
                rank,
                loss=not math.isfinite(each.loss),
                parameter=None if each.trouble < 0 else trainable[int(each.trouble)].name,
                slices=not math.isfinite(part),
            )
            for rank, (each, part) in enumerate(zip(told, parts, strict=True))
        ]
        step = self.steps - 1
        self._skipped.fail_if_too_many(step, troubles, result.loss_scale)
        if self.group.rank == 0:
            logger.warning("step %d is skipped: %s", step, in_words(troubles))

    def _unused_everywhere(self) -> set[ParamRef]:
        """Parameters that no rank used in this window: the optimizer leaves them alone, as it does in plain PyTorch."""
        trainable = self.shards.trainable
        flags = self.group.gather_numbers([float(p.is_touched) for p in trainable])
        return {p.ref for i, p in enumerate(trainable) if not any(row[i] for row in flags)}

    def _begin_window(self) -> None:
        self.shards.forget_grads()
        self._loss_sum.zero_()
        self._weight_sum = 0.0
        self._reducer.first_trouble = None
        self._executor.window_position = 0
        self._executor.digests.clear()


def _widened(loss: torch.Tensor) -> torch.Tensor:
    """In at least fp32, so that a factor is not rounded."""
    return loss if loss.dtype.itemsize >= 4 else loss.float()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in nested containers, in another dtype."""
    if not tensors_in(value):
        return value
    cast: Callable[[torch.Tensor], torch.Tensor] = lambda t: t.to(dtype) if t.is_floating_point() else t  # noqa: E731
    return torch.utils._pytree.tree_map_only(torch.Tensor, cast, value)
