"""``muster completion SHELL``: prints what completes the commands and their options in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from muster.certs.__main__ import parser as certs_parser
from muster.launch.check.command import parser as check_parser
from muster.launch.nccl_plugin import parser as nccl_plugin_parser
from muster.launch.options import parser as run_parser
from muster.launch.rank_table import parser as ranktable_parser
from muster.scheduler.__main__ import parser as scheduler_parser
from muster.scheduler.audit.command import parser as audit_parser
from muster.scheduler.cli.command import parser as ask_parser
from muster.web.command import parser as web_parser
from muster.web.report import parser as report_parser

SHELLS = ("bash", "zsh", "fish")
EPILOG = """\
bash:  source <(muster completion bash)               in ~/.bashrc
zsh:   source <(muster completion zsh)                in ~/.zshrc, after compinit
fish:  muster completion fish > ~/.config/fish/completions/muster.fish"""


def main(argv: Sequence[str], commands: Mapping[str, str]) -> int:
    """Prints the completion script; ``commands`` gives a line about each command."""
    parser = argparse.ArgumentParser(
        prog="muster completion",
        description="Prints a script that completes muster's commands, options and files.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS)
    shell = parser.parse_args(list(argv)).shell
    words = words_of(commands)
    print(_fish(commands, words) if shell == "fish" else _bash(words, zsh=shell == "zsh"))
    return 0


def words_of(commands: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns the words that may follow each command: its options and subcommands."""
    asking = _subparsers(ask_parser())
    known = {
        "run": _options(run_parser()),
        "scheduler": _options(scheduler_parser()),
        "check": sorted({*_options(check_parser()), *_options(run_parser())}),
        "nccl-plugin": ["build", "show", *_options(nccl_plugin_parser())],
        "ranktable": [*_options(ranktable_parser()), "merge"],
        "audit": sorted(_subparsers(audit_parser())),
        "certs": sorted(_subparsers(certs_parser())),
        "train": ["-n", "--epochs", "--model", "--help"],
        "completion": list(SHELLS),
        "web": _options(web_parser()),
        "report": _options(report_parser()),
    }
    known |= {name: _options(parser) for name, parser in asking.items()}
    return {name: known.get(name, ["--help"]) for name in commands}


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return sorted(
        option for action in parser._actions for option in action.option_strings if "_" not in option
    )


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return {
        name: sub
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, sub in action.choices.items()
    }


_BASH = """\
_muster() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words="" i
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands} --help --version"
    else
        for i in "${{COMP_WORDS[@]}}"; do
            [ "$i" = -- ] && {{ COMPREPLY=($(compgen -f -- "$word")); return; }}
        done
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    case "$word" in -*) ;; *) [ "$COMP_CWORD" -eq 1 ] || COMPREPLY+=($(compgen -f -- "$word")) ;; esac
}}
complete -o filenames -F _muster muster"""


def _bash(words: Mapping[str, Sequence[str]], *, zsh: bool) -> str:
    cases = "\n".join(f'            {name}) words="{" ".join(each)}" ;;' for name, each in words.items())
    script = _BASH.format(commands=" ".join(words), cases=cases)
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if zsh else script


def _fish(commands: Mapping[str, str], words: Mapping[str, Sequence[str]]) -> str:
    lines = [
        f"complete -c muster -n __fish_use_subcommand -f -a {name} -d {_quoted(text)}"
        for name, text in commands.items()
    ]
    for name, each in words.items():
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        for word in each:
            if word.startswith("--"):
                lines.append(f"complete -c muster {seen} -l {word[2:]}")
            elif word.startswith("-"):
                lines.append(f"complete -c muster {seen} {'-s' if len(word) == 2 else '-o'} {word[1:]}")
            else:
                lines.append(f"complete -c muster {seen} -a {word}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "\\'") + "'"
