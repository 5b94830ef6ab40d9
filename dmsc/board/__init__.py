"""What `dmsc routes` and `dmsc top` show: from buckets, samples and events, as anyone may hear them."""
