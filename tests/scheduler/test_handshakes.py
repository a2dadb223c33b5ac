"""gRPC's trace of handshakes, read: in every format that gRPC has had, in pieces, and among other lines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.handshakes import HUNG_UP, MAX_LINE_BYTES, REASONS, TIMED_OUT, Failure, TraceReader, explain

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
OTHERS = (
    "E1121 16:46:26.925122    4965 tcp_posix.cc:12] something is wrong: UNKNOWN\n" + TRACE,
    "malloc(): corrupted top size\n",
    "\n",
    "I am no record\n",
    "F1121 16:46:26.925122    4965 check.cc:1] Check failed: false\n",
)


def read(text: str, reader: TraceReader | None = None) -> tuple[list[Failure], str]:
    failures, others = (reader or TraceReader()).feed(text.encode())
    return failures, others.decode()


@pytest.mark.parametrize("make", [failed, failed_in_1_76])
def test_a_failure_is_found_once_with_its_address(make: object) -> None:
    assert callable(make)
    [failure], others = read(make(VERIFY + "self signed certificate"))
    assert others == ""
    assert failure.reason == "unknown_ca"
    assert failure.peer == "10.0.0.9:41234"
    assert failure.host == "10.0.0.9"
    assert failure.text == (
        "The TLS handshake with 10.0.0.9:41234 failed: its certificate is of an authority not trusted here"
        " (self signed certificate). Both sides need certificates of one authority in ca_cert_path."
    )


def test_an_ipv6_address_is_written_as_everywhere() -> None:
    [failure], _ = read(failed(VERIFY + "certificate has expired", "ipv6:%5B2001:db8::7%5D:41234"))
    assert failure.peer == "[2001:db8::7]:41234"
    assert failure.host == "[2001:db8::7]"


@pytest.mark.parametrize(
    ("error", "reason", "words"),
    [
        (VERIFY + "certificate has expired", "expired", "has expired. Renew it"),
        (VERIFY + "certificate is not yet valid", "not_yet_valid", "is not valid yet"),
        (VERIFY + "unable to get local issuer certificate", "unknown_ca", "(unable to get local issuer"),
        (VERIFY + "unsupported certificate purpose", "wrong_use", "not issued for use as a client"),
        (VERIFY + "path length constraint exceeded", "bad_certificate", "path length constraint exceeded."),
        ("OPENSSL_internal:PEER_DID_NOT_RETURN_A_CERTIFICATE: x", "no_certificate", "showed no certificate"),
        ("OPENSSL_internal:HTTP_REQUEST: x", "plaintext_http", "HTTP in plaintext"),
        ("OPENSSL_internal:WRONG_VERSION_NUMBER: x", "no_tls", "does not speak TLS"),
        ("OPENSSL_internal:NO_SHARED_CIPHER: x", "no_common_settings", "(no shared cipher)"),
        ("OPENSSL_internal:TLSV1_ALERT_UNKNOWN_CA: x", "refused_us", "(tlsv1 alert unknown ca)"),
        ("OPENSSL_internal:BAD_PACKET_LENGTH: x", "refused_us", "refused this scheduler"),
        ("Handshake read failed (Socket closed)", HUNG_UP, "it hung up (Socket closed)"),
        ("OPENSSL_internal:SOMETHING_NEW: x", "other", "failed: something new."),
        ("Nobody has seen this before", "other", "failed: Nobody has seen this before."),
    ],
)
def test_each_reason_has_its_words(error: str, reason: str, words: str) -> None:
    failure = explain(error, "10.0.0.9:1")
    assert failure.reason == reason
    assert reason in REASONS
    assert words in failure.text


def test_a_timeout_is_told_but_not_the_end_of_what_we_stop_ourselves() -> None:
    reader = TraceReader()
    [failure], others = read(TIMEOUT + failed(CLOSING, shutdown="true"), reader)
    assert (failure.reason, failure.peer, others) == (TIMED_OUT, "10.0.0.9:41234", "")
    assert read(failed(CLOSING, shutdown="true"), reader) == ([], "")


def test_healthy_connections_say_nothing() -> None:
    assert read(HEALTHY) == ([], "")


@pytest.mark.parametrize("other", OTHERS)
def test_every_other_line_stays_as_it_is(other: str) -> None:
    failures, others = read(HEALTHY.removesuffix("\n") + "\n" + failed(CLOSING) + "x\n" + other + HEALTHY)
    assert others == "x\n" + other
    assert len(failures) == 1


def test_pieces_of_any_length_make_no_difference() -> None:
    text = (HEALTHY + failed(VERIFY + "certificate has expired") + "".join(OTHERS[:2]) + HEALTHY).encode()
    whole = TraceReader().feed(text)
    for length in (1, 7, 100):
        reader, failures, others = TraceReader(), list[Failure](), b""
        for begin in range(0, len(text), length):
            found, passed = reader.feed(text[begin : begin + length])
            failures, others = failures + found, others + passed
        assert (failures, others) == whole


def test_a_line_without_end_is_kept_only_so_long() -> None:
    reader = TraceReader()
    assert reader.feed(b"half a line") == ([], b"")
    assert reader.unfinished
    assert reader.rest() == b"half a line"
    assert not reader.unfinished
    assert reader.feed(b"x" * (MAX_LINE_BYTES + 1)) == ([], b"x" * (MAX_LINE_BYTES + 1))


def test_nothing_of_a_peer_forges_or_floods_a_line() -> None:
    [failure], _ = read(failed("\x1b[2J\x00" + "x" * 5000, "ipv4:1.2.3.4%0AERROR%20forged:1"))
    assert failure.text.isprintable()
    assert failure.peer == "1.2.3.4\\nERROR forged:1"
    assert len(failure.text) < 500
    [failure], _ = read(failed(VERIFY + "x" * 5000, "ipv4:" + "9" * 5000))
    assert len(failure.text) < 500


def test_a_failure_without_an_address_is_told_all_the_same() -> None:
    [failure], _ = read(failed(VERIFY + "certificate has expired").replace("endpoint_peer", "far"))
    assert failure.peer == "an unknown address"


@given(st.lists(st.one_of(st.binary(), st.sampled_from([HEALTHY.encode(), TRACE.encode(), *OTHERS]))))
def test_no_bytes_upset_it(pieces: list[bytes | str]) -> None:
    reader = TraceReader()
    for piece in pieces:
        failures, others = reader.feed(piece if isinstance(piece, bytes) else piece.encode())
        assert failures == []
        assert isinstance(others, bytes)


@given(st.binary().filter(lambda data: not set(data) & set(b"IWS=")))
def test_what_is_no_trace_comes_out_byte_for_byte(data: bytes) -> None:
    reader = TraceReader()
    assert reader.feed(data)[1] + reader.rest() == data
