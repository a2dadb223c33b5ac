"""gRPC's trace of handshakes, read in every format that gRPC has had; floods of failures become few lines."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.scheduler.audit.grpc_trace import (
    HUNG_UP,
    INTERVAL_S,
    MAX_HOSTS,
    REASONS,
    TIMED_OUT,
    Failure,
    Thinner,
    TraceReader,
    explain,
)
from muster.wire.grpc_stderr import GrpcRecord, record_of

STAMP = "I1121 16:44:06.378199    4012 "
TRACE = "=== Source Location Trace: === \nsrc/core/util/status_helper.cc:68\n"
VERIFY = "Ssl handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL routines:" + (
    "OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: "
)
ARGUMENTS = (
    "index=2, args={endpoint=0x7f34, args={grpc.experimental.event_engine=0x56, "
    "grpc.internal.endpoint_local_address=ipv4:127.0.0.1:35037, "
    "grpc.internal.endpoint_peer_address=%s, grpc.resource_quota=0x56}, exit_early=0}\n"
)
PEER = "ipv4:10.0.0.9:41234"


def failed(error: str, peer: str = PEER, *, shutdown: str = "false") -> str:
    """The records of a failed handshake, as gRPC 1.85 writes them."""
    return (
        f"{STAMP}ssl_transport_security.cc:2563] Handshake failed with error {error}\n"
        f"{STAMP}handshaker.cc:155] CallNextHandshakerLocked: error=UNKNOWN: {error}: OK\n{TRACE}"
        f" shutdown={shutdown} {ARGUMENTS % peer}"
        f"{STAMP}channel_trace.h:396] handshake manager 0x7f: Failed with error: {error}: OK\n{TRACE}\n"
    )


def failed_in_1_76(error: str) -> str:
    """The same of gRPC 1.76: another time, and all on one line."""
    stamp = "I0000 00:00:1795279875.515530    5608 "
    return (
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
        f"{stamp}ssl_transport_security.cc:1884] Handshake failed with error {error}\n"
        f"{stamp}handshaker.cc:150] CallNextHandshakerLocked: error=UNKNOWN: {error} "
        f"shutdown=false {ARGUMENTS % PEER}"
        f"{stamp}channel_trace.h:396] handshake manager 0x7f82: Failed with error: UNKNOWN: {error}\n"
    )


HEALTHY = (
    "W1121 16:46:26.925122    4965 log.cc:102] Log level INFO is not suitable for production.\n"
    f"{STAMP}trace.cc:91] gRPC Tracers: handshaker\n"
    f"{STAMP}handshaker.cc:80] handshake_manager 0x7f03: adding handshaker security [0x7f03] at index 1\n"
    f"{STAMP}handshaker.cc:155] CallNextHandshakerLocked: error=OK shutdown=false {ARGUMENTS % PEER}"
    f"{STAMP}channel_trace.h:396] handshake manager 0x7f03:  calling handshaker security at index 1\n"
)
TIMEOUT = (
    f"{STAMP}channel_trace.h:396] handshake manager 0x7f: Shutdown called: UNKNOWN: Handshake timed out\n"
    f"{TRACE}\n{STAMP}channel_trace.h:396] handshake manager 0x7f: Shutting down handshaker security\n"
)
CLOSING = "Handshake read failed (Endpoint closing)"


def records(text: str) -> list[bytes]:
    """The records of a trace, each as gRPC writes it: at once."""
    return [piece.encode() for piece in re.split(r"(?m)^(?=[IWEF]\d{4} |WARNING: All)", text) if piece]


def read(text: str, reader: TraceReader | None = None) -> list[Failure]:
    reader, failures = reader or TraceReader(), []
    for written in records(text):
        record = record_of(written)
        assert record is not None, written
        failures.append(reader.read(record))
    return [failure for failure in failures if failure is not None]


@pytest.mark.parametrize("make", [failed, failed_in_1_76])
def test_a_failure_is_found_once_with_its_address(make: Callable[[str], str]) -> None:
    [failure] = read(make(VERIFY + "self signed certificate"))
    assert failure.reason == "unknown_ca"
    assert failure.peer == "10.0.0.9:41234"
    assert failure.host == "10.0.0.9"
    assert failure.text == (
        "The TLS handshake with 10.0.0.9:41234 failed: its certificate is of an authority not trusted here"
        " (self signed certificate). Both sides need certificates of one authority in ca_cert_path."
    )


def test_an_ipv6_address_is_written_as_everywhere() -> None:
    [failure] = read(failed(VERIFY + "certificate has expired", "ipv6:%5B2001:db8::7%5D:41234"))
    assert failure.peer == "[2001:db8::7]:41234"
    assert failure.host == "[2001:db8::7]"


@pytest.mark.parametrize(
    ("error", "reason", "words"),
    [
        (VERIFY + "unable to get local issuer certificate", "unknown_ca", "(unable to get local issuer"),
        (VERIFY + "unsupported certificate purpose", "wrong_use", "not issued for use as a client"),
        (VERIFY + "path length constraint exceeded", "bad_certificate", "path length constraint exceeded."),
        ("OPENSSL_internal:NO_SHARED_CIPHER: x", "no_common_settings", "(no shared cipher)"),
        ("OPENSSL_internal:TLSV1_ALERT_UNKNOWN_CA: x", "refused_us", "(tlsv1 alert unknown ca)"),
        ("OPENSSL_internal:BAD_PACKET_LENGTH: x", "refused_us", "refused this scheduler"),
        ("Handshake read failed (Socket closed)", HUNG_UP, "it hung up (Socket closed)"),
        ("OPENSSL_internal:SOMETHING_NEW: x", "other", "failed: something new."),
        ("Nobody has seen this before", "other", "failed: Nobody has seen this before."),
    ],
)
def test_reasons_without_a_test_with_real_tls_have_their_words(error: str, reason: str, words: str) -> None:
    failure = explain(error, "10.0.0.9:1")
    assert failure.reason == reason
    assert reason in REASONS
    assert words in failure.text


def test_a_timeout_is_told_but_not_the_end_of_what_we_stop_ourselves() -> None:
    reader = TraceReader()
    [failure] = read(TIMEOUT + failed(CLOSING, shutdown="true"), reader)
    assert (failure.reason, failure.peer) == (TIMED_OUT, "10.0.0.9:41234")
    assert read(failed(CLOSING, shutdown="true"), reader) == []


def test_healthy_connections_say_nothing() -> None:
    assert read(HEALTHY) == []


def test_nothing_of_a_peer_forges_or_floods_a_line() -> None:
    [failure] = read(failed("\x1b[2J\x00" + "x" * 5000, "ipv4:1.2.3.4%0AERROR%20forged:1"))
    assert failure.text.isprintable()
    assert failure.peer == "1.2.3.4\\nERROR forged:1"
    assert len(failure.text) < 500
    [failure] = read(failed(VERIFY + "x" * 5000, "ipv4:" + "9" * 5000))
    assert len(failure.text) < 500


def test_a_failure_without_an_address_is_told_all_the_same() -> None:
    [failure] = read(failed(VERIFY + "certificate has expired").replace("endpoint_peer", "far"))
    assert failure.peer == "an unknown address"


@given(st.binary(), st.booleans())
def test_no_bytes_upset_it(data: bytes, begins_like_a_failure: bool) -> None:
    begin = b"CallNextHandshakerLocked: error=" if begins_like_a_failure else b""
    failure = TraceReader().read(GrpcRecord("I", "handshaker.cc:155", begin + data))
    assert failure is None or failure.text.isprintable()


@pytest.mark.parametrize("level", "IWEF")
def test_a_record_within_another_tells_of_nothing(level: str) -> None:
    """As a stranger sends it: as his server's name, with line breaks."""
    reader = TraceReader()
    for text in (failed(VERIFY + "certificate has expired"), TIMEOUT):
        record = record_of(f"{level}{STAMP[1:]}a.cc:1] a name:\n{text}".encode())
        assert record is not None
        assert record.level == level
        assert reader.read(record) is None
    assert read(failed(CLOSING, shutdown="true"), reader) == []  # nor was there a handshake that timed out


def failure(host: str = "10.0.0.9", reason: str = "expired", port: int = 1) -> Failure:
    return Failure(reason, f"{host}:{port}", f"{reason} {host}:{port}")


def test_the_first_of_an_address_is_told_at_once_and_the_rest_as_a_count_once_in_an_interval() -> None:
    thinner = Thinner()
    assert thinner.add(failure(), 100.0) == [failure()]
    for port in range(214):
        assert thinner.add(failure(reason="no_tls" if port < 200 else "expired", port=port), 101.0) == []
    assert thinner.add(failure("10.0.0.10"), 101.0) == [failure("10.0.0.10")]
    assert thinner.next_s() == 100.0 + INTERVAL_S
    text = "TLS handshakes failed: 214 more from 10.0.0.9 within 10 s (200 no_tls, 14 expired)."
    assert thinner.add(failure(), 111.0) == [Failure("no_tls", "10.0.0.9", text, 214)]


def test_a_single_one_is_told_in_full() -> None:
    thinner = Thinner()
    thinner.add(failure(), 100.0)
    thinner.add(failure(port=2, reason="no_tls"), 100.0)
    assert list(thinner.due(200.0)) == [failure(port=2, reason="no_tls")]
    assert thinner.next_s() is None


def test_who_just_hangs_up_takes_no_line_from_the_others() -> None:
    thinner = Thinner()
    assert thinner.add(failure(reason=HUNG_UP), 100.0) == [failure(reason=HUNG_UP)]
    assert thinner.add(failure(), 100.0) == [failure()]


def test_only_so_many_addresses_are_remembered() -> None:
    thinner = Thinner()
    told = [thinner.add(failure(f"10.0.{i // 256}.{i % 256}"), 100.0) for i in range(10 * MAX_HOSTS)]
    assert sum(map(len, told)) == MAX_HOSTS + 1  # all others count as one address
    [line] = thinner.due(float("inf"))
    assert line.count == 9 * MAX_HOSTS - 1
    assert f"{9 * MAX_HOSTS - 1} more from other addresses" in line.text
