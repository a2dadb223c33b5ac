"""The speed of AllReduce."""
