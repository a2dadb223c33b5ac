"""The web page for operators (jobs, members, plots, faults), and the report of a run."""
