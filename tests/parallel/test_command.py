"""``muster plan``, and the page that shows how to use it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from muster import parallelize
from muster.__main__ import main
from muster.errors import SettingsError
from muster.parallel.measure import load_machine, measure
from muster.parallel.planning.costs import Hardware
from tests.launch.launching import Place, environment
from tests.parallel.ranks import RankCommunicator, run_ranks
from tests.scheduler.processes import ROOT

PAGE = ROOT / "docs" / "parallel.md"
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self, classes=400_000):
        super().__init__()
        self.body, self.fc = nn.Linear(256, 256), nn.Linear(256, classes)

    def forward(self, x):
        return self.fc(torch.relu(self.body(x)))

def make():
    return Net(), (torch.empty(16, 256), torch.empty(16, dtype=torch.long)), F.cross_entropy

def fails():
    raise ValueError("no such file")

def number():
    return 3, (torch.empty(16, 256),)

def named():
    return Net(), (torch.empty(16, 256),), "mse"

class Constants(Net):
    def __init__(self):
        super().__init__(1000)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.scale = torch.tensor(2.0)

    def forward(self, x):
        places = torch.arange(x.shape[1]) * self.rates[1]
        return super().forward(x * self.scale + places + torch.tensor(0.5) + torch.zeros(256))

def constants():
    return Constants(), (torch.empty(16, 256), torch.empty(16, dtype=torch.long)), F.cross_entropy

def on_meta():
    with torch.device("meta"):
        return make()

class Flow(Net):
    def forward(self, x):
        x = super().forward(x)
        return x if x.sum() > 0 else -x

def flow():
    return Flow(), (torch.empty(16, 256), torch.empty(16, dtype=torch.long)), F.cross_entropy

def wrong():
    return Net(), (torch.empty(16, 255), torch.empty(16, dtype=torch.long)), F.cross_entropy
"""

PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models.py").write_text(MODEL)
    (tmp_path / "broken_models.py").write_text("def make(:")
    (tmp_path / "machine.json").write_text('{"flops_per_s": "fast"}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "models", raising=False)
    return tmp_path


def test_a_plan_without_gpus(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--why", "fc", "--out", "plan.json", "--html", "plan.html"]
    assert main(["plan", "models:make", "--gpus", "8", *options]) == 0
    out = capsys.readouterr().out
    assert "fc's gradient of 409.6 MB no longer travels" in out
    assert "-> n: ((1, 1), (8, 1), (8))" in out
    assert json.loads((models / "plan.json").read_text())["mesh"]
    assert (models / "plan.html").read_text().startswith("<!doctype html>")


def test_a_python_without_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["plan", "models:make"]) == 2
    assert "muster plan: it needs torch, which this Python does not have. Run pip" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["constants", "on_meta"])
@pytest.mark.parametrize("mode", ["auto", "data_parallel"])
def test_constants_without_a_device(
    models: Path, capsys: pytest.CaptureFixture[str], name: str, mode: str
) -> None:
    assert main(["plan", f"models:{name}", "--gpus", "8", "--mode", mode]) == 0
    out = capsys.readouterr().out
    assert "8 ranks as " in out
    assert f"mode {mode}" in out


@pytest.mark.parametrize("mode", ["auto", "data_parallel"])
def test_control_flow_that_depends_on_values_is_trained_data_parallel(
    models: Path, capfd: pytest.CaptureFixture[str], mode: str
) -> None:
    assert main(["plan", "models:flow", "--mode", mode]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("data parallel, because nothing else can be searched.")
    assert "at models.py:46: what it does there depends on values" in out
    assert not err
    assert main(["plan", "models:flow", "--mode", mode, "--out", "plan.json"]) == 2
    assert "there is no plan to save" in capfd.readouterr().err


@pytest.mark.parametrize("mode", ["auto", "data_parallel"])
def test_shapes_that_do_not_fit_are_told_in_a_sentence(
    models: Path, capfd: pytest.CaptureFixture[str], mode: str
) -> None:
    assert main(["plan", "models:wrong", "--mode", mode]) == 1
    out, err = capfd.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert err.startswith("muster plan: The forward pass fails at models.py:12 when it is recorded: ")
    assert "255" in err
    assert "Give an example whose shapes and dtypes the module takes." in err


def test_a_mesh_is_kept(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "models:constants", "--mesh", "2,2,2"]) == 0
    assert "8 ranks as 2 x 2 x 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "flops_per_s is missing"),
        ("[]", "it must be a JSON object, not list"),
        ('{"speed": 1}', "it has the unknown key 'speed'"),
        ('{GOOD, "latency_s": -1}', "latency_s is -1"),
        ('{GOOD, "exposed": 7}', "exposed is 7"),
        ('{GOOD, "name": 3}', "name is 3"),
        ('{GOOD, "measured": {"all_reduce": {"2": []}}}', "all_reduce of 2 ranks was measured as []"),
    ],
)
def test_a_file_that_is_no_machine(tmp_path: Path, text: str, words: str) -> None:
    good = '"flops_per_s": 1e12, "memory_bytes_per_s": 1e9, "bus_bytes_per_s": 1e9, "memory_bytes": 1e9'
    path = tmp_path / "some.json"
    path.write_text(text.replace("GOOD", good))
    with pytest.raises(SettingsError, match="is no machine that muster plan --measure wrote") as raised:
        load_machine(path)
    assert words in str(raised.value)


def test_what_is_fixed_on_the_command_line(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["--strategy", "fc=((1, 2), (1, 2))", "--mesh", "2,2", "--gpus", "4"]
    assert main(["plan", "models:make", *fixed]) == 0
    assert "linear ((1, 2), (1, 2), (1))" in capsys.readouterr().out


def test_what_saves_memory_is_asked_for_on_the_command_line(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", "models:make", "--gpus", "4", "--mode", "semi_auto", "--rest", "data_parallel"]
    gathered, shared = "gathered when they are computed with", "the updates of 4 parameters are divided"
    for more, said in (
        ([], [shared]),
        (["--shard-parameters", "always"], [gathered]),
        (["--shard-updates", "never", "--checkpoint-activations", "never"], []),
    ):
        assert main([*asked, *more]) == 0
        out = capsys.readouterr().out
        assert [each for each in (gathered, shared) if each in out] == said, more


def test_what_survives_the_loss_of_a_host(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "models:make", "--gpus", "8"]) == 0
    assert "if rank 0 is lost, parts of " in capsys.readouterr().out
    assert main(["plan", "models:make", "--gpus", "8", "--survive", "1", "--hosts", "2"]) == 0
    assert "if any one host is lost, the others hold every part of the state" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["models:make", "--survive", "1", "--hosts", "1"], "--survive 1 needs 2 hosts or more"),
        (["models:none"], "models:none cannot be found"),
        (["models"], "a model is named MODULE:FUNCTION, not 'models'"),
        (["models:make", "--strategy", "fc"], "--strategy is NAME=SLICES"),
        (["models:make", "--strategy", "fd={'n': 8}"], "there is no operator or module 'fd'"),
        (["models:make", "--gpus", "0"], "--gpus is at least 1"),
        (["models:make", "--machine", "none.json"], "the measured machine none.json cannot be read"),
        ([], "name a model"),
        (
            ["models:make", "--mesh", "2x2"],
            "--mesh is the ranks along each dimension, such as 2,4, not '2x2'",
        ),
        (["models:make", "--mesh", "0,8"], "a mesh is the ranks along each of its dimensions"),
        (["models:make", "--mesh", "2,4", "--mode", "data_parallel"], "the mesh [2, 4] needs"),
        (["models:fails"], "models:fails failed: ValueError: no such file (models.py:"),
        (["models:number"], "net is a torch.nn.Module, not 3"),
        (["models:named"], "the loss that models:named returns is no function: 'mse'"),
        (["broken_models:make"], "broken_models cannot be imported: SyntaxError"),
        (["./models.py:make"], "a model is named MODULE:FUNCTION"),
        (["models:make", "--machine", "machine.json"], "flops_per_s is 'fast'"),
        (["models:make", "--strategy", "fc=5"], "a strategy is a tuple of slices for each input"),
        (["models:make", "--strategy", "fc={'n': 0}"], "the operator linear_1 of fc was given {'n': 0}"),
        (["models:make", "--strategy", "fc={'n': 2}", "--strategy", "fc={'n': 8}"], "twice for 'fc'"),
        (
            ["models:make", "--strategy", "fc={'n': 2}", "--strategy", "linear_1={'n': 8}"],
            "two strategies apply to the operator linear_1 of fc",
        ),
        (
            ["models:make", "--strategy", "fc={'n': 8}", "--mode", "data_parallel"],
            "the strategy of 'fc' needs",
        ),
        (["models:make", "--hosts", "3"], "--hosts must share 8 GPUs evenly; it is 3"),
        (["models:make", "--optimizer-states", "-1"], "--optimizer-states is at least 0"),
        (["models:make", "--out", "none/plan.json"], "none/plan.json cannot be written"),
    ],
)
def test_mistakes_are_told_in_words(
    models: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["plan", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_cpu_is_measured_and_plans_are_made_for_it(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["plan", "--measure", "machine.json"]) == 0
    machine = load_machine("machine.json")
    batch = torch.zeros(2, 4)
    model = run_ranks(
        1, lambda c: parallelize(nn.Linear(4, 2), (batch,), communicator=c, machine="machine.json")
    )
    assert model[0].plan.machine == machine
    assert machine.name == "CPU, measured on 1 rank"
    assert machine.flops_per_s > 1e8
    assert main(["plan", "models:make", "--gpus", "4", "--machine", "machine.json"]) == 0
    assert "costs of: CPU, measured on 1 rank" in capsys.readouterr().out


def test_collectives_are_measured_by_size_and_group() -> None:
    def go(communicator: RankCommunicator) -> object:
        return measure(communicator, sizes=(1024, 65536), side=64)

    first, *others = run_ranks(4, go)
    assert all(other.measured == first.measured for other in others)
    assert set(first.measured) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    for groups in first.measured.values():
        assert set(groups) == {"2", "4"}
        assert all([size for size, _ in rows] == [1024, 65536] for rows in groups.values())
    rows = first.measured["all_gather"]["2"]
    assert first.collective_s("all_gather", 2, 65536) == pytest.approx(rows[1][1])
    between = first.collective_s("all_gather", 2, 30000)
    assert min(rows[0][1], rows[1][1]) <= between <= max(rows[0][1], rows[1][1])
    assert first.collective_s("all_gather", 2, 131072) == pytest.approx(2 * rows[1][1])


def test_groups_across_hosts_are_measured_apart() -> None:
    def go(communicator: RankCommunicator) -> Hardware:
        peers = tuple(
            replace(peer, host_id=f"host {peer.rank // 2}") for peer in communicator.membership.peers
        )
        communicator.membership = replace(communicator.membership, peers=peers)
        return measure(communicator, sizes=(1024, 65536), side=64)

    machine = run_ranks(4, go)[0]
    for groups in machine.measured.values():
        assert set(groups) == {"2", "2 on 2 hosts", "4 on 2 hosts"}
    rows = machine.measured["all_reduce"]["2 on 2 hosts"]
    assert machine.host_ranks == 2
    assert machine.network_latency_s == pytest.approx(rows[0][1] / 2)
    assert machine.network_bytes_per_s == pytest.approx(65536 / rows[1][1])
    assert machine.along_s("all_reduce", (0,), (2, 2), 65536) == pytest.approx(rows[1][1])


# ---------------------------------------------------------------- real processes, and the page


def test_the_quickstart_trains_in_processes(tmp_path: Path) -> None:
    """Four ranks, each a process, over real sockets."""
    place = Place(tmp_path)
    command = (sys.executable, "-m", "examples.quickstart_parallel", "--save", "plan.json")
    code, out, err = place.run("-n", "4", "--scheduler", command=command, PYTHONPATH=PATH)
    assert code == 0, out + err
    losses = [float(x) for x in re.findall(r"epoch: \d step: \d, loss is ([0-9.]+)", out)]
    assert len(losses) == 20
    assert losses == sorted(losses, reverse=True)
    assert losses[0] == pytest.approx(0.33, abs=0.05)
    assert "matmul ((2, 2), (2, 1)); relu ((2, 2))" in out
    assert "weight: [16, 16] on this rank" in out
    assert json.loads((tmp_path / "plan.json").read_text())["mesh"] == [2, 2]


@pytest.mark.system
@pytest.mark.timeout(900)
def test_the_quickstart_of_eight_ranks_in_all_modes(tmp_path: Path) -> None:
    seen = {}
    for mode in ("semi_auto", "auto", "data_parallel"):
        run = subprocess.run(
            [
                *(sys.executable, "-m", "muster", "run", "-n", "8", "--scheduler", "--"),
                *(sys.executable, "-m", "examples.quickstart_parallel", "--mode", mode),
            ],
            cwd=tmp_path,
            env=environment(PYTHONPATH=PATH, MS_SCHED_PORT="", CUDA_VISIBLE_DEVICES=""),
            capture_output=True,
            text=True,
            check=True,
            timeout=280,
        )
        seen[mode] = [float(x) for x in re.findall(r"epoch: \d step: \d, loss is ([0-9.]+)", run.stdout)]
        if mode == "semi_auto":
            assert "8x8 8x16; 8x4; 8x4 4x16" in run.stdout
            assert "weight: [8, 16] on this rank" in run.stdout
    assert seen["auto"] == pytest.approx(seen["semi_auto"], rel=1e-5)
    # DataParallel prints each rank's own loss.
    assert len(seen["data_parallel"]) == 20


def page_commands() -> list[str]:
    text = PAGE.read_text().replace("\\\n", " ")
    return re.findall(r"^ *(muster plan .*)$", text, re.MULTILINE)


def test_the_page_shows_commands() -> None:
    assert len(page_commands()) >= 4
    assert len(re.findall(r"^```python\n", PAGE.read_text(), re.MULTILINE)) >= 2


def test_the_page_shows_what_its_first_command_prints(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PAGE.read_text()
    (models / "models.py").write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0])
    assert main(shlex.split(page_commands()[0])[1:]) == 0
    [shown] = re.findall(r"```text\n(8.*?)```", text, re.DOTALL)
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in shown.splitlines() if line != "..." and line not in printed] == []


@pytest.mark.parametrize("line", page_commands())
def test_the_commands_of_the_page_work(line: str, models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (models / "models.py").write_text(next(block for block in blocks if "def make" in block))
    if "--machine" in line:
        assert main(["plan", "--measure", "machine.json"]) == 0
    assert main(shlex.split(line)[1:]) == 0
    assert capsys.readouterr().out


def test_the_training_script_of_the_page_runs(models: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    script = next(block for block in blocks if "muster.parallelize(" in block and "muster.init" in block)
    small = next(block for block in blocks if "def make" in block).replace("400_000", "4_000")
    (models / "models.py").write_text(small)
    place = Place(models)
    place.script(script, "train.py")
    code, out, err = place.run(
        "-n", "2", "--scheduler", command=(sys.executable, "train.py"), PYTHONPATH=PATH
    )
    assert code == 0, out + err
    assert "data parallel" in out
