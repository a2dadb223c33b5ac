"""The pure core of the scheduler: events and `now` in, decisions out. It does no I/O of any kind."""
