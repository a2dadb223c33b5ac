"""Certificates: makes, checks, renews and revokes the certificates by which processes are authenticated.

Import what you need from the modules; this package imports nothing by itself, so that a worker's start
stays quick: ``config`` needs the standard library alone, ``pki`` and most of ``runtime`` need
``cryptography``, only ``runtime.grpc_credentials`` needs ``grpc``.
"""

# By the link at a checkout's top: the same module under this name, not a second one.
if __name__ == "certs":
    import sys
    from importlib import import_module

    sys.modules[__name__] = import_module("muster.certs")
