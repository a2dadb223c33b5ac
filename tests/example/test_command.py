"""What ``muster train`` starts on other machines; ``end_to_end/test_make.py`` runs it for real."""

from __future__ import annotations

import pytest

from muster.example.command import choose_devices
from tests.launch.test_command import launch


@pytest.mark.parametrize(
    ("workers", "gpus", "taken"),
    [(2, 0, 0), (2, 1, 0), (1, 1, 1), (2, 2, 2), (3, 2, 0), (2, 8, 2), (8, 8, 8), (9, 8, 0)],
)
def test_it_runs_on_every_host_and_takes_gpus_where_there_are_enough(
    workers: int, gpus: int, taken: int
) -> None:
    devices, why = choose_devices(workers, gpus, has_cupy=True)
    made = launch("-n", str(workers), "--devices", devices, gpus=gpus)
    assert len(made.recipes) == workers
    assert [recipe.env.get("DEVICE_ID") for recipe in made.recipes] == (
        [str(index) for index in range(workers)] if taken else [None] * workers
    )
    assert bool(why) == (gpus > 0 and not taken)


def test_one_line_says_why_gpus_are_left_alone_and_how_to_take_them() -> None:
    assert choose_devices(2, 1, has_cupy=True)[1] == (
        "2 workers for 1 GPU: training on CPUs; -n 1 (make: WORKERS=1) takes it"
    )
    assert choose_devices(4, 2, has_cupy=True)[1] == (
        "4 workers for 2 GPUs: training on CPUs; -n 2 (make: WORKERS=2) takes them"
    )
    without, why = choose_devices(1, 1, has_cupy=False)
    assert without == "none" and "CuPy" in why
    assert choose_devices(2, 0, has_cupy=False) == ("all", "")
