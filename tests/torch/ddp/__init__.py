"""What is trained with DataParallel and with torch's DistributedDataParallel, to be compared."""
