"""What `dmsc routes` and `dmsc top` show: the overview that gateways serve, as documents and as tables."""
