"""Rows that people really train on, where they lie beside the checkout; skipped elsewhere."""

from pathlib import Path

import numpy as np
import pytest

from gapless.config import DataConfig
from gapless.data.store import tokenize
from gapless.data.tokenizer import Tokenizer
from tiny_tokenizer import write_tiny_tokenizer

FOLDER = Path(__file__).parents[3] / "shared" / "data"
FILES = {
    "glaive_toolcall_en_demo.json": 300,
    "v1_sft_demo.jsonl": 500,
    "reason_tool_use_demo_50.jsonl": 50,
    "identity.json": 91,
}


@pytest.mark.parametrize("template", ["qwen25", "qwen3"])
@pytest.mark.parametrize("name", list(FILES))
def test_real_rows(tmp_path, name, template):
    if not (FOLDER / name).is_file():
        pytest.skip(f"{name} is not there")
    write_tiny_tokenizer(tmp_path, template)
    tokenizer = Tokenizer.from_folder(tmp_path)
    store = tokenize([FOLDER / name], tokenizer, DataConfig(train=(), max_length=20_000))
    assert store.report.rows == store.report.kept == FILES[name]
    assert store.report.unended_turns == 0
    begin, end = tokenizer.encode("<|im_start|>assistant\n"), tokenizer.encode("<|im_end|>")[0]
    for index in range(len(store)):
        document = store.document(index)
        tokens = document.tokens.tolist()
        turns = [at for at in range(len(tokens)) if tokens[at : at + 2] == begin[:2]]
        edges = np.flatnonzero(np.diff(np.concatenate([[0], document.trained, [0]])))
        assert len(turns) == len(edges) // 2
        for turn, start, stop in zip(turns, edges[::2], edges[1::2], strict=True):
            assert turn + 2 <= start <= turn + len(begin)
            assert tokens[stop - 1] == end
            assert end not in tokens[start : stop - 1]
