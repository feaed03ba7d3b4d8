"""Programs that the benchmarks run inside a development cluster; each is copied there as a single file."""
