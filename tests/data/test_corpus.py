"""From a config to batches: splits, streams that do not depend on how they are read, and the users' mistakes."""

import dataclasses
import functools
import itertools
import json
from hashlib import sha256

import data_config
import numpy as np
import pytest

from k3jax.config import ConfigError
from k3jax.data import TrainRows, load, stream_hash
from k3jax.data import corpus as corpora

BOS, EOS = 256, 257


config = functools.partial(data_config.config, batch_rows=4)


def remainder(name: str) -> int:
    return int(sha256(name.encode()).hexdigest(), 16) % 20


def texts(documents) -> list[str]:
    """The documents of a set as text; asserts bos and eos around each."""
    found = []
    for index, length in enumerate(documents.lengths.tolist()):
        ids = documents.read(index, 0, length)
        assert ids[0] == BOS and ids[-1] == EOS
        found.append(bytes(ids[1:-1].astype(np.uint8)).decode())
    return found


@pytest.fixture
def library(write, tmp_path):
    """60 text files whose content is their own name; 40 lines of JSON."""
    names = [f"{folder}/n{number:02d}.txt" for folder in "abc" for number in range(20)]
    for name in names:
        write(f"lib/{name}", name)
    write("lines.jsonl", [{"text": f"lines.jsonl:{number}"} for number in range(1, 41)])
    return names, tmp_path / "lib", tmp_path / "lines.jsonl"


def test_held_out_rule(library):
    names, folder, lines = library
    corpus = load(config(folder, lines), 264)
    names = names + [f"lines.jsonl:{number}" for number in range(1, 41)]
    expected = [name for name in names if remainder(name) == 0]
    assert 1 <= len(expected) <= 12
    assert texts(corpus.held_out) == expected
    assert texts(corpus.train) == [name for name in names if remainder(name)]
    away = [sum(remainder(name) == 0 for name in part) for part in (names[:60], names[60:])]
    tokens = [sum(len(name) + 2 for name in part) for part in (names[:60], names[60:])]
    assert corpus.lines() == [
        f"{folder}: 60 documents, {tokens[0]} tokens, {away[0]} of the documents held out",
        f"{lines}: 40 documents, {tokens[1]} tokens, {away[1]} of the documents held out",
    ]
    total = sum(len(name) + 2 for name in names if remainder(name))
    assert corpus.steps_per_epoch == total / 64


@pytest.mark.parametrize("weights", [(), (2.0, 1.0)])
def test_held_out_never_trains(library, weights):
    """Over three epochs of the stream: every training document is met, no held-out one ever."""
    names, folder, lines = library
    corpus = load(config(folder, lines, weights=weights, seq_len=24), 264)
    batches = corpus.train_batches()
    steps = int(3 * corpus.steps_per_epoch) + 20
    seen = bytearray()
    for step in range(steps):
        for tokens in batches.batch(step)["tokens"]:
            seen += b"\0" + bytes(np.where(tokens < 256, tokens, ord("\n")).astype(np.uint8))
    seen += b"\0"  # what a row's border cuts has one in it
    whole = {line.decode() for line in seen.split(b"\n") if b"\0" not in line}
    names = names + [f"lines.jsonl:{number}" for number in range(1, 41)]
    training = {name for name in names if remainder(name)}
    assert training >= whole - {""} and len(whole) > 0.8 * len(training)
    evaluation = np.concatenate([batch["tokens"].ravel() for batch in corpus.evaluation_batches().iterate()])
    told = bytes(evaluation[evaluation < 256].astype(np.uint8)).decode()
    assert told == "".join(name for name in names if not remainder(name))


def test_every_document_once_per_epoch(library):
    _, folder, lines = library
    corpus = load(config(folder, lines), 264)
    rows = corpus.train_batches()
    per_epoch = int(corpus.train.offsets[-1])
    walk = TrainRows(corpus.train, 16, 0)  # it says where in the stream a row lies
    stream = np.full(4 * per_epoch, -1)
    for place in range(-(-3 * per_epoch // 16) + 30):
        at = walk.row(place) * 16
        stream[at : at + 16] = rows.batch(place // 4)["tokens"][place % 4][: max(0, len(stream) - at)]
    for epoch in range(3):
        part = stream[epoch * per_epoch : (epoch + 1) * per_epoch].tolist()
        documents = "".join("\n" if token > 255 else chr(token) for token in part).split("\n\n")
        assert sorted(text.strip("\n") for text in documents) == sorted(texts(corpus.train))


def test_stream_is_the_same_however_it_is_read(library):
    """The same hash for any prefetch and after any restart, an epoch's end included; another for another seed."""
    _, folder, lines = library
    for weights in ((), (1.0, 3.0)):
        given = config(folder, lines, weights=weights, seed=5)
        batches = load(given, 264).train_batches()
        expected = [stream_hash([batches.batch(step)]) for step in range(60)]  # an epoch is some 20 steps
        for prefetch, start in ((0, 0), (2, 0), (4, 17), (1, 21), (2, 40)):
            iterator = load(given, 264).train_batches().iterate(start, prefetch=prefetch)
            found = [stream_hash([batch]) for batch in itertools.islice(iterator, 20)]
            iterator.close()
            assert found == expected[start : start + 20]
        other = load(dataclasses.replace(given, seed=6), 264).train_batches()
        assert stream_hash([other.batch(0)]) != expected[0]


def test_held_out_sources(library, write, tmp_path):
    names, folder, lines = library
    corpus = load(config(folder, held_out=(str(lines),)), 264)
    assert texts(corpus.train) == names and len(corpus.held_out) == 40
    assert corpus.lines()[1].endswith(", for evaluation")
    for spec in (folder / "a/n03.txt", folder / "b", folder / "**/n1*.txt"):
        with pytest.raises(ConfigError, match=r"^data.held_out: \S*/lib/\S*txt is among data.source too"):
            load(config(folder, held_out=(str(spec),)), 264)
    (tmp_path / "link.txt").symlink_to(folder / "a/n03.txt")
    with pytest.raises(ConfigError, match=r"a/n03\.txt is among data.source too"):
        load(config(folder, held_out=(str(tmp_path / "link.txt"),)), 264)
    with pytest.raises(ConfigError, match=r"^data.source: \S*n03.txt is in two of its entries"):
        load(config(folder, folder / "a/n03.txt"), 264)
    with pytest.raises(ConfigError, match=r"^data.held_out: no file or folder /none$"):
        load(config(folder, held_out=("/none",)), 264)
    with pytest.raises(ConfigError, match=r"^data.held_out: stdlib is among data.source too"):
        load(config("stdlib", held_out=("stdlib",)), 264)


def smallest(*names: str) -> str:
    """The name with the smallest remainder, then digest, in plain integers."""
    return min(names, key=lambda name: (remainder(name), sha256(name.encode()).digest()))


def test_few_documents(write):
    """Where the rule holds nothing out, the smallest lot is; a source always keeps a document to train on."""
    names = [name for name in (f"t{number}.txt" for number in range(40)) if remainder(name)][:3]
    for name in names:
        write(f"few/{name}", name)
    folder = write("few/.x", "").removesuffix("/.x")
    corpus = load(config(folder), 264)
    assert texts(corpus.held_out) == [smallest(*names)]
    assert texts(corpus.train) == [name for name in names if name != smallest(*names)]
    away = [name for name in (f"u{number}.txt" for number in range(200)) if not remainder(name)][:3]
    for name in away:
        write(f"away/{name}", name)
    one = write("one/a.txt", "one document")
    corpus = load(config(write("away/.x", "").removesuffix("/.x"), one, weights=(1.0, 1.0)), 264)
    assert texts(corpus.held_out) == [smallest(*away)]  # three would be: then the source could not train
    assert len(corpus.train) == 3
    with pytest.raises(ConfigError, match=r"^data.held_out must name sources: data.source has no second document"):
        load(config(one), 264)
    corpus = load(config(one, held_out=(write("two/b.txt", "x"),)), 264)
    assert texts(corpus.train) == ["one document"] and texts(corpus.held_out) == ["x"]


def test_conversations(write):
    """Loss on answers alone, also among evaluation rows and n-grams; text beside them counts whole."""
    talk = [{"role": "user", "content": "q?"}, {"role": "assistant", "content": "yes"}]
    path = write("talk.jsonl", [{"messages": talk}] * 30 + [{"messages": talk[:1]}] * 2 + [{"text": "plain"}] * 10)
    corpus = load(config(path, seq_len=64), 264)
    assert corpus.lines()[1] == f"{path}: skipped 2: no answer (the first: talk.jsonl:31)"
    learnt = b"yes<|im_end|>\n"
    for batches in (corpus.train_batches(), corpus.evaluation_batches()):
        counted = set()
        for batch in (batches.batch(step) for step in range(min(6, len(batches)))):
            for targets, mask in zip(batch["targets"], batch["loss_mask"], strict=True):
                counted |= {bytes(run) for run in runs(targets, mask)}
        wholes = {learnt + b"\n", b"plain\n"}  # the last \n is eos
        assert counted and all(any(run in whole for whole in wholes) for run in counted)
    ngrams = corpus.ngrams()
    assert set(ngrams) == {"unigram", "bigram", "trigram"} and ngrams["trigram"] < ngrams["unigram"] < np.log(257)


def runs(targets, mask):
    """Stretches of counted targets as bytes, eos as a line feed."""
    text = bytearray()
    for token, counts in zip([*targets.tolist(), 0], [*mask.tolist(), False], strict=True):
        if counts:
            text.append(10 if token == EOS else token)
        elif text:
            yield text
            text = bytearray()


def test_fingerprint(library, write):
    _, folder, lines = library
    given = config(folder, lines)
    first = load(given, 264).fingerprint
    assert load(given, 264).fingerprint == first == load(dataclasses.replace(given, seed=7), 264).fingerprint
    others = [
        load(config(lines, folder), 264).fingerprint,
        load(config(folder, held_out=(str(lines),)), 264).fingerprint,
        load(config(folder, lines, weights=(1.0, 2.0)), 264).fingerprint,
    ]
    write("lib/a/n03.txt", "a/n03.txu")
    others.append(load(given, 264).fingerprint)
    assert len({first, *others}) == 5


def test_no_ngrams_of_too_much(library, monkeypatch):
    _, folder, _ = library
    corpus = load(config(folder), 264)
    assert corpus.ngrams() is not None
    monkeypatch.setattr(corpora, "COUNTED_TOKENS", 100)
    assert corpus.ngrams() is None


def test_weights_of_one_source_change_nothing(library):
    _, folder, _ = library
    one, other = (load(config(folder, weights=weights), 264).train_batches() for weights in ((), (3.0,)))
    assert stream_hash([one.batch(9)]) == stream_hash([other.batch(9)])


def test_hugging_face_tokenizer(tokenizer_json, library):
    """The whole road with another vocabulary; the ids are those of the tokenizer, the model must hold them."""
    _, folder, lines = library
    given = config(folder, lines, tokenizer=str(tokenizer_json))
    with pytest.raises(ConfigError, match=r"^model.vocab must be at least the tokenizer's 109, got 64$"):
        load(given, 64)
    corpus = load(given, 128)
    assert corpus.tokenizer.decode(corpus.train.read(0, 0, int(corpus.train.lengths[0]))) == "a/n00.txt"
    assert corpus.train_batches().batch(0)["tokens"].max() < 109
    with pytest.raises(ConfigError, match=r"^data.chat_template: no file /none.jinja$"):
        load(dataclasses.replace(given, chat_template="/none.jinja"), 128)
    (tokenizer_json.parent / "tokenizer_config.json").write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(ConfigError, match=r"^data.chat_template: tokenizer_config.json beside \S* holds no chat_templ"):
        load(given, 128)
