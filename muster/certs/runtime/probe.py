"""Finds out whether a server speaks TLS, which gRPC does not say: its error is "Socket closed"."""

from __future__ import annotations

import enum
import socket
import ssl

_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS_FRAME, _ALERT = 4, b"\x15\x03"

SILENT = "it accepts connections but does not answer"
"""The sentence for a time-out after the connection: a stopped process, say, whose kernel still accepts."""


class Spoken(enum.Enum):
    """The protocol that a server speaks."""

    PLAINTEXT = "HTTP/2 without TLS"
    TLS = "TLS"
    NOTHING = "nothing: it hung up"


def trusting_context() -> ssl.SSLContext:
    """A TLS context that takes any certificate, for asking a server what it is; sends no secret."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def spoken_at(host: str, port: int, timeout_s: float) -> Spoken:
    """Asks a server whether it speaks TLS; nothing is said that needs a secret.

    Args:
        host: host name or address of the server.
        port: its port.
        timeout_s: limit for each of the at most two connections, in seconds.

    Raises:
        OSError: nobody listens there, or does not answer in time.
    """
    with socket.create_connection((host, port), timeout=timeout_s) as plain:
        answer = b""
        try:
            plain.sendall(_HTTP2_HELLO)
            answer = plain.recv(9)
        except TimeoutError:
            raise TimeoutError(SILENT) from None
        except ConnectionError:
            pass
    if len(answer) >= 4 and answer[3] == _SETTINGS_FRAME and answer[0] != _ALERT[0]:
        return Spoken.PLAINTEXT
    if answer[:2] == _ALERT or _shakes_hands(host, port, timeout_s):
        return Spoken.TLS
    return Spoken.NOTHING


def _shakes_hands(host: str, port: int, timeout_s: float) -> bool:
    try:
        with (
            socket.create_connection((host, port), timeout=timeout_s) as plain,
            trusting_context().wrap_socket(plain),
        ):
            return True
    except ssl.SSLEOFError:
        return False
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except OSError:
        return False
