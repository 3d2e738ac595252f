"""On an NVIDIA GPU: what a process beside the run has compiled is all that the run launches."""

import json
import os
import subprocess
import sys

import pytest
import torch

from gapless.config_file import dump_config
from training.runs import make_config, write_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]

SCRIPT = """
import json, os, sys
from gapless.config_file import load_config
from gapless.training.callbacks import Callback
from gapless.training.trainer import Trainer

cache = os.environ["TRITON_CACHE_DIR"]

class Look(Callback):
    def on_train_begin(self, trainer):
        self.before = set(os.listdir(cache))

    def on_train_end(self, trainer, result):
        late = set(os.listdir(cache)) - self.before
        files = {name: os.listdir(os.path.join(cache, name)) for name in late}
        print(json.dumps({"before": len(self.before), "late": files}))

Trainer(load_config(sys.argv[1]), callbacks=[Look()]).train()
"""


def run(config, folder):
    """Lines that a run shows, and what its cache had when it began and got since."""
    (folder / "run.toml").write_text(dump_config(config))
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-c", SCRIPT, str(folder / "run.toml")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    return lines, json.loads(lines[-1])


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_run_compiles_nothing_itself(tmp_path, kind):
    write_inputs(tmp_path)
    settings = {"device": "cuda", "dtype": "bf16", "eval": (str(tmp_path / "eval.jsonl"),), "max_steps": 3}
    lines, first = run(make_config(tmp_path, tmp_path / "first", kind, **settings), tmp_path)
    assert any(line.startswith("compiled ") for line in lines), lines
    assert first["before"] > 10
    assert not first["late"]
    lines, second = run(make_config(tmp_path, tmp_path / "second", kind, **settings), tmp_path)
    assert not any("compiled" in line for line in lines), lines
    assert second == {"before": first["before"], "late": {}}
