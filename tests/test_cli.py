"""The command line end to end on a tiny model, and its exit codes."""

import datetime
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gapless import cli
from tiny import write_tiny_model
from tiny_tokenizer import VOCAB_SIZE, write_tiny_tokenizer


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run folder of two steps, made by the command line."""
    folder = tmp_path_factory.mktemp("cli")
    write_tiny_model(folder / "model", vocab_size=VOCAB_SIZE)
    write_tiny_tokenizer(folder / "model")
    turns = [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "Paris"}]
    (folder / "train.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(6)))
    keys = ["output_dir = 'run'", "max_length = 128", "max_steps = 3", "r = 4", "dtype = 'fp32'", "device = 'cpu'"]
    (folder / "run.toml").write_text("\n".join(["model = 'model'", "train = 'train.jsonl'", *keys]))
    assert cli.main(["train", str(folder / "run.toml"), "--training.max_steps", "2"]) == 0
    return folder / "run"


def test_train_leaves_a_run_folder(run):
    assert {"config.toml", "metrics.jsonl", "adapter", "checkpoints"} <= {path.name for path in run.iterdir()}
    assert "max_steps = 2" in (run / "config.toml").read_text()


def test_the_resolved_file_runs_again(run):
    before = (run / "metrics.jsonl").read_bytes()
    assert cli.main(["train", str(run / "config.toml")]) == 0
    assert (run / "metrics.jsonl").read_bytes() == before


def test_generate_answers_prompts(run, capsys):
    arguments = ["generate", str(run), "--max-new-tokens", "5", "--dtype", "fp32"]
    assert cli.main([*arguments, "--prompt", "What is the capital?", "--prompt", "Hello", "--system", "Be brief."]) == 0
    both = capsys.readouterr().out
    assert cli.main([*arguments, "--prompt", "Hello", "--system", "Be brief."]) == 0
    assert both.endswith("\n\n" + capsys.readouterr().out)


def test_generate_from_a_file(run, tmp_path, capsys):
    rows = [
        {"id": 7, "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "left out"}]},
        {"prompt": "Hello"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    files = ["--file", str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "answers.jsonl")]
    assert cli.main(["generate", str(run), *files, "--max_new_tokens", "5", "--dtype", "fp32"]) == 0
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [{key: row[key] for key in source} for row, source in zip(answers, rows, strict=True)] == rows
    assert answers[0]["completion"] == answers[1]["completion"]
    assert answers[0]["finish_reason"] in ("stop", "length")
    assert answers[0]["reference"] == "left out"
    assert "reference" not in answers[1]
    assert capsys.readouterr() == ("", "answered 2 of 2 rows\n")


def test_answers_are_written_as_they_are_finished(run, tmp_path, monkeypatch):
    """In the order of the rows; what is finished when the process is stopped is in the file."""
    import gapless.inference.generate as module

    questions = ["Hello", "Hi there, who is it?", "The quick brown fox", "a", "What?"]
    (tmp_path / "rows.txt").write_text("\n".join(questions))
    arguments = ["generate", str(run), "--file", str(tmp_path / "rows.txt"), "--batch_size", "2", "--dtype", "fp32"]
    arguments += ["--max_new_tokens", "4", "--output"]
    assert cli.main([*arguments, str(tmp_path / "all.jsonl")]) == 0
    lines = (tmp_path / "all.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == questions
    calls = []

    def stopped(*args, on_completion, **settings):
        def take(index, completion):
            if len(calls) == 3:
                raise KeyboardInterrupt
            on_completion(index, completion)
            calls.append((tmp_path / "some.jsonl").read_text().count("\n"))

        return generate(*args, on_completion=take, **settings)

    generate = module.generate
    monkeypatch.setattr(module, "generate", stopped)
    assert cli.main([*arguments, str(tmp_path / "some.jsonl")]) == 130
    assert calls[-1] >= 2
    assert (tmp_path / "some.jsonl").read_text().splitlines() == lines[: calls[-1]]
    assert cli.main([*arguments, str(tmp_path / "some.jsonl")]) == 2


def test_progress_keeps_out_of_answers_on_a_terminal(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "rows.csv").write_text("question\nHello\n")
    arguments = ["generate", str(run), "--file", str(tmp_path / "rows.csv"), "--max_new_tokens", "1"]
    arguments += ["--columns", "prompt", "question"]
    for terminal in (False, True):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        assert cli.main(arguments) == 0
        output = capsys.readouterr()
        assert output.err == ("" if terminal else "answered 1 of 1 rows\n")
        assert json.loads(output.out)["question"] == "Hello"


def test_options_of_files_are_refused_without_one(run, capsys):
    for option in (["--columns", "prompt", "question"], ["--format", "text"]):
        assert cli.main(["generate", str(run), "--prompt", "Hello", *option]) == 2
        assert "--format and --columns are for the rows of --file" in capsys.readouterr().err


def test_raw_prompts_pass_by_the_template(run, capsys):
    arguments = ["generate", str(run), "--prompt", "The quick brown", "--max-new-tokens", "5", "--dtype", "fp32"]
    outputs = []
    for extra in ([], ["--raw"]):
        assert cli.main([*arguments, *extra]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] != outputs[1]


def test_export(run, tmp_path):
    assert cli.main(["export", str(run), "--to", "merged", "--out", str(tmp_path / "merged")]) == 0
    assert cli.main(["export", str(run), "--to", "adapter", "--out", str(tmp_path / "adapter")]) == 0
    assert (tmp_path / "merged" / "config.json").exists()
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
    model = str(tmp_path / "merged")
    assert cli.main(["generate", model, "--prompt", "Hello", "--max-new-tokens", "2"]) == 0


def test_a_single_answer_is_printed_as_it_is_written(run, monkeypatch, capsys):
    import gapless.inference.generate as module

    arguments = ["generate", str(run), "--max-new-tokens", "12", "--dtype", "fp32", "--prompt", "Hello"]
    steps = []

    def watched(*args, on_token=None, **settings):
        def on_token_watched(index, token):
            on_token(index, token)
            steps.append(capsys.readouterr().out)

        return generate(*args, on_token=on_token and on_token_watched, **settings)

    generate = module.generate
    monkeypatch.setattr(module, "generate", watched)
    assert cli.main(arguments) == 0
    alone = "".join(steps) + capsys.readouterr().out
    assert sum(map(bool, steps)) > 2
    steps.clear()
    assert cli.main([*arguments, "--prompt", "Hello"]) == 0
    assert capsys.readouterr().out == f"{alone}\n{alone}"
    assert not steps


def test_rows_of_other_kinds_are_answered(run, tmp_path, capsys):
    turns = [{"role": "user", "content": "Hello"}]
    columns = {
        "day": [datetime.date(2024, 1, 2)],
        "prompt": [turns],
        "messages": ["no conversation"],
        "completion": ["right"],
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    arguments = ["generate", str(run), "--file", str(tmp_path / "rows.parquet"), "--max_new_tokens", "1"]
    assert cli.main(arguments) == 2
    assert "fit the formats messages and prompt_completion; set --format" in capsys.readouterr().err
    assert cli.main([*arguments, "--format", "prompt_completion"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["day"], row["prompt"], row["messages"]) == ("2024-01-02", turns, "no conversation")
    assert row["reference"] == "right"
    assert row["completion"] != "right"


def test_an_answer_beyond_the_models_positions_is_noted_and_scaled_for(run, monkeypatch, capsys):
    import gapless.inference.load as load

    lengths = []
    monkeypatch.setattr(load, "load_source", lambda *args, max_length, **settings: lengths.append(max_length) or 1 / 0)
    for count, noted in ((10, False), (600, True)):
        with pytest.raises(ZeroDivisionError):
            cli.main(["generate", str(run), "--prompt", "Hello", "--max-new-tokens", str(count)])
        assert ("more than the 512 the model is made for" in capsys.readouterr().err) == noted
    assert lengths[1] - lengths[0] == 590


@pytest.mark.parametrize(("signal", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_stopped_run_exits_like_a_process_that_the_signal_ended(run, monkeypatch, signal, code):
    import gapless.training.trainer as trainer

    stopped = trainer.TrainResult(
        step=1, finished=False, train_loss=None, eval_loss=None, output_dir=run, result_dir=None, stopped_by=signal
    )
    monkeypatch.setattr(trainer, "train", lambda config: stopped)
    assert cli.main(["train", str(run / "config.toml")]) == code


def test_exit_codes(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert cli.main([]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EACCES])
def test_what_the_disk_refuses_is_one_line(monkeypatch, capsys, number):
    def refused(args):
        raise OSError(number, os.strerror(number), "some/file")

    monkeypatch.setattr(cli, "_run", refused)
    assert cli.main([]) == 2
    assert capsys.readouterr().err == f"error: some/file: {os.strerror(number)}\n"


@pytest.mark.parametrize("error", [OSError(errno.EBADF, "bad descriptor"), OSError("of a library"), KeyError("a")])
def test_other_errors_keep_their_traceback(monkeypatch, error):
    def library(args):
        raise error

    monkeypatch.setattr(cli, "_run", library)
    with pytest.raises(type(error)):
        cli.main([])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_a_full_disk_under_stdout_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gapless", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        )
    assert (done.returncode, done.stderr) == (2, b"error: No space left on device\n")


def test_a_library_error_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(cli, "_run", lambda args: json.loads("{"))
    with pytest.raises(json.JSONDecodeError):
        cli.main([])


def test_version_and_no_arguments(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("gapless 0.")
    assert cli.main([]) == 2
    assert capsys.readouterr().err.startswith("usage: gapless VERB")
