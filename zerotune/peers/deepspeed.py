"""DeepSpeed's ZeRO-3."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch

from zerotune.config.errors import UsageError
from zerotune.models.units import largest_block
from zerotune.peers.base import Peer


class DeepSpeed(Peer):
    """DeepSpeed ZeRO-3 with its default sizes, and the same torch optimizer as everybody."""

    name: ClassVar[str] = "deepspeed"
    elements_per_step: ClassVar[float] = 3.0

    def _build(self) -> torch.optim.Optimizer:
        device, group = self.group.device, self.group
        if device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        # It asks its launcher for these, whatever group is there already.
        own = {"RANK": group.rank, "WORLD_SIZE": group.size, "LOCAL_RANK": device.index or 0}
        for name, value in own.items():
            os.environ.setdefault(name, str(value))
        try:
            import deepspeed
        except ImportError as error:
            raise UsageError("DeepSpeed is not installed", "pip install zerotune[peers]") from error
        import logging

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        self._engine, optimizer, _, _ = deepspeed.initialize(
            model=self.module,
            optimizer=self.setup.optimizer([{"params": trainable}]),
            config=self._config(),
            dist_init_required=False,
        )
        return optimizer

    def _config(self) -> dict[str, Any]:
        setup = self.setup
        return {
            "train_micro_batch_size_per_gpu": setup.micro_batch_size,
            "gradient_accumulation_steps": setup.accumulation,
            "gradient_clipping": setup.clip_norm or 0.0,
            "zero_optimization": {"stage": 3, **self._sizes()},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
            "wall_clock_breakdown": False,
        }

    def _sizes(self) -> dict[str, int]:
        return {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    def _backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)
        if not self.is_last:
            self._engine.step()  # it counts micro-batches itself, and steps with the last

    def _step(self) -> None:
        self._engine.step()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        import deepspeed

        state = {}
        for name, param in self.module.named_parameters():
            with deepspeed.zero.GatheredParameters([param]):
                state[name] = param.detach().cpu().clone()
        return state

    def close(self) -> None:
        self._engine.destroy()


class DeepSpeedScaled(DeepSpeed):
    """DeepSpeed ZeRO-3 with its sizes scaled to the model: buckets and prefetch of one block."""

    name: ClassVar[str] = "deepspeed:scaled"

    def _sizes(self) -> dict[str, int]:
        block = largest_block(self.module)
        return {
            "reduce_bucket_size": block,
            "stage3_prefetch_bucket_size": block,
            "stage3_param_persistence_threshold": min(10**5, block // 100),
            "stage3_max_live_parameters": 4 * block,
            "stage3_max_reuse_distance": 4 * block,
        }
