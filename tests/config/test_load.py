"""Reading model.yaml: right values, and every error with its place and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotune.config.errors import ConfigErrors, ExitCode
from zerotune.config.knobs import REGISTRY, Release
from zerotune.config.load import load_job, read_job
from zerotune.config.schema import JobConfig

GPT = "model: {gpt: {}}\n"


def errors(text: str, sets: list[str] | None = None) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        read_job(text, "model.yaml", sets or [])
    assert caught.value.exit_code == ExitCode.USAGE
    return caught.value.lines


def test_every_field_but_model_has_a_default() -> None:
    loaded = read_job("model:\n  gpt:\n")
    assert loaded.job == JobConfig.model_validate({"model": {"gpt": {}}})
    assert loaded.warnings == []


@pytest.mark.parametrize("empty", ["train:", "train: {}", "train: null", "data:", "zero:", "data: {}"])
def test_an_empty_section_is_as_if_it_were_not_there(empty: str) -> None:
    assert read_job(GPT + empty).job == read_job(GPT).job


def test_numbers_as_users_write_them() -> None:
    text = """
model: {gpt: {d_model: 256.0, vocab_size: 1_000}}
train: {steps: 1e3, optimizer: {lr: 3e-4}}
zero:
  prefetch_distance: 5e7
  allgather_bucket_size: 50M
  reduce_bucket_size: "5e8"
  overlap_comm: off
search: {memory_budget: 40GiB, time: 10m, trial_timeout: 90}
cluster: {address: 10.0.0.1:6379}
"""
    job = read_job(text).job
    assert (job.model.gpt and job.model.gpt.vocab_size, job.train.steps, job.train.optimizer.lr) == (
        1000,
        1000,
        3e-4,
    )
    assert (job.zero.prefetch_distance, job.zero.allgather_bucket_size) == (50_000_000, 50_000_000)
    assert (job.zero.reduce_bucket_size, job.zero.overlap_comm) == (500_000_000, False)
    assert (job.search.memory_budget, job.search.time, job.search.trial_timeout) == (40 * 2**30, 600.0, 90.0)
    assert job.cluster.address == "10.0.0.1:6379"


def test_shorthands() -> None:
    job = read_job("model: {factory: 'a/b.py:fn'}\ntrain: {optimizer: sgd}").job
    assert job.model.factory is not None and job.model.factory.factory == "a/b.py:fn"
    assert job.train.optimizer.name == "sgd"


def test_anchors_and_merge_keys() -> None:
    text = (
        "model: {gpt: {}}\nzero: &z {prefetch_distance: 7, release: keep}\nsearch: {trials: &n 5, seed: *n}\n"
    )
    assert read_job(text).job.search.seed == 5
    merged = "model:\n  gpt: &g {layers: 2}\n  # again\ndata:\n  synthetic:\n    <<: {pad_fraction: 0.5}\n"
    synthetic = read_job(merged).job.data.synthetic
    assert synthetic is not None and synthetic.pad_fraction == 0.5
    wrong = "model: {gpt: {}}\ntrain:\n  optimizer: &o\n    momentum: 2\n  lr_schedule:\n    <<: *o\n"
    assert [line.split(" ")[0] for line in errors(wrong)] == ["model.yaml:4:5:", "model.yaml:4:15:"]


CASES = {
    "typo": ("zero:\n  prefech_distance: 5", "2:3: zero.prefech_distance: no such knob, did you mean prefetch_distance?"),
    "typo in train": ("train: {optimiser: sgd}", "1:9: train.optimiser: no such key, did you mean optimizer?"),
    "knob typo": ("train: {micro_batchsize: 1}", "1:9: train.micro_batchsize: no such knob, did you mean micro_batch_size?"),
    "section": ("zero: {micro_batch_size: 1}", "1:8: zero.micro_batch_size: no such knob, micro_batch_size stands under train:"),
    "section 2": ("train: {release: keep}", "1:9: train.release: no such key, release stands under zero:"),
    "elsewhere": ("train: {lr: 1}", "1:9: train.lr: no such key, lr stands under train.optimizer:"),
    "top level": ("layers: 4", "1:1: layers: no such key, layers stands under model.gpt: or model.llama:"),
    "DeepSpeed's name": ("zero: {stage3_prefetch_bucket_size: 1}",
        "1:8: zero.stage3_prefetch_bucket_size: no such knob, it is called prefetch_distance here"),
    "no idea": ("xyzzy: 1", "1:1: xyzzy: no such key; there are model, data, train, zero, cluster, search"),
    "recomputation": ("train: {activation_checkpointing: every}", "1:35: train.activation_checkpointing: 'every' is not known here; write none, full or every_K"),
    "recomputation 2": ("train: {activation_checkpointing: every_1}", "1:35: train.activation_checkpointing: 'every_1' is not known"),
    "no such stage": ("zero: {stage: 4}", "1:15: zero.stage: 4 is out of range; write 0, 1, 2 or 3"),
    "later 6": ("train: {engine: fsdp2}", "1:17: train.engine: 'fsdp2' is not available yet; use zerotune"),
    "stage": ("zero: {stage: 7}", "1:15: zero.stage: 7 is out of range; write 0, 1, 2 or 3"),
    "bytes": ("zero: {reduce_bucket_size: 50MB}", "1:28: zero.reduce_bucket_size: '50MB' is in bytes, but this is in elements; "
        "write for example 5e7 or 50M"),
    "elements": ("search: {memory_budget: 5G}", "1:25: search.memory_budget: '5G' is in elements, but this is in bytes; "),
    "negative": ("zero: {prefetch_distance: -5}", "1:27: zero.prefetch_distance: -5 is negative; "),
    "nan": ("zero: {prefetch_distance: .nan}", "1:27: zero.prefetch_distance: nan is not a finite number; "),
    "inf": ("train: {clip_norm: .inf}", "1:20: train.clip_norm: .inf is not a finite number; write a number above 0"),
    "type": ("train: {steps: many}", "1:16: train.steps: 'many' is not a whole number of at least 1"),
    "fraction": ("train: {steps: 1.5}", "1:16: train.steps: 1.5 is not a whole number of at least 1"),
    "range": ("train: {steps: 0}", "1:16: train.steps: 0 is out of range; write a whole number of at least 1"),
    "bool": ("train: {steps: true}", "1:16: train.steps: true is not allowed here; write a whole number of at least 1"),
    "bool in list": ("train: {optimizer: {betas: [true, 0.9]}}", "1:21: train.optimizer.betas: [true, 0.9] is not allowed here; "),
    "stage false": ("zero: {stage: false}", "1:15: zero.stage: false is not allowed here; write 0, 1, 2 or 3"),
    "unit size": ("zero: {unit_size: true}", "1:19: zero.unit_size: true is not allowed here; write block, or a number of elements "),
    "not a bool": ("zero: {overlap_comm: 7}", "1:22: zero.overlap_comm: 7 is not true or false"),
    "word": ("train: {lr_schedule: {name: cosin}}", "1:29: train.lr_schedule.name: 'cosin' is not known here, did you mean cosine?"),
    "precision": ("train: {precision: int4}", "1:20: train.precision: 'int4' is not known here; write fp32, bf16 or fp16"),
    "text": ("search: {space: 7}", "1:17: search.space: 7 is not a text; quote it"),
    "list": ("data: {text: {paths: here}}", "1:22: data.text.paths: 'here' is not a list of values, such as [a, b]"),
    "length": ("train: {optimizer: {betas: [0.9]}}", "1:21: train.optimizer.betas: has the wrong length; write a list of 2 numbers"),
    "betas": ("train: {optimizer: {betas: [0.9, 2]}}", "1:9: train.optimizer: betas [0.9, 2.0] are out of range; "),
    "nesterov": ("train: {optimizer: {name: sgd, nesterov: true}}", "1:9: train.optimizer: nesterov needs a momentum above 0"),
    "mapping": ("cluster: [1]", "1:1: cluster: [1] is not a mapping with keys such as address, nodes, procs_per_node"),
    "empty": ("train: {steps: }", "1:9: train.steps: is empty; write a whole number of at least 1"),
    "duration": ("search: {time: 5x}", "1:16: search.time: '5x' has an unknown suffix; "),
    "date": ("train: {steps: 2020-01-01}", "1:16: train.steps: '2020-01-01' is not a whole number"),
    "key": ("train: {5: 1}", "1:9: train.5: a key must be a word; quote it"),
    "complex key": ("train: {[a]: 1}", "1:9: train: a key must be a word, not a list or a mapping"),
    "tag": ("train: {steps: !!python/object:os.system x}", "1:16: train.steps: the tag "),
    "twice": ("train:\n  steps: 5\n  seed: 1\n  steps: 6", "4:3: train.steps: given twice, first on line 2; remove one of them"),
    "planned": ("zero: {release: planned}", "1:17: zero.release: planned needs zero.memory_budget; add it, for example"),
    "budget in elements": ("zero: {memory_budget: 5G}", "1:23: zero.memory_budget: '5G' is in elements, but this is in bytes; "),
    "reuse": ("zero: {release: reuse}", "1:17: zero.release: reuse needs zero.max_reuse_distance; "),
    "micro": ("train: {micro_batch_size: 3}", "1:27: train.micro_batch_size: 3 does not divide global_batch_size 8; write 1, 2, 4 or 8"),
    "bounds": ("search: {min_steps: 20, max_steps: 10}", "1:1: search: max_steps 10 is below min_steps 20"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_one_line_with_place_and_remedy(case: str) -> None:
    text, line = CASES[case]
    found = errors(text + "\n" + GPT)
    assert len(found) == 1, found
    assert found[0].startswith(f"model.yaml:{line}"), found[0]
    assert "\n" not in found[0] and "Input should" not in found[0]


MODEL_CASES = {
    "none": ("train: {steps: 5}", "1:1: model: is missing; add it, for example `model: {gpt: {}}`"),
    "two": (
        "model: {gpt: {}, llama: {}}",
        "1:1: model: takes exactly one of gpt, llama, hf, factory; found gpt and llama",
    ),
    "null": (
        "model: {gpt: null}",
        "1:1: model: takes exactly one of gpt, llama, hf, factory; found none of them",
    ),
    "empty": ("model:", "1:1: model: takes exactly one of gpt, llama, hf, factory; found none of them"),
    "kind": ("model: {gtp: {}}", "1:9: model.gtp: no such key, did you mean gpt?"),
    "section": ("modle: {gpt: {}}", "1:1: modle: no such key, did you mean model?"),
    "heads": ("model: {gpt: {heads: 3}}", "1:9: model.gpt: d_model 256 is not divisible by heads 3"),
    "kv": ("model:\n  llama: {kv_heads: 3}", "2:3: model.llama: heads 4 is not divisible by kv_heads 3"),
    "hf": ("model: {hf: {}}", "1:9: model.hf: give either folder"),
    "factory": (
        "model: {factory: foo}",
        "1:9: model.factory.factory: 'foo' is not a factory; write module:function",
    ),
    "vocabulary": (
        "model: {gpt: {vocab_size: 100}}",
        "1:27: model.gpt.vocab_size: 100 is too small for text as bytes",
    ),
    "list": ("- a", "1:1: ['a'] is not a mapping; the file has the sections model, "),
    "word": ("hello", "1:1: 'hello' is not a mapping; the file has the sections model, "),
}


@pytest.mark.parametrize("case", MODEL_CASES)
def test_model(case: str) -> None:
    text, line = MODEL_CASES[case]
    found = errors(text)
    assert len(found) == 1, found
    assert found[0].startswith(f"model.yaml:{line}"), found[0]


SYNTAX = {
    "bracket": ("model: {gpt: {}\ntrain: 5", "2:1"),
    "colon": ("model: a: b", "1:9"),
    "tab": ("model:\n\tgpt: {}", "2:1"),
    "quote": ("model: 'x\n", "2:1"),
    "alias": ("model: *x", "1:8"),
    "documents": ("model: {gpt: {}}\n---\nmodel: {}", "2:1"),
    "control": ("model: {gpt: {}}\nx: \x00", "2:4"),
    "itself": ("model: &m {gpt: *m}", "1:8"),
}


@pytest.mark.parametrize("case", SYNTAX)
def test_syntax_errors_have_a_place(case: str) -> None:
    text, place = SYNTAX[case]
    assert errors(text)[0].startswith(f"model.yaml:{place}: "), errors(text)


def test_all_errors_at_once_in_the_order_of_the_file() -> None:
    text = """\
model: {gpt: {layers: 0}, llama: {}}
train: {steps: x, lr: 1}
zero:
  prefech_distance: 1
  stage: 3
  stage: 0
search: {memory_budget: 5M}
"""
    found = errors(text, ["zero.unit_size=50MB", "nonsense"])
    assert [line.split(": ")[0] for line in found] == [
        "model.yaml:1:1", "model.yaml:1:23", "model.yaml:2:16", "model.yaml:2:19", "model.yaml:4:3", "model.yaml:6:3",
        "model.yaml:7:25", "--set zero.unit_size=50MB", "--set nonsense",
    ]  # fmt: skip


def test_aliases_of_aliases_end() -> None:
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n"
    for name, inner in zip("bcdefgh", "abcdefg", strict=True):
        bomb += f"{name}: &{name} [{', '.join([f'*{inner}'] * 9)}]\n"
    assert "aliases included" in " ".join(errors(bomb))


def test_deep_nesting_ends() -> None:
    assert "nested too deeply" in errors("model: " + "[" * 1200)[0]


class TestFiles:
    def test_missing(self, tmp_path: Path) -> None:
        path = tmp_path / "model.yaml"
        with pytest.raises(ConfigErrors, match="no such file; run `zerotune init`") as caught:
            load_job(path)
        assert caught.value.lines[0].startswith(str(path)) and caught.value.exit_code == 2

    def test_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigErrors, match="is a folder"):
            load_job(tmp_path)
        (tmp_path / "model.yaml").write_text(GPT)
        with pytest.raises(ConfigErrors, match=r"did you mean .*model\.yaml"):
            load_job(tmp_path)

    @pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "\ufeff"])
    def test_empty(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "m.yaml").write_text(text)
        with pytest.raises(ConfigErrors, match="the file is empty; run `zerotune init`"):
            load_job(tmp_path / "m.yaml")

    def test_not_text(self, tmp_path: Path) -> None:
        (tmp_path / "m.yaml").write_bytes(b"model:\n  gpt: \xff\xfe")
        with pytest.raises(ConfigErrors, match=r"m.yaml:2:8: is not UTF-8 text \(byte 0xff\)"):
            load_job(tmp_path / "m.yaml")

    def test_byte_order_mark_and_windows_lines(self, tmp_path: Path) -> None:
        (tmp_path / "m.yaml").write_bytes(b"\xef\xbb\xbfmodel:\r\n  gpt:\r\n    layers: 2\r\n")
        gpt = load_job(tmp_path / "m.yaml").job.model.gpt
        assert gpt is not None and gpt.layers == 2

    @pytest.mark.parametrize("path", ["a\0b", "x" * 5000])
    def test_impossible_names(self, path: str) -> None:
        with pytest.raises(ConfigErrors, match="cannot be read"):
            load_job(path)


class TestSets:
    def test_replaces_and_adds(self) -> None:
        job = read_job(
            GPT + "train: {optimizer: sgd}",
            sets=["zero.release=keep", "zero.stage=3", "zero.prefetch_distance=50M", "train.optimizer.momentum=0.9",
                  "data.text.pattern=**/*.md", "data.text.paths=[a, b]", "data.text.paths.1=c", "train.steps=1", "train.steps=2"],
        ).job  # fmt: skip
        assert (job.zero.release, job.zero.prefetch_distance) == (Release.KEEP, 50_000_000)
        assert (job.train.optimizer.name, job.train.optimizer.momentum) == ("sgd", 0.9)
        assert job.data.text is not None
        assert (job.data.text.pattern, job.data.text.paths, job.train.steps) == ("**/*.md", ["a", "c"], 2)

    def test_without_a_line_in_the_file(self) -> None:
        assert read_job("# nothing\n", sets=["model.gpt.layers=2"]).job.model.gpt is not None

    def test_null_takes_a_value_away(self) -> None:
        assert read_job(GPT + "train: {micro_batch_size: 3}", sets=["train.micro_batch_size="]).warnings == []

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ("zero.stage=7", "zero.stage: 7 is out of range; write 0, 1, 2 or 3"),
            (
                "zero.prefech_distance=1",
                "zero.prefech_distance: no such knob, did you mean prefetch_distance?",
            ),
            (
                "zero.reduce_bucket_size=50MB",
                "zero.reduce_bucket_size: '50MB' is in bytes, but this is in elements; ",
            ),
            ("zero.stage", "has no '='; write --set section.key=value"),
            ("=4", "has an empty name before '='; "),
            ("a..b=4", "has an empty name before '='; "),
            ("data.text.paths=[a", "data.text.paths: the value is not valid YAML"),
            ("train.steps.x=1", "train.steps: a mapping is not a whole number"),
            ("zero=1", "zero: 1 is not a mapping with keys such as stage"),
        ],
    )
    def test_errors_name_the_option(self, option: str, message: str) -> None:
        found = errors(GPT, [option])
        assert len(found) == 1
        assert found[0].startswith(f"--set {option}: {message}")

    def test_another_kind_of_model(self) -> None:
        found = errors(GPT, ["model.llama.layers=2"])
        assert found == [
            "model.yaml:1:1: model: takes exactly one of gpt, llama, hf, factory; found gpt and llama"
        ]

    def test_no_such_item(self) -> None:
        found = errors(GPT + "data: {text: {paths: [a]}}", ["data.text.paths.3=b"])
        assert found == ["--set data.text.paths.3=b: data.text.paths.3: there is no item 3; the list has 1"]


SECTIONS = [
    "model.gpt",
    "data.text",
    "train",
    "train.optimizer",
    "train.lr_schedule",
    "zero",
    "cluster",
    "search",
]


@given(
    st.sampled_from(SECTIONS),
    st.integers(0, 5),
    st.integers(1, 6),
    st.from_regex(r"q[qz]{2,8}", fullmatch=True),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_places_of_unknown_keys(section: str, blank: int, indent: int, key: str, spaced: bool) -> None:
    """A wrong key is found on its line and column, wherever it stands and however far it is indented."""
    steps = section.split(".")
    lines = ["# comment"] * blank + ([] if section == "model.gpt" else ["model: {gpt: {}}"])
    for depth, step in enumerate(steps):
        lines.append(" " * (indent * depth) + step + ":" + ("   # why" if spaced else ""))
    lines.append(" " * (indent * len(steps)) + f"{key}: 1")
    found = errors("\n".join(lines))
    assert found[0].startswith(
        f"model.yaml:{len(lines)}:{indent * len(steps) + 1}: {section}.{key}: no such "
    ), found


@given(
    st.sampled_from([info for info in REGISTRY.values() if info.unit]), st.integers(1, 12), st.integers(0, 9)
)
@settings(max_examples=40, deadline=None)
def test_places_of_wrong_values(info: object, gap: int, blank: int) -> None:
    from zerotune.config.knobs import KnobInfo

    assert isinstance(info, KnobInfo)
    wrong = "50M" if info.unit == "bytes" else "50MB"
    text = "\n" * blank + GPT + f"{info.section}:\n  {info.name}:{' ' * gap}{wrong}\n"
    assert errors(text)[0].startswith(f"model.yaml:{blank + 3}:{len(info.name) + 4 + gap}: {info.path}: "), (
        errors(text)
    )


@given(st.text(max_size=200))
@settings(max_examples=150, deadline=None)
def test_any_text_ends_in_a_job_or_in_lines(text: str) -> None:
    try:
        read_job(text)
    except ConfigErrors as error:
        assert error.lines and all(line.startswith("model.yaml:") for line in error.lines)
