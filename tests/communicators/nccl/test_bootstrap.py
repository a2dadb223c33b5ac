"""How the creation of a communicator is awaited and given up, with an NCCL that is played."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from muster.communicators.nccl import bootstrap as nccl_handles
from muster.communicators.nccl.bootstrap import fewest_ctas
from muster.errors import CommunicatorError, FormationTimeoutError, MembershipChanged
from tests.communicators.nccl.fake_nccl import ENDED, EndedConnection, FakeNccl, membership


def test_without_the_bindings_the_package_to_install_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nccl", None)
    monkeypatch.setitem(sys.modules, "nccl.bindings", None)
    with pytest.raises(
        CommunicatorError, match=r"NCCL cannot be used: .*sys\.modules\. Run pip install .*\[cuda1"
    ):
        nccl_handles.load_bindings()


def waiting(timeout_s: float, cancelled: Any = lambda: None) -> nccl_handles.FormationWait:
    return nccl_handles.FormationWait(
        membership(["", ""]), timeout_s=timeout_s, cancelled=cancelled, absent=lambda: "missing: rank 1"
    )


def test_creation_is_polled_until_it_is_done() -> None:
    nccl = FakeNccl(polls=3)
    assert nccl_handles.create_root(nccl, membership(["", ""]), waiting(60)) == "comm 0 of 2"
    assert nccl.polls < 0 and not nccl.aborted


def test_large_worlds_have_several_ids() -> None:
    comm = nccl_handles.create_root(FakeNccl(0), membership(["", ""], ids=(b"a", b"b")), waiting(60))
    assert comm == "comm 0 of 2 with 2 ids, 2 bytes"


def test_a_deadline_aborts_and_names_who_is_missing() -> None:
    nccl = FakeNccl(polls=10**9)
    with pytest.raises(FormationTimeoutError, match=r"generation 3.*missing: rank 1") as caught:
        nccl_handles.create_root(nccl, membership(["", ""]), waiting(0.01))
    assert nccl.aborted == ["comm 0 of 2"]
    assert "secret" not in str(caught.value)


def test_a_newer_generation_ends_the_wait() -> None:
    nccl = FakeNccl(polls=10**9)
    change = MembershipChanged("rank 1 is gone", generation=3)
    with pytest.raises(MembershipChanged):
        nccl_handles.create_root(nccl, membership(["", ""]), waiting(60, cancelled=lambda: change))
    assert nccl.aborted


def test_what_ended_an_encrypted_connection_is_told_where_a_communicator_cannot_be_made() -> None:
    group = membership(["10.0.0.1:1", "10.0.0.2:1"])
    for nccl, timeout_s in ((FakeNccl(0, 6), 60.0), (FakeNccl(polls=10**9), 0.01)):
        wait = nccl_handles.FormationWait(
            group,
            timeout_s=timeout_s,
            cancelled=lambda: None,
            absent=lambda: "missing: rank 1",
            plugin=EndedConnection(),
        )
        with pytest.raises(CommunicatorError if timeout_s > 1 else FormationTimeoutError, match=ENDED):
            nccl_handles.create_root(nccl, group, wait)


class SplittingNccl(FakeNccl):
    """Keeps the configuration of what is split off."""

    def __init__(self) -> None:
        super().__init__(polls=0)
        self.configs: list[dict[str, Any]] = []
        nccl = self

        class Config:
            def __init__(self) -> None:
                nccl.configs.append(vars(self))

            @property
            def ptr(self) -> int:
                return 1

        self.Config = Config  # type: ignore[assignment]

    def comm_split(self, parent: Any, color: int, key: int, config: int) -> str:
        return f"child of {parent}"


@pytest.mark.parametrize(
    ("min_ctas", "config"),
    [(None, {"blocking": 1}), (32, {"blocking": 1, "min_ctas": 32, "max_ctas": 64})],
)
def test_a_split_asks_for_as_many_ctas_as_it_is_told(min_ctas: int | None, config: dict[str, int]) -> None:
    nccl = SplittingNccl()
    child = nccl_handles.split_child(nccl, "it", color=0, key=0, waiting=waiting(60), min_ctas=min_ctas)
    assert child == "child of it"
    assert nccl.configs == [config]


@pytest.mark.parametrize(
    ("model", "hosts", "nvls", "ctas"),
    [
        ("NVIDIA H200", 1, "0", 32),
        ("NVIDIA H200", 2, "0", None),  # the network decides there
        ("NVIDIA H200", 1, "1", None),  # not measured
        ("NVIDIA H200", 1, None, None),
        ("NVIDIA L4", 1, "0", None),
    ],
)
def test_ctas_are_asked_for_only_where_more_were_measured_to_help(
    model: str, hosts: int, nvls: str | None, ctas: int | None
) -> None:
    env = {} if nvls is None else {"NCCL_NVLS_ENABLE": nvls}
    assert fewest_ctas(model, hosts=hosts, env=env) == ctas
