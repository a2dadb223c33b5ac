"""A flood of TLS hellos beside a running job."""
