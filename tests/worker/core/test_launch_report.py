"""What the launcher writes about processes."""

from __future__ import annotations

import pytest

from worker.core.launch_report import describe_exit, environment_dump, exit_status, parse_tail
from worker.errors import SettingsError


def test_the_dump_shows_what_matters_and_no_secret() -> None:
    env = {
        "MS_WORKER_NUM": "2",
        "MS_CLIENT_PASSWORD": "hunter2",
        "NCCL_DEBUG": "INFO",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
        "MS_API_TOKEN": "hunter2",
        "SLURM_JWT": "hunter2",
        "MS_PROXY_AUTH": "hunter2",
        "NVIDIA_DB_PASS": "hunter2",
        "PYTHON_REGISTRY_CREDS": "hunter2",
        "HOME": "/root",
    }
    assert environment_dump(env) == [
        "MS_API_TOKEN=(set)",
        "MS_CLIENT_PASSWORD=(set)",
        "MS_PROXY_AUTH=(set)",
        "MS_WORKER_NUM=2",
        "NCCL_DEBUG=INFO",
        "NVIDIA_DB_PASS=(set)",
        "PYTHON_REGISTRY_CREDS=(set)",
        "SLURM_JWT=(set)",
    ]


def test_tail() -> None:
    labels = ["0", "1", "scheduler"]
    assert parse_tail("all", labels) == {"0", "1", "scheduler"}
    assert parse_tail("none", labels) == frozenset()
    assert parse_tail("1, scheduler", labels) == {"1", "scheduler"}
    assert parse_tail("7", labels) == {"7"}  # a rank of another host
    with pytest.raises(SettingsError, match="--tail"):
        parse_tail("rank0", labels)


def test_exits_in_words_and_as_the_shell_counts_them() -> None:
    assert describe_exit(3, {}) == "exited with code 3"
    assert describe_exit(-9, {9: "SIGKILL"}) == "was ended by SIGKILL"
    assert describe_exit(-40, {}) == "was ended by signal 40"
    assert exit_status(3) == 3
    assert exit_status(-9) == 137
