"""Several schedulers of which one leads: the election and the journal, both in etcd."""
