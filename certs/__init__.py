"""Certificates: who is who, and who may speak.

Import what you need from the modules; this package imports nothing by itself, so that a worker's
start stays quick: :mod:`certs.config` needs the standard library alone, :mod:`certs.store` and
:mod:`certs.tls` need ``cryptography``, only :mod:`certs.grpc_credentials` needs ``grpc``.
"""
