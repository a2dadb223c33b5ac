"""Training with torch: DataParallel, its state, captured steps."""
