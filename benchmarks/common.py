"""What the benchmarks share: timing, errors, and rows of results (docs/design.md, section 8)."""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "triton", "numpy", "transformers", "peft", "liger_kernel", "unsloth", "flash-attn-4", "vllm")
_GRAPH_CALLS = 12
_CYCLES_PER_US = 1800

FAILURES = (
    *(RuntimeError, ValueError, TypeError, AttributeError, AssertionError, ImportError, LookupError),
    *(NotImplementedError, triton.errors.TritonError),
)
"""What a case may end with while the others go on."""

Work = Callable[[], object]


@dataclass(kw_only=True)
class Row:
    """One claim. The bars are for the table, the rest goes into the file."""

    case: str
    unit: str
    gapless: float
    peers: dict[str, float] = field(default_factory=dict)
    limit: float
    """What matmuls and bytes alone would give at the rates measured in the run, in the row's unit."""
    peak_gib: dict[str, float] = field(default_factory=dict)
    beside: dict[str, float] = field(default_factory=dict)
    """Values that the row was made of."""
    note: str = ""
    peak_bar: float | None = None
    """GiB that `peak_gib` of ours must stay below."""
    bar: float | None = None
    """What `gapless` must reach; None for rows that inform."""
    lower_is_better: bool = False
    must_beat: Sequence[str] = ()
    """Peers that `gapless` must be at least as good as."""

    def missed(self) -> list[str]:
        """What the row does not reach."""
        found = [] if self.bar is None or self._reaches(self.bar) else ["bar"]
        if self.peak_bar is not None and self.peak_gib["gapless"] > self.peak_bar:
            found.append(f"{self.peak_bar:g} GiB")
        return found + [peer for peer in self.must_beat if peer in self.peers and not self._reaches(self.peers[peer])]

    def _reaches(self, value: float) -> bool:
        return self.gapless <= value if self.lower_is_better else self.gapless >= value

    def record(self, command: str) -> dict[str, Any]:
        """The row as it is kept."""
        kept = {"case": self.case, "unit": self.unit, "gapless": _rounded(self.gapless), "peers": _rounded(self.peers)}
        kept |= {"limit": _rounded(self.limit), "peak_gib": _rounded(self.peak_gib)}
        if self.beside:
            kept["beside"] = _rounded(self.beside)
        if self.note:
            kept["note"] = self.note
        kept |= {"commit": commit(), "date": datetime.date.today().isoformat()}
        return kept | {"device": torch.cuda.get_device_name(), "versions": versions(), "command": command}


def require_gpu() -> None:
    """End with a line where there is no GPU of NVIDIA's."""
    if not torch.cuda.is_available():
        sys.exit("error: this benchmark needs a GPU that torch can use through CUDA, and finds none")


def chosen(given: str | None, known: Sequence[str], kind: str) -> list[str]:
    """The names of a comma-separated list; none without one. Ends with a line where a name is not known."""
    names = [name for name in (given or "").replace(" ", "").split(",") if name]
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"error: no {kind} is {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def versions() -> dict[str, str]:
    """Of the packages that matter, where they are installed; and of CUDA."""
    found = {"python": sys.version.split()[0], "cuda": str(torch.version.cuda)}
    if torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@cache
def commit() -> str:
    """The commit that is checked out; "unknown" in a copy without its history.

    "-dirty" where files differ from it, but for results and the page made of them: a commit may have many runs.
    """
    git = ["git", "-C", str(Path(__file__).parents[1])]
    changed = ["status", "--porcelain", "--", ".", ":!benchmarks/results", ":!docs/benchmarks.md"]
    named, changes = (
        subprocess.run([*git, *command], capture_output=True, text=True, check=False).stdout.strip()
        for command in (["rev-parse", "--short", "HEAD"], changed)
    )
    return f"{named}-dirty" if named and changes else named or "unknown"


def merge(benchmark: str, rows: Sequence[Row], command: str) -> Path:
    """Put rows into benchmarks/results/NAME.json, each in the place of an older one of its case."""
    path = RESULTS / f"{benchmark}.json"
    kept = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    records = {record["case"]: record for record in kept} | {row.case: row.record(command) for row in rows}
    path.parent.mkdir(exist_ok=True)
    text = json.dumps({"benchmark": benchmark, "rows": list(records.values())}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def run_cases(
    benchmark: str, cases: Mapping[str, Callable[[], Sequence[Row]]], command: str
) -> tuple[list[Row], dict[str, str]]:
    """Run cases one after the other; rows go to the file as they come.

    Returns:
        The rows, and of each case that failed the error. The others go on, unless the GPU no longer answers.
    """
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for name, case in cases.items():
        torch.manual_seed(0)
        start = time.perf_counter()
        try:
            made = case()
            torch.cuda.synchronize()
        except FAILURES as error:
            failed[name] = one_line(error)
            print(traceback.format_exc(limit=-4), flush=True)
        else:
            merge(benchmark, made, command)
            rows += made
        print(f"{name}: {time.perf_counter() - start:.1f} s{' FAILED' if name in failed else ''}", flush=True)
        try:
            free_memory()
        except RuntimeError as error:
            print(f"the rest is left out: {one_line(error)}")
            break
    return rows, failed


def one_line(error: BaseException) -> str:
    """Kind of an error and the start of what it says."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def print_failed(failed: Mapping[str, str]) -> None:
    """A line for each case that failed."""
    for name, error in failed.items():
        print(f"{name} FAILED {error}")


def print_table(rows: Sequence[Row]) -> None:
    """A line a row: ours, the bar, the peers, and what was missed."""
    width = max((len(row.case) for row in rows), default=4)
    print(f"{'case':{width}} {'gapless':>8} {'bar':>8}  {'unit':22} peers")
    for row in rows:
        bar = "-" if row.bar is None else f"{'<=' if row.lower_is_better else '>='}{row.bar:g}"
        peers = ", ".join(f"{name} {value:.3g}" for name, value in row.peers.items())
        beside = "" if not row.beside else " [" + ", ".join(f"{k} {v:.4g}" for k, v in row.beside.items()) + "]"
        peak = "" if not row.peak_gib else " GiB " + ", ".join(f"{k} {v:.2f}" for k, v in row.peak_gib.items())
        missed = row.missed()
        verdict = (
            f"  MISSED {', '.join(missed)}" if missed else ("  ok" if row.bar is not None or row.must_beat else "")
        )
        print(f"{row.case:{width}} {row.gapless:8.3g} {bar:>8}  {row.unit:22} {peers}{beside}{peak}{verdict}")


# ---- timing ----


def medians(works: Mapping[str, Work], *, warmup: int = 20, rep: int = 100, ahead_us: float = 0.0) -> dict[str, float]:
    """Milliseconds of each work, the median of its calls with a cold L2.

    They take turns call by call, in both orders, so that what one draws of the card's power slows the others as much.
    Timed in blocks of 50 ms, an adapted layer took 1.05 of its matmul in one run and 1.09 in another.

    Args:
        works: by name.
        warmup: milliseconds, of each.
        rep: milliseconds of calls that count, of each on average.
        ahead_us: how long the GPU idles before each call, so that the host is ahead of it and short calls are timed
            without their launches, as in a CUDA graph.
    """
    flushed = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    names = list(works)

    def in_turns(rounds: int) -> dict[str, float]:
        pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in names}
        for round_ in range(rounds):
            for name in names[:: 1 - 2 * (round_ % 2)]:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                if ahead_us:
                    torch.cuda._sleep(round(ahead_us * _CYCLES_PER_US))
                flushed.zero_()
                start.record()
                works[name]()
                end.record()
                pairs[name].append((start, end))
        torch.cuda.synchronize()
        return {name: median(start.elapsed_time(end) for start, end in found) for name, found in pairs.items()}

    in_turns(2)
    together = sum(in_turns(4).values()) + len(names) * ahead_us / 1e3
    in_turns(int(warmup * len(names) / together) + 1)
    return in_turns(max(int(rep * len(names) / together), 10))


def graph_medians(works: Mapping[str, Sequence[Work]], *, rep: int = 40) -> dict[str, float]:
    """Milliseconds a call in a CUDA graph of several calls: without the host's part, which is the same for none.

    Args:
        works: by name, one work for each set of inputs; they take turns, so that no call finds its inputs in L2.
        rep: milliseconds of replays that count.
    """
    graphs = {name: captured(sets) for name, sets in works.items()}
    times = medians({name: graph.replay for name, graph in graphs.items()}, warmup=10, rep=rep)
    return {name: time / _GRAPH_CALLS for name, time in times.items()}


def captured(sets: Sequence[Work]) -> torch.cuda.CUDAGraph:
    """`_GRAPH_CALLS` calls, one set of inputs after the other, on the current stream (which is not the default one)."""
    for work in (*sets, *sets):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for call in range(_GRAPH_CALLS):
            sets[call % len(sets)]()
    return graph


def gradient_work(outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Work:
    """A backward that can be called again and again: gradients of `inputs` from fixed random ones of `outs`."""
    grads = [torch.randn_like(out) for out in outs]
    return lambda: torch.autograd.grad(outs, inputs, grads, retain_graph=True)


def peak_gib(work: Work) -> float:
    """Most memory that a call had at once beyond what there was before it."""
    free_memory()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def free_memory() -> None:
    """Give back what nothing refers to."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


class Stopwatch:
    """Times between points of a program: on the GPU's clock, as its stream comes to them, or the host's without one."""

    def __init__(self, device: str | torch.device) -> None:
        """Where the work is."""
        self._cuda = torch.device(device).type == "cuda"
        self._points: list[Any] = []

    def __len__(self) -> int:
        """Points so far."""
        return len(self._points)

    def point(self) -> None:
        """Now."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._points.append(event)
        else:
            self._points.append(time.perf_counter())

    def read(self) -> list[float]:
        """Milliseconds from each point to the next; waits for the GPU, and begins anew."""
        if self._cuda:
            torch.cuda.synchronize()
        points, self._points = self._points, []
        pairs = zip(points, points[1:], strict=False)
        return [one.elapsed_time(other) if self._cuda else 1e3 * (other - one) for one, other in pairs]


def copy_rate() -> float:
    """Bytes read plus bytes written a millisecond, of a large copy on the device."""
    source = random_like(1 << 30, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / medians({"copy": lambda: target.copy_(source)}, rep=200)["copy"]


# ---- data and errors ----


def random_like(count: int, *, dtype: torch.dtype) -> torch.Tensor:
    """Random bytes or integers on the GPU."""
    return torch.empty(count, dtype=dtype, device="cuda").random_(0, 256)


def randn(*shape: int, scale: float = 1.0, grad: bool = True, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal values on the GPU, a leaf."""
    return torch.randn(shape, device="cuda").mul_(scale).to(dtype).requires_grad_(grad)


def assert_close(name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float = 5e-3) -> None:
    """Fail unless the norm of the difference is a small share of the norm of what is expected."""
    difference = (found.detach().float() - expected.detach().float()).norm() / expected.detach().float().norm()
    if not difference <= tolerance:
        raise AssertionError(f"{name}: off by {float(difference):.2g} of its norm, allowed {tolerance:g}")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return float(f"{value:.4g}")
