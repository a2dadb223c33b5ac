"""Several schedulers, one of which leads: the election and the journal, both in etcd."""
