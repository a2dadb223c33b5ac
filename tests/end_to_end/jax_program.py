"""A JAX program that knows nothing of Muster."""

import os
import pathlib
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils

jax.distributed.initialize()
rank = jax.process_index()
total = multihost_utils.process_allgather(np.array([rank + 1.0])).sum()
address = jax._src.distributed.global_state.coordinator_address
config = jax.config
key = getattr(config, "jax_mtls_key_file", None)
words = [
    f"rank {os.environ['RANK']} is process {rank} of {jax.process_count()}, sum {total:g}",
    f"devices {jax.device_count()}",
    f"key {key}",
    f"prefix {getattr(config, 'jax_mtls_peer_uri_prefix', None)}",
    f"argv {sys.argv[1:]}",
]
sys.stdout.write("".join(f"said {word}\n" for word in words))
sys.stdout.flush()
if rank == 0:
    # What a stranger gets: nothing in plaintext, and no TLS without a certificate of this job.
    import socket
    import ssl

    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as plain:
        plain.settimeout(10)
        plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
        try:
            heard = plain.recv(64)
        except OSError:
            heard = b""

    def is_let_in(certificate: pathlib.Path | None = None) -> bool:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        if certificate is not None:
            context.load_cert_chain(certificate)
        try:
            with context.wrap_socket(socket.create_connection((host, int(port)), 10)) as sock:
                sock.settimeout(10)
                return bool(sock.recv(1))
        except OSError:
            return False

    strangers = sorted(pathlib.Path(os.environ["TEST_STRANGERS"]).glob("*.pem"))
    for each in strangers:
        sys.stdout.write(f"said {each.stem} is let in: {is_let_in(each)}\n")
    entered = is_let_in()
    sys.stdout.write(f"said plaintext {heard[:9]!r} stranger {entered}\n")
    sys.stdout.flush()
multihost_utils.sync_global_devices("end")
jax.distributed.shutdown()
