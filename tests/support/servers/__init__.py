"""Storage servers on loopback, for tests: real ones, stubs, and a proxy that counts requests and makes faults."""
