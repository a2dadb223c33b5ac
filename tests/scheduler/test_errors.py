"""Errors: each kind has its gRPC code, and a fault of ours reveals nothing to a caller."""

from __future__ import annotations

import grpc
import pytest

from muster.scheduler import __version__, errors


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.MalformedError, "INVALID_ARGUMENT"),
        (errors.UnauthenticatedError, "UNAUTHENTICATED"),
        (errors.NotPermittedError, "PERMISSION_DENIED"),
        (errors.NotFoundError, "NOT_FOUND"),
        (errors.LimitError, "RESOURCE_EXHAUSTED"),
        (errors.TooSlowError, "DEADLINE_EXCEEDED"),
        (errors.StoppingError, "UNAVAILABLE"),
        (errors.SchedulerError, "INTERNAL"),
    ],
)
def test_codes(kind: type[errors.SchedulerError], code: str) -> None:
    error = kind("It is so.", remedy="Do this.")
    assert errors.status_of(error) == (grpc.StatusCode[code], "It is so. Do this.")
    assert (error.message, error.remedy) == ("It is so.", "Do this.")


def test_a_fault_tells_nothing() -> None:
    code, text = errors.status_of(KeyError("password"))
    assert code is grpc.StatusCode.INTERNAL
    assert "password" not in text


def test_a_wrong_setting_ends_with_two() -> None:
    assert errors.SchedulerSettingsError("x").exit_code == 2
    assert errors.BindError("x").exit_code == 1


def test_the_version_is_the_packages() -> None:
    from importlib.metadata import version

    assert version("muster-rendezvous") == __version__
