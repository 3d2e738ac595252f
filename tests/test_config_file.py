"""Run files: what is accepted, what is refused, and that a configuration survives being written."""

import dataclasses
import io
import os
import sys
import tomllib
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.config import (
    AdapterConfig,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    TrainingConfig,
)
from gapless.config_file import (
    ALIASES,
    DEFAULTS,
    HINTS,
    HOMES,
    PATHS,
    RANGES,
    SECTIONS,
    check_config,
    dump_config,
    load_config,
)

MINIMAL = '[model]\npath = "m"\n[data]\ntrain = ["a.jsonl"]\n[training]\noutput_dir = "out"\n'


def write(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def minimal(folder: Path) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path=str(folder / "m")),
        data=DataConfig(train=(str(folder / "a.jsonl"),)),
        training=TrainingConfig(output_dir=str(folder / "out")),
    )


def test_paths_start_at_the_files_folder(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_config(write(tmp_path / "sub", MINIMAL).relative_to(tmp_path)) == minimal(tmp_path / "sub")


def test_every_key_has_one_home_and_every_number_a_range():
    assert len(HOMES) == len(HINTS)
    assert not set(HOMES) & set(ALIASES)
    assert set(ALIASES.values()) <= set(HINTS)
    numbers = {home for home, hint in HINTS.items() if {int, float} & {hint, *typing.get_args(hint)}}
    assert set(RANGES) == numbers
    for home, allowed in RANGES.items():
        assert DEFAULTS[home] is None or DEFAULTS[home] in allowed
    assert {
        home for home in HINTS if home.endswith(("path", "dir", "chat_template", "data.train", "data.eval"))
    } == set(PATHS)


@pytest.mark.parametrize(
    "text",
    [
        'path = "m"\ntrain = "a.jsonl"\noutput_dir = "out"',
        'model = "m"\ndata = ["a.jsonl"]\noutput_dir = "out"\nadapter = "lora"',
        'base_model = "m"\ntrain_file = "a.jsonl"\noutput_dir = "out"',
        'train = "a.jsonl"\noutput_dir = "out"\n[model]\nmodel_name_or_path = "m"',
    ],
)
def test_flat_and_foreign_spellings(tmp_path, text):
    assert load_config(write(tmp_path, text)) == minimal(tmp_path)


def test_aliases_and_their_note(tmp_path, capsys):
    text = MINIMAL.replace(
        "[model]", "lora_r = 8\nlr = 1e-4\nbf16 = false\nmax_seq_length = 64\nsample_packing = false\n[model]"
    )
    config = load_config(write(tmp_path, text))
    assert config.adapter.r == 8
    assert config.optim.learning_rate == 1e-4
    assert config.model.dtype == "fp32"
    assert config.data.max_length == 64
    assert config.data.packing is False
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == 5
    assert any("lora_r is read as adapter.r" in note for note in notes)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('optim = "adamw_8bit"', "adamw_8bit"),
        ('optim = "adamw_bnb_8bit"', "adamw_8bit"),
        ('optimizer = "adamw_torch_fused"', "adamw"),
        ('optimizer = "adamw_8bit"', "adamw_8bit"),
    ],
)
def test_optimizers_have_the_names_of_other_tools(tmp_path, capsys, line, expected):
    assert load_config(write(tmp_path, MINIMAL.replace("[model]", f"{line}\n[model]"))).optim.optim == expected
    assert "is read as" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("gradient_checkpointing = true", "full"),
        ("gradient_checkpointing = false", "none"),
        ('activation_checkpointing = "full"', "full"),
        ('checkpointing = "full"', "full"),
    ],
)
def test_checkpointing_by_the_names_of_other_tools(tmp_path, line, expected):
    config = load_config(write(tmp_path, MINIMAL.replace("[model]", f"{line}\n[model]")))
    assert config.memory.checkpointing == expected


def test_yaml_scalars_are_what_they_look_like(tmp_path):
    text = """
    model: {path: no}
    data: {train: a.jsonl, packing: off, columns: {prompt: yes, completion: on}}
    optim: {learning_rate: 1e-4, warmup_ratio: .5, weight_decay: 1}
    training: {output_dir: 2024-01-01, save_total_limit: null, max_steps: 10, cuda_graphs: on}
    logging: {report_to: none}
    """
    config = load_config(write(tmp_path, text, "run.yaml"))
    assert config.model.path == str(tmp_path / "no")
    assert config.data.packing is False
    assert config.data.columns == {"prompt": "yes", "completion": "on"}
    assert (config.optim.learning_rate, config.optim.warmup_ratio, config.optim.weight_decay) == (1e-4, 0.5, 1.0)
    assert config.training.output_dir == str(tmp_path / "2024-01-01")
    assert config.training.save_total_limit is None
    assert config.training.cuda_graphs is True
    assert config.logging.report_to == ()


def test_all_problems_at_once(tmp_path):
    text = """
    lerning_rate = 1
    [model]
    dtype = "fp16"
    path = "m"
    [data]
    max_length = "512"
    train = ["a"]
    [optim]
    r = 4
    warmup_ratio = 2
    [loging]
    seed = 1
    """
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=r"run\.toml") as error:
        load_config(path)
    lines = [line.removeprefix(f"{path}: ") for line in str(error.value).splitlines()]
    assert lines == [
        "lerning_rate: unknown key; perhaps you meant optim.learning_rate",
        'model.dtype: must be one of "bf16", "fp32", not the string "fp16"',
        'data.max_length: must be an integer, not the string "512"',
        "optim.r: unknown key; perhaps you meant adapter.r",
        "loging: unknown section; perhaps you meant logging; there are model, data, training, adapter, optim, "
        "parallel, memory, logging",
        "training.output_dir: is missing; name the run folder",
        "optim.warmup_ratio: must be at least 0 and at most 1, not 2.0",
    ]


REFUSED = [
    ("[optim]\nlearning_rate = 0", "optim.learning_rate: must be greater than 0, not 0.0"),
    ("[optim]\nlearning_rate = nan", "optim.learning_rate: must be a finite number greater than 0, not nan"),
    ("[optim]\nlearning_rate = inf", "optim.learning_rate: must be a finite number greater than 0, not inf"),
    ('[optim]\nlearning_rate = "1e-4"', 'optim.learning_rate: must be a finite number, not the string "1e-4"'),
    ("[optim]\nlearning_rate = true", "optim.learning_rate: must be a finite number, not true"),
    ("[optim]\nadam_beta2 = 1.0", "optim.adam_beta2: must be at least 0 and below 1, not 1.0"),
    ("[adapter]\nr = 0", "adapter.r: must be at least 1, not 0"),
    ("[adapter]\nr = 8.0", "adapter.r: must be an integer, not 8.0"),
    ("[adapter]\nlora_dropout = 1", "adapter.lora_dropout: must be at least 0 and below 1, not 1.0"),
    ("[adapter]\ntarget_modules = 3", "adapter.target_modules: must be a list of strings, not 3"),
    ("[adapter]\ntarget_modules = [3]", "adapter.target_modules: must be a string, not 3"),
    ('[adapter]\ntype = "none"\nr = 16', 'adapter.r: has no effect because adapter.type = "none" trains all weights'),
    ("[parallel]\ntp_size = 0", "parallel.tp_size: must be at least 1, not 0"),
    ("[parallel]\ndp_shard_size = 2\nzero_stage = 4", "parallel.zero_stage: must be at least 1 and at most 3, not 4"),
    ("[parallel]\nzero_stage = 2", "parallel.zero_stage: has no effect because parallel.dp_shard_size is 1"),
    ('[parallel]\npp_schedule = "gpipe"', "parallel.pp_schedule: has no effect because parallel.pp_size is 1"),
    (
        "[parallel]\nsequence_parallel = false",
        "parallel.sequence_parallel: has no effect because parallel.tp_size is 1",
    ),
    (
        '[parallel]\ntp_size = 2\n[logging]\nsample_prompts = ["Hi"]',
        "logging.sample_prompts: cannot be answered while layers are cut",
    ),
    ("[optim]\npure_bf16 = true", "optim.pure_bf16: needs full fine-tuning"),
    ('dtype = "fp32"\n[adapter]\ntype = "none"\n[optim]\npure_bf16 = true', "optim.pure_bf16: contradicts model.dtype"),
    ("[optim]\nwarmup_steps = 3\nwarmup_ratio = 0.1", "optim.warmup_ratio: contradicts optim.warmup_steps"),
    ('[optim]\noptim = "paged_adamw_8bit"', "optim.optim: must be"),
    ("[optim]\ndecay_ratio = 0.1", 'optim.decay_ratio: has no effect because optim.lr_scheduler_type is "cosine"'),
    ("max_length = 1", "data.max_length: must be at least 2, not 1"),
    ("packing = false\nmax_documents = 3", "data.max_documents: has no effect because data.packing is false"),
    ("eval_steps = 3", "training.eval_steps: has no effect because there are neither"),
    ("seed = 2147483648", "training.seed: must be at least 0 and at most 2147483647, not 2147483648"),
    ("lora_r = 8\n[adapter]\nr = 8", "adapter.r: sets adapter.r, which lora_r has set already; keep one of them"),
    ('logging = "x"', 'logging: is a section, a table of keys, not the string "x"'),
    ('cuda_graphs = "always"', 'training.cuda_graphs: must be one of "auto", true, false, not the string "always"'),
    ('report_to = ["mlflow"]', 'logging.report_to: must be one of "tensorboard", "wandb"'),
    ('chat_template = ""', "data.chat_template: is an empty path"),
    ("columns = {prompt = 3}", "data.columns: must be a table of strings, not a table"),
]


@pytest.mark.parametrize(("text", "fragment"), REFUSED)
def test_refused(tmp_path, text, fragment):
    path = write(tmp_path, f'path = "m"\ntrain = "a"\noutput_dir = "out"\n{text}')
    with pytest.raises(ValueError, match="run") as error:
        load_config(path)
    spelled = fragment.split(":")[0].rpartition(".")[2]
    assert fragment in str(error.value) or fragment.replace(fragment.split(":")[0], spelled, 1) in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "content", "fragment"),
    [
        ("run.toml", b"", "model.path: is missing; name the folder of the model to start from"),
        ("run.toml", b"a = ", "is not TOML: Invalid value (at end of document)"),
        ("run.toml", b"a = 1\na = 2", "is not TOML: Cannot overwrite a value"),
        ("run.toml", b"\xff\xfe", "is not UTF-8 text (byte 0)"),
        ("run.yaml", b"a: [", "is not YAML"),
        ("run.yaml", b"model: {path: a, path: b}", "is not YAML: path is given twice (line 1)"),
        ("run.yaml", b"? [a, b]\n: 1", "is not YAML: a key must be a word (line 1)"),
        ("run.yaml", b"- a", "a run file is a table of keys, not a list"),
        ("run.yaml", b"a: !!python/object:os.system x", "is not YAML: could not determine a constructor"),
        ("run.json", b"{}", "a run file ends in .toml, .yaml or .yml"),
    ],
)
def test_broken_files(tmp_path, name, content, fragment):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="run") as error:
        load_config(tmp_path / name)
    assert fragment in str(error.value)


def test_overrides_win_and_start_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "sub", MINIMAL)
    tokens = ["--optim.learning-rate=1e-3", "--data.train", "x.jsonl", "y.jsonl", "--data.no_packing"]
    tokens += ["--training.max_steps", "3"]
    config = load_config(path, tokens)
    expected = minimal(tmp_path / "sub")
    expected = dataclasses.replace(
        expected,
        optim=OptimConfig(learning_rate=1e-3),
        data=DataConfig(train=(str(tmp_path / "x.jsonl"), str(tmp_path / "y.jsonl")), packing=False),
        training=dataclasses.replace(expected.training, max_steps=3),
    )
    assert config == expected


@pytest.mark.parametrize(
    ("tokens", "home", "value"),
    [
        (["--data.packing", "false"], "data.packing", False),
        (["--data.packing=False"], "data.packing", False),
        (["--data.packing", "no", "--training.seed", "1"], "data.packing", False),
        (["--data.no_packing", "--data.packing", "true"], "data.packing", True),
        (["--data.packing", "--training.seed", "1"], "data.packing", True),
        (["--adapter.use-rslora", "on"], "adapter.use_rslora", True),
        (["--training.save_total_limit", "none"], "training.save_total_limit", None),
        (["--training.save-total-limit=none"], "training.save_total_limit", None),
        (["--logging.report_to", "none"], "logging.report_to", ()),
        (["--logging.sample_prompts", "none"], "logging.sample_prompts", ("none",)),
        (["--data.cache_dir", "none"], "data.cache_dir", os.path.abspath("none")),
        (["--training.cuda_graphs", "false"], "training.cuda_graphs", False),
        (["--training.cuda-graphs=true"], "training.cuda_graphs", True),
        (["--training.cuda_graphs", "auto"], "training.cuda_graphs", "auto"),
    ],
)
def test_overrides_spelt_as_in_a_file(tmp_path, tokens, home, value):
    config = load_config(write(tmp_path, MINIMAL), tokens)
    section, _, key = home.partition(".")
    assert getattr(getattr(config, section), key) == value


def test_max_steps_beside_epochs_is_noted(tmp_path, capsys):
    both = write(tmp_path, f"{MINIMAL}max_steps = 7\nnum_train_epochs = 3")
    config = load_config(both)
    assert (config.training.max_steps, config.training.num_train_epochs) == (7, 3.0)
    assert capsys.readouterr().err.endswith("training.max_steps = 7 wins over training.num_train_epochs = 3\n")
    # The resolved file says the same and needs no note.
    resolved = load_config(write(tmp_path, dump_config(config)))
    assert resolved.training.max_steps == 7
    load_config(write(tmp_path, f"{MINIMAL}max_steps = 7"))
    assert load_config(write(tmp_path, f"{MINIMAL}num_train_epochs = 3")).training.num_train_epochs == 3.0
    assert capsys.readouterr().err == ""


def test_an_override_can_give_what_the_file_lacks(tmp_path):
    path = write(tmp_path, MINIMAL.replace('path = "m"', ""))
    assert load_config(path, ["--model.path", str(tmp_path / "m")]) == minimal(tmp_path)


@pytest.mark.parametrize("tokens", [["--optim.optim", "adamw_bnb_8bit"], ["--optim.optim=adamw_bnb_8bit"]])
def test_an_override_with_another_tools_value(tmp_path, capsys, tokens):
    assert load_config(write(tmp_path, MINIMAL), tokens).optim.optim == "adamw_8bit"
    assert capsys.readouterr().err == 'note: --optim.optim "adamw_bnb_8bit" is read as "adamw_8bit"\n'


@pytest.mark.parametrize(
    ("tokens", "fragment"),
    [
        (["--optim.learnin_rate", "1"], "Perhaps you meant: --optim.learning_rate FLOAT"),
        (["--lr", "1"], "there is no option --lr; perhaps you meant --optim.learning_rate"),
        (["--lora-r=8"], "there is no option --lora-r; perhaps you meant --adapter.r"),
        (["--data.packing", "maybe"], "Unrecognized options: maybe"),
        (["--data.packing", "false", "--data.packing-window", "4096"], "data.packing_window: has no effect"),
        (["--learning_rate", "1"], "Perhaps you meant: --optim.learning_rate FLOAT"),
        (["--optim.learning_rate", "fast"], "--optim.learning_rate: could not convert string to float: 'fast'"),
        (["--optim.learning_rate", "-1"], "optim.learning_rate: must be greater than 0, not -1.0"),
        (["--model.dtype", "fp16"], "Expected one of ('bf16', 'fp32')"),
        (["--training.seed"], "Missing value for argument '--training.seed'"),
        (["--adapter.type", "none", "--adapter.r", "16"], 'adapter.r: has no effect because adapter.type = "none"'),
        (["--data.no-packing", "--data.packing-window", "4096"], "data.packing_window: has no effect"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_refused_overrides(tmp_path, monkeypatch, tokens, fragment, encoding):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    with pytest.raises(ValueError, match=r"\w") as error:
        load_config(write(tmp_path, MINIMAL), tokens)
    assert fragment in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert not [mark for mark in ("│", "─", "----", "Required options") if mark in str(error.value)]


def test_check_config_refuses_what_a_file_could_not_hold(tmp_path):
    check_config(minimal(tmp_path))
    config = dataclasses.replace(
        minimal(tmp_path), adapter=AdapterConfig(type="none", r=8), optim=OptimConfig(warmup_steps=-1)
    )
    with pytest.raises(ValueError, match=r"warmup_steps: must be at least 0, not -1\nadapter.r: has no effect"):
        check_config(config)


def test_a_config_written_in_python_may_hold_lists_and_paths(tmp_path):
    config = RunConfig(
        model=ModelConfig(path=tmp_path / "m"),
        data=DataConfig(train=[tmp_path / "a.jsonl"]),
        adapter=AdapterConfig(target_modules=["q_proj"], lora_alpha=16),
        training=TrainingConfig(output_dir=tmp_path / "out"),
        logging=LoggingConfig(report_to=[]),
    )
    plain = dataclasses.replace(
        minimal(tmp_path),
        adapter=AdapterConfig(target_modules=("q_proj",), lora_alpha=16.0),
        logging=LoggingConfig(report_to=()),
    )
    assert check_config(config) == plain
    assert check_config(plain) == plain
    assert check_config(dataclasses.replace(config, data=DataConfig(train=tmp_path / "a.jsonl"))) == plain


def test_wrong_types_in_python_are_refused_by_name(tmp_path):
    config = dataclasses.replace(
        minimal(tmp_path),
        model=ModelConfig(path="m", dtype="bfloat16"),
        optim=OptimConfig(learning_rate="1e-4", warmup_steps=1.5),
        logging={"report_to": ()},
    )
    with pytest.raises(ValueError, match="model") as error:
        check_config(config)
    assert str(error.value).splitlines() == [
        'model.dtype: must be one of "bf16", "fp32", not the string "bfloat16"',
        'optim.learning_rate: must be a finite number, not the string "1e-4"',
        "optim.warmup_steps: must be an integer, not 1.5",
        "logging: must be a LoggingConfig, not dict",
    ]


def test_rows_of_a_script_stand_in_for_files(tmp_path):
    config = dataclasses.replace(minimal(tmp_path), data=DataConfig(train=()))
    with pytest.raises(ValueError, match=r"^data.train: is missing; name at least one file of training rows$"):
        check_config(config)
    assert check_config(config, train_rows=True) == config
    evaluated = dataclasses.replace(config.training, per_device_eval_batch_size=2, eval_steps=3)
    with pytest.raises(ValueError, match="per_device_eval_batch_size: has no effect"):
        check_config(dataclasses.replace(config, training=evaluated), train_rows=True)
    evaluated = dataclasses.replace(config, training=evaluated)
    assert check_config(evaluated, train_rows=True, eval_rows=True) == evaluated
    # The resolved file of such a run tells what it was, and names no rows to train on.
    resolved = write(tmp_path, dump_config(evaluated))
    assert load_config(resolved) == config
    assert load_config(resolved, ["--data.train", str(tmp_path / "a.jsonl")]) == minimal(tmp_path)
    with pytest.raises(ValueError, match=r"data.train: contradicts train_rows"):
        check_config(minimal(tmp_path), train_rows=True)


def test_the_model_folder_is_no_run_folder(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "m")
    for name in ("m", "link", "a/../m"):
        with pytest.raises(ValueError, match="training.output_dir: is the model's folder"):
            load_config(write(tmp_path, MINIMAL.replace('"out"', f'"{name}"')))


def test_none_where_there_is_none_anyway(tmp_path):
    text = f'{MINIMAL}eval_steps = "none"\nper_device_eval_batch_size = "none"\n'
    assert load_config(write(tmp_path, text)) == minimal(tmp_path)


@pytest.mark.parametrize(("word", "dtype"), [("no", "fp32"), ("false", "fp32"), ("on", "bf16"), ("True", "bf16")])
def test_bf16_as_yaml_spells_truth(tmp_path, word, dtype):
    text = f"{{model: m, data: a.jsonl, output_dir: out, bf16: {word}}}"
    assert load_config(write(tmp_path, text, "run.yaml")).model.dtype == dtype


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
PATH = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=8).map(
    lambda name: os.path.abspath(f"/folder/x{name}")
)


def values(home: str, hint: object) -> st.SearchStrategy:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(arguments)
    if type(None) in arguments:
        return st.none() | values(home, arguments[0])
    if typing.get_origin(hint) is tuple:
        least = 1 if DEFAULTS[home] is dataclasses.MISSING else 0
        return st.lists(values(home, arguments[0]), min_size=least, max_size=3).map(tuple)
    if typing.get_origin(hint) is dict:
        return st.dictionaries(TEXT, TEXT, max_size=3)
    if hint is int:
        return st.integers(int(RANGES[home].low), int(min(RANGES[home].high, 2**40)))
    if hint is float:
        limits = RANGES[home]
        high = None if limits.high == float("inf") else limits.high
        inside = st.floats(
            limits.low, high, exclude_min=limits.open_low, exclude_max=limits.open_high, allow_infinity=False
        )
        return inside.filter(lambda value: value in limits)
    if hint is bool:
        return st.booleans()
    return PATH if home in PATHS else TEXT


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    """Any configuration that `check_config` accepts: choices that leave keys without effect come first."""
    drawn = {home: draw(values(home, hint)) for home, hint in HINTS.items()}

    def reset(condition: bool, *homes: str) -> None:
        drawn.update({home: DEFAULTS[home] for home in homes if condition})

    full = drawn["adapter.type"] == "none"
    reset(full, *(home for home in HINTS if home.startswith("adapter.") and home != "adapter.type"))
    reset(not full or drawn["model.dtype"] == "fp32", "optim.pure_bf16")
    reset(drawn["training.max_steps"] is not None, "training.num_train_epochs")
    reset(drawn["optim.warmup_steps"] > 0, "optim.warmup_ratio")
    reset(drawn["optim.lr_scheduler_type"] != "wsd", "optim.decay_ratio")
    reset(drawn["optim.lr_scheduler_type"] == "constant", "optim.min_lr_ratio")
    if drawn["training.output_dir"] == drawn["model.path"]:
        drawn["training.output_dir"] += "-run"
    reset(not drawn["data.packing"], "data.packing_window", "data.max_documents")
    cut = drawn["parallel.tp_size"] > 1 or drawn["parallel.pp_size"] > 1
    reset(cut, "logging.sample_prompts")
    reset(drawn["parallel.dp_shard_size"] == 1, "parallel.zero_stage", "parallel.shard_frozen")
    reset(full, "parallel.shard_frozen")
    reset(drawn["parallel.tp_size"] == 1, "parallel.sequence_parallel")
    reset(drawn["parallel.pp_size"] == 1, "parallel.pp_schedule")
    reset(not drawn["logging.sample_prompts"], "logging.sample_tokens")
    reset(not drawn["data.eval"], "training.per_device_eval_batch_size")
    reset(not drawn["data.eval"] and not drawn["logging.sample_prompts"], "training.eval_steps")
    return RunConfig(
        **{
            section: kind(**{entry.name: drawn[f"{section}.{entry.name}"] for entry in dataclasses.fields(kind)})
            for section, kind in SECTIONS.items()
        }
    )


@given(config=configs())
def test_round_trip(tmp_path_factory, config):
    check_config(config)
    text = dump_config(config)
    tomllib.loads(text)
    assert load_config(write(tmp_path_factory.mktemp("round"), text)) == config


def test_dump_writes_paths_that_mean_the_same_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative = RunConfig(
        model=ModelConfig(path="m"), data=DataConfig(train=("a.jsonl",)), training=TrainingConfig(output_dir="out")
    )
    (tmp_path / "out").mkdir()
    assert load_config(write(tmp_path / "out", dump_config(relative))) == minimal(tmp_path)


def test_awkward_characters_survive(tmp_path):
    prompts = (
        'say "hi"',
        "back\\slash",
        "two\nlines\r\n",
        "tab\t and \x00 \x1f \x7f \x85 \u2028 \U0001f600",
        "'''",
        '"""',
    )
    config = dataclasses.replace(minimal(tmp_path), logging=LoggingConfig(sample_prompts=prompts))
    assert load_config(write(tmp_path, dump_config(config))) == config


def test_an_option_that_undoes_a_size_takes_what_is_said_about_it_along(tmp_path):
    config = dataclasses.replace(minimal(tmp_path), parallel=ParallelConfig(dp_shard_size=2, zero_stage=2))
    path = write(tmp_path, dump_config(config))
    assert load_config(path).parallel.zero_stage == 2
    config = load_config(path, ("--parallel.dp_shard_size", "1"))
    assert (config.parallel.dp_shard_size, config.parallel.zero_stage) == (1, 3)
    with pytest.raises(ValueError, match="zero_stage: has no effect"):
        load_config(path, ("--parallel.dp_shard_size", "1", "--parallel.zero_stage", "2"))
