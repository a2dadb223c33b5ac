"""The time from a launch to the first AllReduce."""
