"""The example job of ``muster train``: its launch, its data and what it shows."""
