import numpy as np
import pytest
import torch

from zerotune.config.errors import UsageError
from zerotune.config.schema import DataConfig, ModelConfig, TextConfig
from zerotune.models.task import IGNORE
from zerotune.train.data import build_data
from zerotune.train.data.order import EpochOrder
from zerotune.train.data.text import STDLIB_BYTES, corpus, find_files

GPT = ModelConfig.model_validate(
    {"gpt": {"d_model": 8, "heads": 1, "vocab_size": 256, "sequence_length": 16}}
)
USERS = ModelConfig.model_validate({"factory": "m:f"})


def data(model: ModelConfig = GPT, seed: int = 0, batch: int = 8, **kinds):
    return build_data(DataConfig.model_validate(kinds), model, seed, batch)


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.py").write_text("b" * 100)
    (tmp_path / "sub" / "a.py").write_text("ä" * 100)
    (tmp_path / "notes.txt").write_text("n" * 50)
    return tmp_path


KINDS = [{"synthetic": {"pad_fraction": 0.5}}, {"text": {}}]


@pytest.mark.parametrize("kind", KINDS, ids=["synthetic", "text"])
def test_a_sample_depends_on_seed_step_and_index_alone(kind):
    whole = data(**kind).batch(3, range(8))
    again = data(**kind)
    again.batch(1, range(4))  # what was drawn before does not matter
    parts = [again.batch(3, [i]) for i in reversed(range(8))]
    assert torch.equal(torch.cat([part.inputs for part in reversed(parts)]), whole.inputs)
    assert torch.equal(torch.cat([part.targets_BT for part in reversed(parts)]), whole.targets_BT)
    assert whole.inputs.dtype == torch.int64 and whole.inputs.shape == (8, 16)
    for other in (data(seed=1, **kind).batch(3, range(8)), data(**kind).batch(4, range(8))):
        assert not torch.equal(other.inputs, whole.inputs)
    assert len({tuple(row) for row in whole.inputs.tolist()}) == 8


@pytest.mark.parametrize("kind", KINDS, ids=["synthetic", "text"])
def test_targets_are_the_next_tokens(kind):
    batch = data(**kind).batch(0, range(8))
    shifted, targets = batch.inputs[:, 1:], batch.targets_BT[:, :-1]
    real = targets != IGNORE
    assert torch.equal(shifted[real], targets[real])
    assert batch.tokens == int((batch.targets_BT != IGNORE).sum()) == (64 if "synthetic" in kind else 128)
    assert (batch.samples, batch.inputs.is_contiguous()) == (8, True)


def test_every_window_of_the_text_once_an_epoch(texts):
    (texts / "long.bin").write_bytes(bytes(range(200)))
    source = data(text={"paths": ["long.bin"]}, batch=4)
    windows = (200 - 1) // 16
    rows = [source.batch(step, range(4)).inputs for step in range(windows)]  # four epochs
    starts = torch.cat(rows)[:, 0].tolist()
    epochs = [starts[i * windows : (i + 1) * windows] for i in range(4)]
    assert all(sorted(epoch) == [16 * i for i in range(windows)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_order_is_disjoint_over_ranks_and_covers():
    order = EpochOrder(samples=10, seed=3, global_batch_size=4)
    seen = [order(step, index) for step in range(5) for index in range(4)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]


def test_standard_library():
    files = find_files(TextConfig())
    assert sum(file.stat().st_size for file in files) <= STDLIB_BYTES
    assert len(files) > 300 and files == sorted(files)
    assert not any({"site-packages", "test", "tests"} & set(file.parts) for file in files)
    read = corpus(TextConfig())
    assert read.tokens.dtype == np.uint8 and read.vocab_size == 256
    assert corpus(TextConfig()).tokens is read.tokens  # once per process


@pytest.mark.parametrize(
    ("paths", "pattern", "names"),
    [
        (["b.py"], "**/*.py", ["b.py"]),
        (["."], "**/*.py", ["b.py", "sub/a.py"]),
        (["sub", "."], "**/*.py", ["sub/a.py", "b.py"]),
        (["*.txt", "b.py", "b.py"], "**/*.py", ["notes.txt", "b.py"]),
        (["."], "*.txt", ["notes.txt"]),
    ],
)
def test_which_files(texts, paths, pattern, names):
    assert [str(path) for path in find_files(TextConfig(paths=paths, pattern=pattern))] == names


def test_bytes_in_the_order_of_files(texts):
    tokens = corpus(TextConfig(paths=["b.py", "sub"])).tokens
    assert bytes(tokens) == b"b" * 100 + "ä".encode() * 100
    (texts / "b.py").write_text("c")
    assert bytes(corpus(TextConfig(paths=["b.py", "sub"])).tokens) == b"c" + "ä".encode() * 100


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ({"paths": ["sub"], "pattern": "*.md"}, r"no file in folder sub matches \*\.md"),
        ({"paths": ["absent"]}, "no file or folder absent"),
        ({"paths": ["*.md"]}, r"no file matches \*\.md"),
        ({"paths": ["empty.txt"]}, "empty.txt are empty"),
        ({"paths": ["short.txt"]}, "has 5 tokens, fewer than one sample of 17"),
        ({"tokenizer": "absent.json"}, "absent.json does not exist"),
        ({"paths": ["b.py"], "tokenizer": "b.py"}, "not a tokenizer.json"),
    ],
)
def test_mistakes_are_one_line(texts, text, says):
    (texts / "empty.txt").touch()
    (texts / "short.txt").write_text("short")
    with pytest.raises(UsageError, match=says) as caught:
        data(text=text)
    assert "\n" not in str(caught.value)


def test_vocabulary_must_hold_the_tokens(texts):
    small = ModelConfig.model_validate({"gpt": {"d_model": 8, "heads": 1, "vocab_size": 100}})
    with pytest.raises(UsageError, match=r"bytes as tokens need a vocabulary of 256, but .* 100"):
        data(small, text={"paths": ["b.py"]})


def test_tokenizer(texts):
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[UNK]": 0, "to": 1, "be": 2, "or": 3, "not": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(texts / "tokenizer.json"))
    (texts / "words.txt").write_text("to be or not to be what " * 10)
    config = TextConfig(paths=["words.txt"], tokenizer="tokenizer.json")
    assert corpus(config).tokens[:7].tolist() == [1, 2, 3, 4, 1, 2, 0]
    assert corpus(config).vocab_size == 5
    small = ModelConfig.model_validate({"gpt": {"d_model": 8, "heads": 1, "vocab_size": 4}})
    with pytest.raises(UsageError, match=r"tokenizer.json needs a vocabulary of 5"):
        data(small, text=config.model_dump())


FACTORY = """\
import torch

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, i):
        return {"x": torch.tensor([float(i)]), "id": i}

class Batches:
    def batch(self, step, indices):
        return torch.tensor([[100 * step + i] * 5 for i in indices])

dataset = Samples
batches = Batches
def function():
    return lambda step, indices: torch.tensor([[100 * step + i] * 5 for i in indices])
def labels():
    ids = torch.arange(10).view(2, 5)
    mask = ids.clone(); mask[1, 3:] = -100
    return lambda step, indices: {"input_ids": ids, "labels": mask}
def pair():
    ids = torch.arange(10).view(2, 5)
    return lambda step, indices: (ids, ids + 1)
def raises():
    def draw(step, indices):
        raise OSError("disk on fire")
    return draw
def number():
    return 5
def wrong():
    return lambda step, indices: "text"
"""


@pytest.fixture
def factory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.py").write_text(FACTORY)


def test_factory_dataset(factory):
    source = data(USERS, factory="d.py:dataset", batch=4)
    batches = [source.batch(step, range(4)) for step in range(3)]
    ids = torch.cat([batch.inputs["id"] for batch in batches]).tolist()
    assert sorted(ids[:6]) == sorted(ids[6:]) == list(range(6))
    assert batches[0].inputs["x"].shape == (4, 1)
    assert (batches[0].samples, batches[0].tokens, batches[0].targets_BT) == (4, None, None)


@pytest.mark.parametrize("name", ["batches", "function"])
def test_factory_batches(factory, name):
    assert data(USERS, factory=f"d.py:{name}").batch(2, range(1, 3)).inputs[:, 0].tolist() == [201, 202]
    language = data(GPT, factory=f"d.py:{name}").batch(2, range(1, 3))
    assert language.inputs.shape == language.targets_BT.shape == (2, 4) and language.tokens == 8


def test_factory_with_labels_and_pairs(factory):
    batch = data(GPT, factory="d.py:labels").batch(0, range(2))
    assert batch.inputs.tolist() == [[0, 1, 2, 3], [5, 6, 7, 8]]
    assert batch.targets_BT.tolist() == [[1, 2, 3, 4], [6, 7, IGNORE, IGNORE]] and batch.tokens == 6
    pair = data(GPT, factory="d.py:pair").batch(0, range(2))
    assert torch.equal(pair.targets_BT, pair.inputs + 1) and pair.inputs.shape == (2, 5)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("number", "returned int"),
        ("raises", r"raised OSError: disk on fire \(d.py:\d+\)"),
        ("wrong", "does not give what a language model trains on"),
        ("batches", "gave 3 samples where 2 were asked for"),
    ],
)
def test_factory_mistakes(factory, name, says, monkeypatch):
    if name == "batches":
        monkeypatch.setattr(
            "zerotune.train.data.factory.call_factory", lambda _: lambda s, i: torch.ones(3, 5)
        )
    with pytest.raises(UsageError, match=says):
        data(GPT, factory=f"d.py:{name}").batch(0, range(2))


def test_factory_model_on_built_in_data():
    model = ModelConfig.model_validate({"factory": {"factory": "m:f", "args": {"sequence_length": 12}}})
    assert data(model, synthetic={}).batch(0, [0]).inputs.shape == (1, 12)
    assert data(USERS, text={}).batch(0, [0]).inputs.shape == (1, 128)
