"""The launcher of workers and, if asked, the scheduler: ``muster run``."""
