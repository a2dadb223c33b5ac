"""The jobs of a scheduler: their drivers, streams and journals."""
