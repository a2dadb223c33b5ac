"""Which optimizers' steps a graph can hold."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.torch.captured_settings import host_bound


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("SGD", {"lr": 0.1}, "SGD reads its learning rate on the host: make it with fused=True"),
        ("SGD", {"lr": 0.1, "fused": True}, None),
        ("Adafactor", {}, "Adafactor reads its learning rate on the host"),
        ("AdamW", {"fused": True}, "AdamW reads its step count on the host: make it with capturable=True"),
        ("AdamW", {"fused": True, "capturable": True}, None),
        ("NAdam", {"capturable": True}, None),
        ("LBFGS", {}, "LBFGS decides on the host how often to evaluate the loss"),
    ],
)
def test_optimizers_that_need_the_host_in_each_step_are_known(
    kind: str, options: dict[str, Any], words: str | None
) -> None:
    make = getattr(torch.optim, kind, None)
    if make is None:
        pytest.skip(f"this torch has no {kind}")
    assert host_bound(make([torch.nn.Parameter(torch.zeros(2, 2))], **options)) == words


def test_another_library_s_optimizer_is_given_a_try() -> None:
    class Own(torch.optim.SGD):  # type: ignore[misc,name-defined]
        pass

    assert host_bound(Own([torch.nn.Parameter(torch.zeros(2))], lr=0.1)) is None
