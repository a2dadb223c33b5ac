"""What the scheduler and the workers share: the wire and plain values."""
