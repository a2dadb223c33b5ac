"""``muster slurm``: runs a job within a Slurm allocation, from its batch script."""
