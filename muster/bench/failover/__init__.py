"""Several schedulers on etcd: what their deaths cost a job."""
