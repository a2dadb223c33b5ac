"""The scheduler's servers: gRPC, health and metrics."""
