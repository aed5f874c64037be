"""The presets, and what a run is."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

CLIP_NORM = 1.0


@dataclass(frozen=True)
class Preset:
    """A task with the model and the numbers that suit it. `model` holds `TransformerConfig` fields."""

    summary: str
    task: str
    style: str
    model: Mapping[str, Any]
    steps: int
    batch_size: int
    seq_len: int
    lr: Mapping[str, float]
    warmup: int = 0
    epoch: int | None = field(default=None, kw_only=True)  # steps whose mean loss is reported
    sequence_parallel: bool = field(default=False, kw_only=True)  # where the command does not say


PRESETS = {
    "quick": Preset(
        summary="a byte-level language model for CPUs: two minutes on two cores",
        task="text",
        style="llama",
        model=dict(
            vocab_size=256,
            hidden_size=128,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            ffn_size=352,
            max_positions=1024,
        ),
        steps=150,
        batch_size=8,
        seq_len=128,
        lr={"adam": 2e-3, "sgd": 0.3},
        warmup=30,
    ),
    "text": Preset(
        summary="a byte-level language model for GPUs, with LLaMA-style blocks",
        task="text",
        style="llama",
        model=dict(
            vocab_size=256,
            hidden_size=512,
            num_layers=8,
            num_heads=8,
            num_kv_heads=4,
            ffn_size=1408,
            max_positions=4096,
        ),
        steps=400,
        batch_size=32,
        seq_len=256,
        lr={"adam": 1e-3, "sgd": 0.3},
        warmup=40,
    ),
    "memory": Preset(
        summary="a GPT-style model learns 100 random sequences by heart, in 5 epochs of 100 steps",
        task="memory",
        style="gpt",
        model=dict(
            vocab_size=1024,
            hidden_size=512,
            num_layers=8,
            num_heads=8,
            ffn_size=2048,
            max_positions=1024,
            norm="layernorm",
            activation="gelu",
            positions="learned",
            bias=True,
            tie_embeddings=False,
            causal=False,
            init="xavier",
        ),
        steps=500,
        batch_size=16,
        seq_len=32,
        lr={"adam": 3e-4, "sgd": 0.1},
        epoch=100,
        sequence_parallel=True,  # what it is there to show is memory
    ),
}


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run's numbers, and where it runs.

    `threads`: of one worker, on the CPU. `first_step` > 0 continues `resume`.
    """

    preset: str
    device: str
    threads: int
    tp: int
    dp: int
    dp_mode: str
    steps: int
    dtype: str
    optimizer: str
    lr: float
    warmup: int
    batch_size: int
    seq_len: int
    accumulate: int
    seed: int
    sequence_parallel: bool
    checkpoint_activations: bool
    sample: int = 240
    text: str | None = None
    save: str | None = None
    save_every: int | None = None
    resume: str | None = None
    first_step: int = 0

    @property
    def world(self) -> int:
        return self.tp * self.dp

    @property
    def task(self) -> str:
        return PRESETS[self.preset].task

    def dense_twin(self) -> "RunConfig":
        """The same model on the same batches, on one device (on the CPU: on one worker's share of the cores)."""
        return replace(self, tp=1, dp=1, sequence_parallel=False, save=None, save_every=None, sample=0)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then constant."""
        return self.lr * min(1.0, (step + 1) / self.warmup) if self.warmup else self.lr

    def transformer_config(self):
        from tpfused import TransformerConfig

        preset = PRESETS[self.preset]
        return getattr(TransformerConfig, preset.style)(
            **preset.model,
            sequence_parallel=self.sequence_parallel,
            checkpoint_activations=self.checkpoint_activations,
        )

    def as_dict(self) -> dict:
        return asdict(self)
