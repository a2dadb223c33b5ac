"""A worker's place in its job: session, stream to the scheduler, and the state machine behind them."""
