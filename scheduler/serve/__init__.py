"""The scheduler's servers: gRPC, health, metrics, systemd."""
