"""``muster``: each command is there and names itself, and a wrong one is shown the nearest."""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import subprocess
import sys

import pytest

import muster
from muster.__main__ import COMMANDS, main
from muster.certs.__main__ import parser as certs_parser
from muster.completion import words_of
from muster.launch.options import parser as run_parser
from muster.scheduler.__main__ import parser as scheduler_parser
from muster.scheduler.cli.command import parser as asking_parser
from muster.wire.variables import ALL, TABLE


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in COMMANDS)
    wanted = "run scheduler status jobs drain certs check ranktable bench train plan"
    assert set(wanted.split()) <= COMMANDS.keys()


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"muster {muster.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_help_that_names_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        main([name, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: muster {name}")


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("statsu", "did you mean muster status?"),
        ("shedule", "did you mean muster scheduler?"),
        ("xyz", "there are run, "),
    ],
)
def test_a_wrong_command_is_shown_the_nearest(
    word: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"muster: there is no command {word!r}") and told in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_of_the_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    if shutil.which(shell) is not None:
        checked = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")


def test_bash_completes_commands_and_their_options() -> None:
    ask = (
        'source <("$0" -m muster completion bash); COMP_CWORD=$1; shift; COMP_WORDS=(muster "$@"); _muster;'
        ' echo "${COMPREPLY[@]}"'
    )
    seen = [
        subprocess.run(
            ["bash", "-c", ask, sys.executable, str(len(words)), *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout.split()
        for words in (["sta"], ["run", "--max"], ["status", "--wa"], ["certs", "rev"])
    ]
    assert seen == [["status", "stacks"], ["--max-restarts"], ["--watch"], ["revoke"]]


def test_every_command_has_words_to_complete() -> None:
    assert words_of(COMMANDS).keys() == COMMANDS.keys()


def options_naming_variables() -> set[tuple[str, str]]:
    """Each option with a variable that its help names: ("run --min-workers", "MS_WORKER_MIN")."""
    parsers = {
        "run": run_parser(),
        "scheduler": scheduler_parser(),
        "status": parser_of(asking_parser(), "status"),
        "certs init": parser_of(certs_parser(), "init"),
    }
    return {
        (f"{command} {next(o for o in action.option_strings if '_' not in o)}", variable)
        for command, parser in parsers.items()
        for action in parser._actions
        if action.option_strings
        for variable in re.findall(r"\b(?:MS|CUDA)_[A-Z_]+", action.help or "")
    }


def parser_of(parser: argparse.ArgumentParser, command: str) -> argparse.ArgumentParser:
    (found,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    chosen: argparse.ArgumentParser = found.choices[command]
    return chosen


def test_the_table_of_variables_knows_the_options_that_stand_for_them_and_help_names_the_variables() -> None:
    of_table = {(option, name) for name, row in TABLE.items() for option in row.options}
    also_named = {("run --min-workers", "MS_WORKER_NUM")}  # its greatest value
    assert options_naming_variables() == of_table | also_named


@pytest.mark.parametrize(
    ("command", "sides"), [("run", ["worker", "launcher"]), ("scheduler", ["scheduler"])]
)
def test_help_shows_each_variable_that_the_processes_read(
    command: str, sides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out.partition("environment variables:\n")[2]
    described = dict(re.findall(r"^  (\w+)\n((?:    .*\n?)+)", shown, re.MULTILINE))
    wanted = {n for n, row in TABLE.items() if row.side == ALL or set(sides) & set(row.side.split(", "))}
    assert described.keys() == wanted
    assert "0.5 to 3,600; default: 5)" in described["MS_NODE_TIMEOUT"]
    assert not re.search(r"`|\]\(", shown), "Markdown on a terminal"
