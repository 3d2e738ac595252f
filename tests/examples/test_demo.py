"""The demo's task and statistics, and its whole course on a tiny model."""

import itertools
import json
import random
import sys
from datetime import date
from pathlib import Path

import pytest

from tiny import write_tiny_model
from tiny_tokenizer import VOCAB_SIZE, write_tiny_tokenizer

DEMO = Path(__file__).parents[2] / "examples" / "demo"
sys.path.insert(0, str(DEMO))  # its files import each other as scripts do

import evaluate  # noqa: E402
import run  # noqa: E402
import task  # noqa: E402

TRAIN, HELDOUT = (task.read_phrasing(DEMO / f"templates_{split}.txt") for split in ("train", "heldout"))


def record(row):
    return json.loads(row["messages"][-1]["content"])


def test_rows_follow_from_the_seed():
    rows = task.make_rows(TRAIN, 50, seed=3)
    assert rows == task.make_rows(TRAIN, 50, seed=3)
    assert rows != task.make_rows(TRAIN, 50, seed=4)
    assert len({run.prompt(row) for row in rows}) == 50


def test_no_template_or_aside_is_in_both_splits():
    assert TRAIN.templates.keys() == HELDOUT.templates.keys() == {"order", "booking", "contact"}
    seen = [*itertools.chain(*TRAIN.templates.values()), *TRAIN.asides]
    new = [*itertools.chain(*HELDOUT.templates.values()), *HELDOUT.asides]
    assert len(set(seen)) == len(seen)
    assert not set(seen) & set(new)


@pytest.mark.parametrize("phrasing", [TRAIN, HELDOUT], ids=["train", "heldout"])
def test_record_says_what_the_note_says(phrasing):
    kinds = set()
    for row in task.make_rows(phrasing, 300, seed=5):
        note, said = run.prompt(row), record(row)
        assert tuple(said) == task.KEYS
        kinds.add(said["kind"])
        assert all(said[key] is None or said[key] in note for key in ("name", "company", "city"))
        assert said["date"] is None or said["date"][:4] in note
        whole = None if said["amount"] is None else f"{int(said['amount']):,}"
        assert whole is None or whole in note or whole.replace(",", "") in note
        assert "{" not in note
    assert kinds == {"order", "booking", "contact"}


def test_dates_are_spelled_right():
    spelled = {
        day: {task.spell_date(day, random.Random(i)) for i in range(99)}
        for day in (date(2025, 3, 2), date(2024, 12, 11))
    }
    assert spelled[date(2025, 3, 2)] == {
        "March 2, 2025",
        "2 March 2025",
        "Mar 2, 2025",
        "March 2nd, 2025",
        "the 2nd of March 2025",
        "3/2/2025",
        "2025-03-02",
    }
    assert {"December 11th, 2024", "12/11/2024"} < spelled[date(2024, 12, 11)]
    ordinals = {day: task.spell_date(date(2025, 1, day), Always(3)) for day in (1, 2, 3, 4, 11, 12, 13, 21, 22, 23, 31)}
    assert " ".join(text.split()[1] for text in ordinals.values()) == (
        "1st, 2nd, 3rd, 4th, 11th, 12th, 13th, 21st, 22nd, 23rd, 31st,"
    )


class Always:
    """Chooses the same place each time."""

    def __init__(self, place):
        self.place = place

    def choice(self, values):
        return values[self.place]


def test_amounts_are_spelled_right():
    assert [task.spell_amount(1250.5, Always(place)) for place in range(4)] == [
        "$1,250.50",
        "1,250.50 USD",
        "1,250.50 dollars",
        "USD 1250.50",
    ]
    assert task.spell_amount(980, Always(0)) == "$980"


def test_held_out_note_in_training_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "read_phrasing", lambda _: TRAIN)
    monkeypatch.setattr(run, "HELDOUT_SEED", run.TRAIN_SEED)
    with pytest.raises(AssertionError, match="held-out note"):
        run.write_data(tmp_path / "train.jsonl", tmp_path / "heldout.jsonl")


def test_score():
    rows = [
        task.conversation(
            "note", {"kind": "order", "name": None, "company": "A", "city": "B", "date": None, "amount": 5}
        )
    ] * 6
    right = rows[0]["messages"][-1]["content"]
    answers = [
        right,
        f"Sure:\n```json\n{right}\n```",
        right.replace("5", "5.0"),
        right.replace('"A"', '"C"'),
        '{"kind": "order"}',
        "no } json {",
    ]
    score = evaluate.score(answers, rows)
    assert score.exact == [True, True, True, False, False, False]
    assert score.valid == [True, True, True, True, True, False]
    expected = {"kind": 5, "name": 4, "company": 3, "city": 4, "date": 4, "amount": 4}
    assert score.fields == {key: count / 6 for key, count in expected.items()}


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (5, 0), (7, 2), (3, 3), (2, 9)])
def test_mcnemar_counts_coin_tosses(gained, lost):
    before = [False] * gained + [True] * lost + [True, False] * 4
    after = [True] * gained + [False] * lost + [True, False] * 4
    extreme = abs(gained - lost)
    tosses = list(itertools.product([-1, 1], repeat=gained + lost))
    brute_force = sum(abs(sum(toss)) >= extreme for toss in tosses) / len(tosses)
    assert evaluate.mcnemar(before, after) == pytest.approx(brute_force)


def make_score(right, count=128):
    return evaluate.Score(
        ["{}"] * count, [i < right for i in range(count)], [True] * count, dict.fromkeys(task.KEYS, 0.5)
    )


@pytest.mark.parametrize(
    ("before", "after", "losses", "passed"),
    [
        (0, 80, (1.0, 0.1), True),
        (10, 30, (1.0, 0.1), True),
        (10, 29, (1.0, 0.1), False),  # 14.8 points
        (0, 80, (1.0, 1.0), False),
        (80, 0, (1.0, 0.1), False),
    ],
)
def test_verdict(before, after, losses, passed, tmp_path, capsys):
    assert run.report(make_score(before), make_score(after), losses, tmp_path / "demo.json") == passed
    assert ("NOT" in capsys.readouterr().out) != passed
    assert json.loads((tmp_path / "demo.json").read_text())["loss"] == list(losses)


def test_few_rows_are_not_significant(tmp_path):
    assert not run.report(make_score(0, 8), make_score(4, 8), (1.0, 0.1), tmp_path / "demo.json")


def test_whole_course_on_a_tiny_model(tmp_path, monkeypatch, capsys):
    model = write_tiny_model(
        tmp_path / "model", vocab_size=VOCAB_SIZE, num_hidden_layers=1, max_position_embeddings=2048
    )
    write_tiny_tokenizer(model)
    monkeypatch.setattr(run, "packaged_gguf", lambda: Path("not-read.gguf"))
    monkeypatch.setattr(run, "TRAIN_ROWS", 6)
    monkeypatch.setattr(run, "HELDOUT_ROWS", 4)
    paths = {
        "model.path": model,
        "training.output_dir": tmp_path / "run",
        "data.train": tmp_path / "run" / "data" / "train.jsonl",
        "data.eval": tmp_path / "run" / "data" / "heldout.jsonl",
    }
    options = [text for key, path in paths.items() for text in (f"--{key}", str(path))]
    options += ["--data.max_length", "1024", "--training.max_steps", "2", "--adapter.r", "2"]
    assert run.main(options) == 1
    out = capsys.readouterr().out
    assert "NOT clearly better" in out
    assert "gapless generate" in out
    assert (tmp_path / "run" / "merged" / "model.safetensors").exists()
    assert len((tmp_path / "run" / "data" / "heldout.jsonl").read_text().splitlines()) == 4
    assert run.main(options) == 1  # again on top of a finished run
