"""A soak test: hours of kills, stops, cuts and floods, with every step checked."""
