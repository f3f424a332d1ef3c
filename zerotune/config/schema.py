"""The schema of model.yaml: one pydantic model per section.

Every field but ``model`` has a default. Reading a file, with line numbers in its errors, is
:mod:`zerotune.config.load`; what needs more than one section at once is :mod:`zerotune.config.check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from zerotune.config.knobs import REGISTRY, Knobs, OptimizerName, Recomputed
from zerotune.config.section import Section
from zerotune.config.units import Bytes, Duration

# ---------------------------------------------------------------------------------------------------- model


class GptConfig(Section):
    """A GPT decoder: learned positions, LayerNorm, GELU."""

    layers: int = Field(4, ge=1)
    d_model: int = Field(256, ge=1)
    heads: int = Field(4, ge=1)
    vocab_size: int = Field(256, ge=2)
    sequence_length: int = Field(128, ge=1)
    tie_embeddings: bool = False
    bias: bool = True
    dropout: float = Field(0.0, ge=0.0, lt=1.0)

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.d_model % self.heads:
            raise ValueError(f"d_model {self.d_model} is not divisible by heads {self.heads}")
        return self


class LlamaConfig(Section):
    """A Llama decoder: rotary positions, RMSNorm, SwiGLU, grouped key and value heads."""

    layers: int = Field(4, ge=1)
    d_model: int = Field(256, ge=1)
    heads: int = Field(4, ge=1)
    kv_heads: int | None = Field(None, ge=1)
    d_ff: int | None = Field(None, ge=1)
    vocab_size: int = Field(256, ge=2)
    sequence_length: int = Field(128, ge=1)
    tie_embeddings: bool = False
    rope_theta: float = Field(10_000.0, gt=0)

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.d_model % self.heads:
            raise ValueError(f"d_model {self.d_model} is not divisible by heads {self.heads}")
        if (self.d_model // self.heads) % 2:
            raise ValueError(
                f"d_model / heads is {self.d_model // self.heads}, which rotary positions need even"
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}")
        return self


class HfConfig(Section):
    """A causal language model of transformers, built with random weights from its configuration."""

    folder: str | None = None
    config: dict[str, Any] | None = None
    sequence_length: int = Field(128, ge=1)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.folder is None) == (self.config is None):
            raise ValueError("give either folder (with a config.json in it) or config (inline), not both")
        return self


class FactoryConfig(Section):
    """The user's own code: ``module:function`` or ``path/to/file.py:function``, called with ``args``.

    ``factory: pkg.module:fn`` is short for ``factory: {factory: pkg.module:fn}``.
    """

    shorthand: ClassVar[str | None] = "factory"

    factory: str = Field(pattern=r"^[^:]+:[A-Za-z_]\w*$")
    args: dict[str, Any] = Field(default_factory=dict)


class ModelConfig(Section):
    """What is trained: exactly one of the kinds."""

    exactly_one: ClassVar[bool] = True

    gpt: GptConfig | None = None
    llama: LlamaConfig | None = None
    hf: HfConfig | None = None
    factory: FactoryConfig | None = None


# ----------------------------------------------------------------------------------------------------- data


class TextConfig(Section):
    """Plain text: files, folders or globs, tokenised to bytes or with a tokenizer.json file.

    ``stdlib`` stands for the sources of Python's standard library, which every machine has.
    """

    paths: list[str] = Field(default_factory=lambda: ["stdlib"], min_length=1)
    pattern: str = "**/*.py"
    tokenizer: str | None = None


class SyntheticConfig(Section):
    """Random tokens, a function of the seed: for measuring speed alone."""

    pad_fraction: float = Field(0.0, ge=0.0, lt=1.0)


class DataConfig(Section):
    """What it is trained on: exactly one of the kinds."""

    exactly_one: ClassVar[bool] = True

    text: TextConfig | None = None
    synthetic: SyntheticConfig | None = None
    factory: FactoryConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _default_is_text(cls, value: Any) -> Any:
        return {"text": {}} if value in (None, {}) else value


# ---------------------------------------------------------------------------------------------------- train


class OptimizerConfig(Section):
    """An optimizer by name. ``betas`` and ``eps`` belong to AdamW, ``momentum`` and ``nesterov`` to SGD."""

    shorthand: ClassVar[str | None] = "name"

    name: OptimizerName = OptimizerName.ADAMW
    lr: float = Field(3e-4, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    nesterov: bool = False

    @model_validator(mode="after")
    def _as_torch_wants_it(self) -> Self:
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise ValueError(f"betas {list(self.betas)} are out of range; each is at least 0 and below 1")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        return self


class LrScheduleConfig(Section):
    """Learning rate over steps: linear warm-up, then constant, cosine or linear decay to ``min_ratio``."""

    name: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    decay_steps: int | None = Field(None, ge=1)
    min_ratio: float = Field(0.0, ge=0, le=1)


class LossScaleConfig(Section):
    """How the loss scale of fp16 moves: up after ``growth_interval`` good steps in a row, down after a skipped one."""

    initial: float = Field(2.0**16, gt=0)
    growth: float = Field(2.0, ge=1)
    growth_interval: int = Field(2000, ge=1)
    backoff: float = Field(0.5, gt=0, lt=1)
    minimum: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _minimum_is_below(self) -> Self:
        if self.minimum > self.initial:
            raise ValueError(f"minimum {self.minimum:g} is above initial {self.initial:g}")
        return self


class TrainConfig(Section):
    """How it is trained.

    ``global_batch_size`` is part of the workload; ``micro_batch_size``, ``activation_checkpointing`` and
    ``accumulate`` are knobs.

    ``leaf_modules`` names modules, or classes of modules, through which ranks may take different branches; ``auto``
    finds mixtures of experts. It is a property of the model and changes no mathematics.

    Under bf16 and fp16, ``gradient_dtype`` is in which gradients are kept and ``reduce_dtype`` in which they travel;
    parameters travel in the dtype of ``precision``, and sums over ranks, masters and optimizer state are fp32. A step with
    a gradient that is not finite is skipped; ``max_skipped_steps`` in a row end the run.

    ``weights`` is a safetensors file, or a folder of them, to start from instead of values drawn with ``seed``. It must
    hold exactly what the model's ``state_dict()`` does, and be readable on every node.
    """

    steps: int = Field(100, ge=1)
    global_batch_size: int = Field(8, ge=1)
    micro_batch_size: int | None = Field(None, ge=1)
    activation_checkpointing: Recomputed = "none"
    accumulate: Literal["reduce", "local"] = "reduce"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    gradient_dtype: Literal["fp32", "compute"] = "fp32"
    reduce_dtype: Literal["fp32", "compute"] = "compute"
    loss_scale: LossScaleConfig = LossScaleConfig()
    max_skipped_steps: int = Field(50, ge=1)
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    clip_norm: float | None = Field(None, gt=0)
    clip_norm_type: Literal[2, "inf"] = 2
    engine: Literal["zerotune"] = "zerotune"
    leaf_modules: tuple[str, ...] | Literal["auto"] = "auto"
    seed: int = Field(0, ge=0)
    weights: str | None = None
    save_every: int | None = Field(None, ge=1)
    save_async: bool = False


# -------------------------------------------------------------------------------------------------- cluster


class ClusterConfig(Section):
    """Where it runs. Command-line options of the same names win over these."""

    address: str | None = None
    nodes: int | None = Field(None, ge=1)
    procs_per_node: int | None = Field(None, ge=1)
    threads_per_rank: int | None = Field(None, ge=1)
    link: str | None = None
    wait: Duration = 60.0


# --------------------------------------------------------------------------------------------------- search


class SearchConfig(Section):
    """How configurations are searched and measured."""

    space: str = "default"
    trials: int = Field(20, ge=1)
    time: Duration | None = None
    memory_budget: Bytes | None = None
    objective: Literal["throughput", "memory", "pareto"] = "throughput"
    sampler: Literal["tpe", "random"] = "tpe"
    seed: int = Field(0, ge=0)
    warmup_steps: int = Field(3, ge=2)
    min_steps: int = Field(10, ge=10)
    max_steps: int = Field(30, ge=10)
    confirm_rounds: int = Field(8, ge=2)
    trial_timeout: Duration = 300.0

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.max_steps < self.min_steps:
            raise ValueError(f"max_steps {self.max_steps} is below min_steps {self.min_steps}")
        return self


class JobConfig(Section):
    """A whole model.yaml."""

    model: ModelConfig
    data: DataConfig = DataConfig(text=TextConfig())
    train: TrainConfig = TrainConfig()
    zero: Knobs = Knobs()
    cluster: ClusterConfig = ClusterConfig()
    search: SearchConfig = SearchConfig()

    @property
    def knobs(self) -> dict[str, Any]:
        """Every knob's value by name, in the registry's order, whichever section it stands in."""
        return {name: getattr(getattr(self, info.section), name) for name, info in REGISTRY.items()}

    def with_knobs(self, values: Mapping[str, Any]) -> JobConfig:
        """The same job with other values of some knobs, by name.

        Raises:
            ValidationError: A knob does not take its value.
        """
        sections: dict[str, Section] = {}
        for section in dict.fromkeys(REGISTRY[name].section for name in values):
            own = getattr(self, section)
            mine = {name: value for name, value in values.items() if REGISTRY[name].section == section}
            sections[section] = type(own).model_validate(dict(own) | mine)
        return self.model_copy(update=sections)


def knob_default(name: str) -> Any:
    """A knob's default; ``None`` for a micro-batch that follows from the global batch."""
    return section_of(name).model_fields[name].default


def section_of(name: str) -> type[Section]:
    """The section in which a knob stands."""
    sections: dict[str, type[Section]] = {"zero": Knobs, "train": TrainConfig}
    return sections[REGISTRY[name].section]
