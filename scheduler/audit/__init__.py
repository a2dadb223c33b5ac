"""What a scheduler logs of refusals and failed handshakes."""
