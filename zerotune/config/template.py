"""The model.yaml that ``zerotune init`` writes: small enough for a laptop, each line explained."""

MODEL_YAML = """\
# What is trained, and how. Every key but `model` has a default; `zerotune knobs` explains those under `zero:`.

model:
  gpt:                          # or llama, hf (a transformers config), factory (your own code)
    layers: 4
    d_model: 256
    heads: 4
    vocab_size: 256             # one token per byte value
    sequence_length: 64         # tokens per sample

data:
  text:                         # or synthetic, factory
    paths: [stdlib]             # files or folders; stdlib is the sources of Python's standard library
    pattern: "**/*.py"          # which files of a folder

train:
  steps: 100                    # optimizer steps of a launch
  global_batch_size: 8          # samples per optimizer step over all ranks; stays as it is whatever the knobs
  micro_batch_size: 2           # samples per rank in one forward pass; the rest is accumulated
  activation_checkpointing: none # recompute blocks in backward: none, full, or every_2, every_3
  precision: fp32               # or bf16, fp16
  optimizer: {name: adamw, lr: 3e-4}
  seed: 0

zero:
  stage: 3                      # partition optimizer state (1), gradients too (2), parameters too (3), or nothing (0)
  prefetch_distance: auto       # how far ahead of use parameters are gathered, in elements: auto, 0, 5e6, 50M
  release: after_use            # when gathered parameters are dropped: after_use, reuse, keep or planned

cluster:
  procs_per_node: 2             # ranks per node where there are no GPUs

search:
  space: default                # which knobs are tried: `zerotune spaces` lists the choices
  trials: 20
  # memory_budget: 40GiB        # the most that a rank may allocate; `zerotune search --memory-budget` wins over it
"""
