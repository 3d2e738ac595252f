"""The shape of the package: who imports whom, what is public, how large things are, how fast a command answers."""

import ast
import graphlib
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import gapless

SOURCE = Path(gapless.__file__).parent

BESIDE = {"config", "errors"}
"""Anyone may read the configuration's dataclasses, and tell errors of users from others."""
MODEL = {"adapters", "models", "kernels", "batch"}
RUN = {"data", "parallel", "memory", *MODEL, "config_file", "checkpoint_file"}
ALLOWED = {
    "config": set(),
    "errors": set(),
    "arguments": set(),
    "yaml_file": set(),
    "config_aliases": set(),
    "config_file": {"arguments", "config_aliases", "yaml_file"},
    "batch": set(),
    "checkpoint_file": set(),
    "kernels": {"batch"},
    "models": {"kernels", "batch"},
    "data": {"batch"},
    "adapters": {"models", "kernels", "batch"},
    "memory": {"models", "kernels", "batch"},
    "parallel": {"memory", *MODEL},
    "quantization": RUN,
    "inference": RUN,
    "training": {"inference", *RUN},
    "profiling": {"training", "inference", *RUN},
    "cli": {"training", "profiling", "inference", "quantization", "parallel", "data", "config_file", "arguments"},
    "__main__": {"cli"},
}
"""What each part of the package may import: the arrows of docs/design.md, section 2."""
HEAVY = ("torch", "numpy", "transformers", "tokenizers", "pyarrow", "jinja2", "safetensors")


def imports(path: Path, *, for_types: bool = True) -> set[str]:
    """Modules of the package that a file imports, anywhere in it, as dotted names without `gapless.`.

    `for_types`: count what only a type checker imports.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    if not for_types:
        blocks = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
        skipped = {inner for block in blocks for inner in ast.walk(block)}
        nodes = [node for node in nodes if node not in skipped]
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name.removeprefix("gapless.") for name in names if name.startswith("gapless.")}


def modules() -> dict[str, Path]:
    """Files by dotted name without `gapless.`; a folder's own file by the folder's name."""
    found = {path.relative_to(SOURCE).with_suffix(""): path for path in SOURCE.rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in found.items()}


def test_arrows():
    wrong = []
    for name, path in modules().items():
        part = name.partition(".")[0]
        if name == "__init__":
            continue
        assert part in ALLOWED, f"{name} is in no known part of the package"
        used = {target.partition(".")[0] for target in imports(path)} - {part, "__version__"}
        wrong += [f"{name} imports {target}" for target in used - ALLOWED[part] - BESIDE]
    assert not wrong


def test_no_cycles():
    files = modules()
    graph = {}
    for name, path in files.items():
        targets = {
            target if target in files else target.rpartition(".")[0] for target in imports(path, for_types=False)
        }
        graph[name] = {target for target in targets if target in files} - {name, "__init__"}
    graph.pop("__init__")
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_public_names():
    assert gapless.__all__ == ["Trainer", "attention", "export", "generate", "load_config", "load_model", "train"]
    assert {*gapless.__all__} <= {*dir(gapless)}
    for name in gapless.__all__:
        assert callable(getattr(gapless, name))
    with pytest.raises(AttributeError, match="no attribute 'tain'"):
        _ = gapless.tain


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_size(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 600
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 80, f"{node.name} is {node.end_lineno - node.lineno + 1} lines"


def test_light_imports():
    """One process: the package, the loader and each help text leave the heavy libraries unimported."""
    script = f"""
import contextlib, io, json, sys
def loaded():
    return [name for name in {HEAVY!r} if name in sys.modules]
import gapless
found = {{"import gapless": loaded()}}
gapless.load_config
found["load_config"] = loaded()
from gapless.cli import main
for arguments in (["--help"], ["--version"], ["train", "--help"], ["profile", "--help"], ["generate", "--help"],
        ["export", "--help"]):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        code = main(arguments)
    found[" ".join(arguments)] = loaded() + ([] if code == 0 and text.getvalue() else [f"exit code {{code}}"])
with contextlib.redirect_stderr(io.StringIO()):
    found["a run file that is refused"] = loaded() + ([] if main(["train", "missing.toml"]) == 2 else ["exit code"])
print(json.dumps(found))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    assert len(found) == 9
    assert not {what: names for what, names in found.items() if names}


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [(["-c", "import gapless"], 0.2), (["-m", "gapless", "--help"], 0.5), (["-m", "gapless", "train", "--help"], 0.5)],
)
def test_start_time(arguments, limit):
    """Processor seconds, best of three: the wall clock of an idle machine, but steady on a busy one."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < limit
