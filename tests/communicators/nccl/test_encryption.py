"""What is decided about encrypting NCCL's traffic, from facts alone."""

from __future__ import annotations

from typing import Any

import pytest

from muster.communicators.nccl.encryption import (
    NcclFacts,
    SealingPlugin,
    decide,
    obstacle_before_build,
)
from muster.wire.variables import TABLE

PLUGIN = SealingPlugin("/opt/libmuster-nccl.so")


def facts(tls: bool = True, version: str = "2.28.9", infiniband: bool = False, **env: str) -> NcclFacts:
    return NcclFacts(tls, env, version, infiniband)


def test_off_sets_nothing_and_looks_at_nothing() -> None:
    decided = decide("off", facts(tls=False, NCCL_NET="IB"), SealingPlugin())
    assert (decided.sealed, dict(decided.environment), decided.refusal) == (False, {}, None)
    assert TABLE["MS_NCCL_ENCRYPTION"].default == "off"


def test_require_names_the_plug_in_and_closes_every_other_way() -> None:
    decided = decide("require", facts(infiniband=True, NCCL_SOCKET_IFNAME="eth0"), PLUGIN)
    assert decided.sealed and decided.refusal is None
    assert dict(decided.environment) == {
        "NCCL_NET_PLUGIN": PLUGIN.path,
        "NCCL_NET": "MusterSealed",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_COLLNET_ENABLE": "0",
        "NCCL_GIN_ENABLE": "0",
        "NCCL_RMA_DISABLE": "1",
        "NCCL_RAS_ENABLE": "0",
        "NCCL_IB_DISABLE": "1",
    }
    assert decided.words == "sealed by Muster's plug-in (AES-128-GCM)"


REFUSED: list[tuple[NcclFacts, SealingPlugin, str, str]] = [
    (facts(tls=False), PLUGIN, "without certificates", "--config"),
    (facts(version="2.18.6"), PLUGIN, r"NCCL 2\.18\.6 cannot load", "newer NCCL"),
    (facts(NCCL_NET_PLUGIN="aws-ofi"), PLUGIN, "NCCL_NET_PLUGIN is 'aws-ofi'", "Unset NCCL_NET_PLUGIN"),
    (facts(NCCL_NET="Socket"), PLUGIN, "NCCL_NET is 'Socket'", "Unset NCCL_NET"),
    (facts(NCCL_ENV_PLUGIN="own"), PLUGIN, "NCCL_ENV_PLUGIN is 'own'", "Unset NCCL_ENV_PLUGIN"),
    (facts(NCCL_IB_HCA="mlx5_0"), PLUGIN, "NCCL_IB_HCA is 'mlx5_0'", "Unset NCCL_IB_HCA"),
    (facts(NCCL_IB_DISABLE="0"), PLUGIN, "NCCL_IB_DISABLE is '0'", "Unset NCCL_IB_DISABLE"),
    (facts(NCCL_MNNVL_ENABLE="1"), PLUGIN, "NVLink between hosts", "Unset NCCL_MNNVL_ENABLE"),
    (facts(NCCL_COLLNET_ENABLE="1"), PLUGIN, "CollNet", "Unset NCCL_COLLNET_ENABLE"),
    (facts(), SealingPlugin(), "is not built", "muster nccl-plugin build"),
    (facts(), SealingPlugin("/x", "no libcrypto", "install it"), "no libcrypto", "install it"),
]


@pytest.mark.parametrize(("known", "plugin", "sentence", "remedy"), REFUSED)
def test_require_refuses_with_a_sentence_and_a_remedy(
    known: NcclFacts, plugin: SealingPlugin, sentence: str, remedy: str
) -> None:
    decided = decide("require", known, plugin)
    assert decided.refusal is not None and not decided.sealed and not decided.environment
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(decided.refusal.sentence)
    assert remedy in decided.refusal.remedy


def test_each_refusal_has_words_of_its_own() -> None:
    refusals = [decide("require", known, plugin).refusal for known, plugin, _, _ in REFUSED]
    assert len({refusal.sentence for refusal in refusals if refusal}) == len(REFUSED)
    assert len({refusal.remedy for refusal in refusals if refusal}) == len(REFUSED)


@pytest.mark.parametrize(
    "known",
    [
        facts(tls=False),
        facts(version="2.18.6"),
        facts(NCCL_NET_PLUGIN="own"),
        facts(NCCL_NET="IB"),
        facts(infiniband=True),
        facts(infiniband=True, NCCL_IB_DISABLE="0"),
    ],
)
def test_prefer_stays_plain_where_it_must_and_says_why(known: NcclFacts) -> None:
    decided = decide("prefer", known, PLUGIN)
    hindered = obstacle_before_build("prefer", known)
    assert hindered is not None
    assert decided.refusal is None and not decided.sealed and not decided.environment
    assert decided.words == f"plain: {hindered.sentence}"


def test_prefer_without_a_plug_in_says_why() -> None:
    decided = decide("prefer", facts(), SealingPlugin(obstacle="There is no C compiler.", remedy="x"))
    assert (decided.sealed, decided.words) == (False, "plain: There is no C compiler.")


def test_prefer_seals_and_leaves_what_the_user_chose() -> None:
    decided = decide("prefer", facts(infiniband=True, NCCL_IB_DISABLE="1", NCCL_RAS_ENABLE="1"), PLUGIN)
    assert dict(decided.environment) == {
        "NCCL_NET_PLUGIN": PLUGIN.path,
        "NCCL_NET": "MusterSealed",
        "NCCL_GIN_ENABLE": "0",
        "NCCL_RMA_DISABLE": "1",
    }
    assert (decided.sealed, decided.plain_ways) == (True, ())


@pytest.mark.parametrize(
    ("env", "between_hosts", "ways"),
    [
        ({}, False, ()),
        ({}, True, ("NVLink between hosts",)),
        ({"NCCL_MNNVL_ENABLE": "0"}, True, ()),
        ({"NCCL_MNNVL_ENABLE": "1"}, False, ("NVLink between hosts",)),
        ({"NCCL_COLLNET_ENABLE": "1"}, False, ("CollNet",)),
        ({"NCCL_GIN_ENABLE": "1"}, False, ("GPU-initiated transfers",)),
        ({"NCCL_RMA_DISABLE": "0"}, False, ("one-sided transfers",)),
        ({"NCCL_RMA_DISABLE": "1"}, False, ()),
    ],
)
def test_prefer_names_what_is_not_sealed(env: Any, between_hosts: bool, ways: tuple[str, ...]) -> None:
    decided = decide("prefer", NcclFacts(True, env, "2.28.9", False, between_hosts), PLUGIN)
    assert decided.plain_ways == ways
    assert all(way in decided.words for way in ways) and ("plain" in decided.words) is bool(ways)


@pytest.mark.parametrize("version", ["", "2.19.3", "2.32.3", "3.0", "unknown"])
def test_a_version_that_is_new_enough_or_not_known_is_no_obstacle(version: str) -> None:
    assert decide("require", facts(version=version), PLUGIN).sealed


def test_a_process_whose_environment_muster_has_set_already_is_not_refused() -> None:
    """A second session in a process, or a program that is started again."""
    first = decide("require", facts(), PLUGIN)
    again = decide("require", NcclFacts(True, first.environment, "2.28.9"), PLUGIN)
    assert again.sealed and again.environment == first.environment
