"""The jobs of a scheduler: their drivers and journals."""
