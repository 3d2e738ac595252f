import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from conversations import ANSWER, ASK, ASK_AGAIN, CALL, RESULT

from gapless.config import DataConfig
from gapless.data import store as store_module
from gapless.data.store import tokenize
from gapless.data.tokenizer import Tokenizer
from tiny_tokenizer import write_tiny_tokenizer

ROWS = [
    {"messages": [ASK, ANSWER]},
    {"messages": [ASK]},
    {"messages": []},
    {"messages": [ASK, {"role": "assistant", "content": "a long answer " * 20}]},
    {"messages": [{"role": "user", "content": "a long question " * 20}, ANSWER]},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder, "qwen3")
    return Tokenizer.from_folder(folder)


def config(**options):
    return DataConfig(train=(), **{"max_length": 100, **options})


def contents(store):
    documents = [store.document(index) for index in range(len(store))]
    return [(document.tokens.tolist(), document.trained.tolist()) for document in documents]


def test_what_becomes_of_rows(tokenizer):
    dropped = tokenize(ROWS, tokenizer, config())
    assert dropped.report.kept == len(dropped) == 1
    assert dropped.report.dropped == {store_module.UNTRAINED: 1, store_module.EMPTY: 1, store_module.TOO_LONG: 2}
    cut = tokenize(ROWS, tokenizer, config(long_rows="truncate"))
    assert cut.report.dropped == {store_module.UNTRAINED: 1, store_module.EMPTY: 1, store_module.CUT: 1}
    assert (cut.report.truncated, cut.lengths.tolist()[1]) == (1, 100)
    whole = tokenize(ROWS, tokenizer, config(max_length=1000))
    assert [store.where(len(store) - 1) for store in (dropped, cut, whole)] == ["row 0", "row 3", "row 4"]
    for store in (dropped, cut, whole):
        assert store.report.rows == 5 == store.report.kept + sum(store.report.dropped.values())
        assert store.report.tokens == store.lengths.sum()
        assert store.report.trained == store.trained.sum()
        assert store.trained.tolist() == [sum(trained[1:]) for _, trained in contents(store)]
    assert contents(cut)[1][0] == contents(whole)[1][0][:100]
    text = "\n".join(cut.report.lines())
    assert "1 rows cut to max_length 100" in text
    assert "1 rows left out: cut before its first trained token" in text


def test_documents_are_those_of_the_tokenizer(tokenizer):
    tokens, trained = contents(tokenize(ROWS, tokenizer, config()))[0]
    assert tokens == tokenizer.encode(tokenizer.render(ROWS[0]["messages"]))
    assert tokenizer.decode(np.array(tokens)[trained]) == "<think>\n\n</think>\n\nHello! "
    assert tokenize([{"text": "dog"}], tokenizer, config()).document(0).tokens.dtype == np.int32


def test_nothing_to_train_on_is_refused_with_counts(tokenizer):
    message = (
        r"none of the 4 rows of the list has anything to train on \(1 nothing .*; 1 empty; 2 longer than "
        r'max_length\); .*is 100; raise data.max_length, or set data.long_rows = "truncate"$'
    )
    with pytest.raises(ValueError, match=message):
        tokenize(ROWS[1:], tokenizer, config())
    with pytest.raises(ValueError, match=r"\(1 cut before its first .* is 100; raise data.max_length$"):
        tokenize(ROWS[4:], tokenizer, config(long_rows="truncate"))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_nothing_to_train_on_names_the_files(tokenizer, tmp_path, count):
    paths = [tmp_path / f"{index}.jsonl" for index in range(count)]
    for path in paths:
        path.write_text(json.dumps(ROWS[1]) + "\n")
    named = ", ".join(map(str, paths[:3])) + (" and 2 more files" if count == 5 else "")
    with pytest.raises(ValueError, match=f"of {re.escape(named)} has anything .* max_length is 100$"):
        tokenize(paths, tokenizer, config())


def test_progress_counts_rows(tokenizer, tmp_path):
    rows, calls = [{"text": "x"}] * 600, []
    for cache_dir in (None, tmp_path, tmp_path):  # the last one is reused
        tokenize(rows, tokenizer, config(), cache_dir=cache_dir, progress=lambda *counts: calls.append(counts))
    assert calls == [(256, 600), (512, 600), (600, 600)] * 2


@pytest.mark.parametrize("mask", [0o022, 0o007])
def test_a_spool_follows_the_umask(tokenizer, tmp_path, mask):
    former = os.umask(mask)
    try:
        tokenize(ROWS, tokenizer, config(), cache_dir=tmp_path)
    finally:
        os.umask(former)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o777 & ~mask
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o666 & ~mask}


def test_the_report_says_what_is_trained_without_the_template(tokenizer, tmp_path):
    rows = [{"prompt": "q", "completion": "a"}, {"prompt": [ASK], "completion": [ANSWER]}, {"text": "x"}]
    note = "note: 1 rows have prompt and completion as plain texts, which are trained without the chat template; ask "
    for cache_dir in (None, tmp_path / "cache", tmp_path / "cache"):
        lines = tokenize(rows, tokenizer, config(), cache_dir=cache_dir).report.lines()
        assert [line for line in lines if line.startswith(note) and "gapless generate --raw" in line] == lines[1:]
    assert len(tokenize(rows[1:], tokenizer, config()).report.lines()) == 1
    write_tiny_tokenizer(tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    assert len(tokenize(rows[:1], Tokenizer.from_folder(tmp_path / "base"), config()).report.lines()) == 1


def test_empty_answers_are_counted(tokenizer):
    empty = {"role": "assistant", "content": " \n"}
    rows = [
        {"messages": [ASK, empty, ASK, ANSWER, ASK, {**empty, "content": ""}]},
        {"prompt": "q", "completion": ""},
        {"instruction": "q", "output": ""},
    ]
    report = tokenize(rows, tokenizer, config(max_length=1000)).report
    assert report.empty_answers == 4
    assert "4 answers are empty: the model learns to stop at once" in report.lines()
    said = [
        {"messages": [ASK, {**empty, "reasoning_content": "Hm."}, ASK_AGAIN, CALL, RESULT, ANSWER]},
        {"messages": [ASK, {**empty, "weight": 0}, {**ASK, "content": ""}, ANSWER]},
        {"prompt": "", "completion": "a"},
    ]
    assert tokenize(said, tokenizer, config(max_length=1000)).report.empty_answers == 0


def test_errors_name_the_row(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n\n{"texts": "x"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:3: the columns 'texts' are no known format"):
        tokenize([path], tokenizer, config())


@pytest.mark.parametrize(
    "row", [{"text": "a\ud83d b"}, {"messages": [ASK, {**ANSWER, "content": "a\ud83d b"}]}], ids=str
)
def test_half_a_surrogate_pair(tokenizer, row, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(
        ValueError, match=r"a\.jsonl:1: the text holds '\\ud83d', half of a surrogate pair, .* remove the"
    ):
        tokenize([path], tokenizer, config())


def test_spool_equals_memory_and_is_reused(tokenizer, tmp_path, monkeypatch):
    memory = tokenize(ROWS, tokenizer, config(max_length=1000))
    disk = tokenize(ROWS, tokenizer, config(max_length=1000), cache_dir=tmp_path)
    assert contents(disk) == contents(memory)
    assert (disk.fingerprint, disk.report) == (memory.fingerprint, memory.report)
    monkeypatch.setattr(store_module, "_fill", None)
    again = tokenize(ROWS, tokenizer, config(max_length=1000), cache_dir=tmp_path)
    assert contents(again) == contents(memory)
    assert (again.fingerprint, again.report, again.where(2)) == (memory.fingerprint, memory.report, memory.where(2))
    assert (again.lengths.tolist(), again.trained.tolist()) == (memory.lengths.tolist(), memory.trained.tolist())


def test_whatever_changes_the_content_makes_another_spool(tokenizer, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "x"}\n')
    other = tmp_path / "other"
    write_tiny_tokenizer(other, "llama3")
    cache = tmp_path / "cache"
    tokenize([file], tokenizer, config(), cache_dir=cache)
    tokenize([file], tokenizer, config(max_length=99), cache_dir=cache)
    tokenize([file], Tokenizer.from_folder(other), config(), cache_dir=cache)
    (tmp_path / "t.jinja").write_text("")
    tokenize([file], Tokenizer.from_folder(other, tmp_path / "t.jinja"), config(), cache_dir=cache)
    assert len(list(cache.iterdir())) == 4
    tokenize([file], tokenizer, config(packing=False), cache_dir=cache)
    assert len(list(cache.iterdir())) == 4
    file.write_text('{"text": "yy"}\n')
    assert tokenize([file], tokenizer, config(), cache_dir=cache).lengths.tolist() == [3]
    assert len(list(cache.iterdir())) == 5


def flip(path, place=-3):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "cut": lambda folder: os.truncate(folder / "tokens.bin", (folder / "tokens.bin").stat().st_size - 4),
    "cut within a token": lambda folder: os.truncate(folder / "tokens.bin", 7),
    "emptied": lambda folder: os.truncate(folder / "tokens.bin", 0),
    "flipped token": lambda folder: flip(folder / "tokens.bin"),
    "flipped index": lambda folder: flip(folder / "index.npy", -8),
    "no meta": lambda folder: (folder / "meta.json").unlink(),
    "meta cut": lambda folder: os.truncate(folder / "meta.json", 20),
    "meta of a newer version": lambda folder: flip(folder / "meta.json", 22),
    "index missing": lambda folder: (folder / "index.npy").unlink(),
    "index cut": lambda folder: os.truncate(folder / "index.npy", 130),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_damaged_spool_is_made_anew(tokenizer, tmp_path, damage):
    want = contents(tokenize(ROWS, tokenizer, config(max_length=1000), cache_dir=tmp_path))
    (folder,) = tmp_path.iterdir()
    DAMAGE[damage](folder)
    assert store_module._open_spool(folder, ROWS) is None
    assert contents(tokenize(ROWS, tokenizer, config(max_length=1000), cache_dir=tmp_path)) == want
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_a_writer_that_fails_leaves_nothing(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="row 1"):
        tokenize([ROWS[0], {}], tokenizer, config(), cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_is_not(tokenizer, tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = store_module.socket.gethostname()
    killed, living, elsewhere = (f"writing-{name}-x" for name in (f"{host}-{dead.pid}", f"{host}-{os.getpid()}", "a-1"))
    for name in (killed, living, elsewhere):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokens.bin").write_bytes(b"half")
    tokenize(ROWS, tokenizer, config(), cache_dir=tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names & {killed, living, elsewhere} == {living, elsewhere}


def test_two_writers_at_once(tokenizer, tmp_path, monkeypatch):
    fill = store_module._fill

    def slower(*args):
        monkeypatch.setattr(store_module, "_fill", fill)
        tokenize(ROWS, tokenizer, config(), cache_dir=tmp_path)
        return fill(*args)

    monkeypatch.setattr(store_module, "_fill", slower)
    store = tokenize(ROWS, tokenizer, config(), cache_dir=tmp_path)
    assert contents(store) == contents(tokenize(ROWS, tokenizer, config()))
    assert len(list(tmp_path.iterdir())) == 1
